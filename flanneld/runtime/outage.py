"""What the log says of something that fails, goes on failing, and works again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable

from flanneld.errors import Retryable, remembered
from flanneld.runtime import clock

#: Seconds between two lines about the same.
PACE = 60.0


class Pace:
    """Lets each thing be said once a minute. For one thread, and for few different things."""

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._said: dict[Hashable, float] = {}

    def allows(self, what: Hashable) -> bool:
        """Whether it may be said now, which is then counted as done."""
        now = self._now()
        if now - self._said.get(what, -math.inf) < PACE:
            return False
        self._said[what] = now
        return True

    def forget(self, what: Hashable) -> None:
        """Let it be said at once when it happens next."""
        self._said.pop(what, None)


class Outage:
    """Says that something fails, once a minute that it still does, whatever the reasons, and that it is over.

    The reason follows ``failing`` in the log. For one thread, but any may ask for the ``problem``.
    """

    def __init__(
        self, log: logging.Logger, failing: str, working: str, now: Callable[[], float] = clock.now
    ) -> None:
        self._log = log
        self._failing = failing
        self._working = working
        self._now = now
        self._pace = Pace(now)
        self._since: float | None = None
        self._problem: Retryable | None = None
        self._is_told = False

    @property
    def problem(self) -> Retryable | None:
        """The last failure, None if what happened last was none."""
        return self._problem

    def failed(self, reason: Retryable) -> None:
        """It has failed, or failed again."""
        now = self._now()
        self._problem = remembered(reason)
        if self._since is None:
            self._since = now
        if self._pace.allows(self._failing):
            lasted = now - self._since
            since = f" (for {lasted:.0f} s now)" if lasted >= 1 else ""
            self._log.warning("%s: %s%s", self._failing, reason, since, stacklevel=2)
            self._is_told = True

    def answered(self) -> bool:
        """It seems to work: say so if the log has it that it does not. Tells whether that was said.

        What fails soon after is the same outage, as one that comes and goes must not fill the log.
        """
        return self._works()

    def over(self) -> bool:
        """It works for certain: what fails from now on is another outage. Otherwise as ``answered``."""
        self._pace.forget(self._failing)
        return self._works()

    def _works(self) -> bool:
        since, self._since = self._since, None
        self._problem = None
        told, self._is_told = self._is_told, False
        if told and since is not None:
            lasted = self._now() - since
            self._log.info("%s after %.0f s", self._working, lasted, stacklevel=3)
        return told
