"""The ways in which something can go wrong, each with a remedy an operator can act on."""

from __future__ import annotations


class FlannelError(Exception):
    """Base of all errors that flanneld raises on purpose.

    ``str(error)`` is one line: what went wrong, then, after a semicolon, what to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class Fatal(FlannelError):
    """Trying again cannot help: the daemon ends with exit status 1."""


class Retryable(FlannelError):
    """The outside world is not ready; whoever called waits and tries again.

    ``retry_after`` is how long, in seconds, the other side asks us to wait.
    """

    def __init__(self, problem: str, remedy: str = "", retry_after: float = 0.0) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class Refused(FlannelError):
    """Foreign input that cannot be used: logged once with its key, and the rest goes on."""


class Unsafe(Refused):
    """A lease that would harm this host: what led to its node is withdrawn until the obstacle is gone."""
