"""What befalls the daemon itself, at any moment."""

from __future__ import annotations

import signal
import time

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.netns.histories.history import History, told

moments = st.integers(0, 300)  # milliseconds
#: Microseconds: it takes some thousands of them to deal with a dozen peers.
instants = st.integers(0, 10_000)


class OfTheDaemon(History):
    @rule(how=st.sampled_from([signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP]))
    @told
    def the_daemon_ends_or_is_stopped_in_its_tracks(self, how: signal.Signals) -> None:
        if how == signal.SIGSTOP:
            self.pause()
        else:
            self.end(how)

    @rule(moment=moments, killed=st.booleans())
    @told
    def the_daemon_is_started_or_goes_on(self, moment: int, killed: bool) -> None:
        self.resume()
        self.start()
        if killed:
            time.sleep(moment / 1000)  # Any moment will do.
            self.end(signal.SIGKILL)

    @rule(instant=instants, shift=st.integers(1, 50))
    @told
    def the_daemon_is_killed_amid_many_changes(self, instant: int, shift: int) -> None:
        """All of them become known to it at once."""
        self.resume()
        self.start()
        self.pause()
        self.gather_the_crowd(shift)
        self.resume()
        time.sleep(instant / 1_000_000)
        self.end(signal.SIGKILL)
