"""What can go wrong with an answer, ordered by a test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

End = Literal["close", "reset", "end", "stall"]

#: A cut before the first byte of the answer: what was asked for is done, and nobody hears of it.
UNANSWERED = -1


@dataclass(frozen=True, slots=True)
class Fault:
    """One disturbance of answers to matching requests; empty ``verb`` and ``resource`` match all.

    ``verb`` is one of RBAC's (get, list, watch, patch, create, update, delete), ``resource`` likewise (nodes,
    nodes/status, pods, events).
    """

    verb: str = ""
    resource: str = ""
    #: How many requests it hits; 0 for all to come.
    times: int = 1
    #: Seconds of silence before the request is dealt with.
    delay: float = 0
    #: Answer with this HTTP status and do nothing; the body is a Status object, or ``body``.
    status: int = 0
    body: str | None = None
    #: Seconds in the header Retry-After and the Status object.
    retry_after: int = 0
    #: Watches: send this line, whatever it is, and break off.
    line: str = ""
    #: Watches: send an ERROR event with a Status of this code and end the stream.
    error: int = 0
    #: Break off after so many bytes of the body, or within the first occurrence of a text, after its first
    #: byte: an accented letter is cut inside its UTF-8 sequence.
    cut: int | str | None = None
    #: How to break off: "close" or "reset" the connection in the middle of a chunk, "end" the body as if it
    #: were complete, or "stall": say nothing more and stay.
    then: End = "close"
    #: The largest chunk, 0 for those of the real server.
    chunk: int = 0
    #: Write to the socket in pieces of so many bytes, with so many seconds between them.
    piece: int = 0
    pause: float = 0

    def matches(self, verb: str, resource: str) -> bool:
        return self.verb in ("", verb) and self.resource in ("", resource)


class Cut(Exception):
    """The answer breaks off here."""

    def __init__(self, then: End) -> None:
        super().__init__(then)
        self.then = then


NONE = Fault()


class Faults:
    """The faults that wait for a request, in the order in which they were ordered."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def take(self, verb: str, resource: str) -> Fault:
        """The first that matches, used up once more; ``NONE`` without one."""
        with self._lock:
            for number, fault in enumerate(self._waiting):
                if fault.matches(verb, resource):
                    if fault.times == 1:
                        del self._waiting[number]
                    elif fault.times:
                        self._waiting[number] = replace(fault, times=fault.times - 1)
                    return fault
        return NONE
