"""A ping that runs while something else happens, and counts exactly what it lost."""

from __future__ import annotations

import math
import os
import re
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Self

from tests.lab.namespace import Namespace
from tests.lab.wait import PATIENCE, wait_for

REPLY = re.compile(r"icmp_seq=(\d+) ttl=")
TIME = re.compile(r"icmp_seq=(\d+) ttl=\d+ time=([\d.]+) ms")
SENT = re.compile(r"(\d+) packets transmitted")


class Ping:
    """Pings ``target`` every ``interval`` seconds until ``stop``, with at most 65,000 packets."""

    def __init__(self, namespace: Namespace, target: str, output: Path, interval: float = 0.02) -> None:
        self._output = output
        self._interval = interval
        self._answered_to_the_end = False
        environment = {**os.environ, "LC_ALL": "C"}
        with output.open("wb") as file:
            self._process = namespace.start(
                "ping", "-n", "-D", "-i", str(interval), target, output=file, environment=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def replies(self) -> set[int]:
        """The sequence numbers answered so far; the first is 1."""
        return {int(number) for number in REPLY.findall(self._text())}

    def wait_for_replies(self, more: int = 10, deadline: float = 5) -> None:
        """Wait until so many more packets have been answered than now."""
        goal = len(self.replies()) + more
        wait_for(lambda: len(self.replies()) >= goal, deadline, f"{more} more replies to the ping")

    def stop(self) -> None:
        """Stop after one more reply, so that a packet in flight is not taken for a lost one."""
        if self._process.poll() is not None:
            return
        last = max(self.replies(), default=0)
        with suppress(AssertionError):
            # Where nothing was ever answered, nothing is on its way back either.
            patience = 10 if last else 0.2
            wait_for(lambda: max(self.replies(), default=0) > last, patience, "a last reply")
            self._answered_to_the_end = True
        self._process.send_signal(signal.SIGINT)
        self._process.wait(10 * PATIENCE)

    def sent(self) -> int:
        """How many packets left; stops the ping."""
        self.stop()
        if self._answered_to_the_end:
            return max(self.replies())
        found = SENT.search(self._text())
        assert found, f"ping said nothing of use: {self._text()[-500:]}"
        return int(found[1])

    def lost(self) -> int:
        """How many packets got no reply; stops the ping. A failed test shows the replies around each gap."""
        lost = self.sent() - len(self.replies())
        replies = [line for line in self._text().splitlines() if REPLY.search(line)] if lost else []
        for one, following in pairwise(sorted(replies, key=_number)):
            if _number(following) > _number(one) + 1:
                print(f"no reply between\n    {one}\n    {following}")
        return lost

    def longest_outage(self, late: float = 1.0) -> float:
        """How many seconds passed at most without a reply, until the last one; at least ``late``.

        They are counted in pings, not by the clock: a machine that stands still sends none meanwhile. A reply
        after more than ``late`` seconds is none. Its request may have waited on a node until there was a way.
        """
        prompt = sorted(int(number) for number, ms in TIME.findall(self._text()) if float(ms) < 1000 * late)
        runs = (later - number - 1 for number, later in pairwise([0, *prompt]))
        return max(runs, default=math.inf) * self._interval + late

    def _text(self) -> str:
        return self._output.read_text(errors="replace")


def _number(reply: str) -> int:
    found = REPLY.search(reply)
    return int(found[1]) if found else 0
