"""A door in front of etcd that a test can make stick: what bad networks and dying servers do to requests."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Literal

from tests.lab.etcd import PORT
from tests.lab.impostor import http
from tests.lab.listener import Listener, end
from tests.lab.namespace import Namespace

DOOR = 2381

#: What becomes of a request: it is ``refused`` with one of ``_REFUSALS``; it is ``lost`` before or its
#: answer ``unheard`` after etcd has dealt with it; the answer is ``broken`` off; or a watch is made to
#: ``repeat`` what it has told before.
Mishap = Literal["refused", "lost", "unheard", "broken", "repeat"]

_JSON, _HTML, _TEXT = (f"Content-Type: {kind}" for kind in ("application/json", "text/html", "text/plain"))
#: From etcd's v2 API, from the gateway of v3, and from what stands before them.
_REFUSALS = (
    http("500 Internal Server Error", '{"errorCode":300,"message":"Raft","index":0}', _JSON),
    http("503 Service Unavailable", '{"error":"etcdserver: leader changed","code":14}', _JSON),
    http("504 Gateway Timeout", '{"error":"etcdserver: request timed out","code":14}', _JSON),
    http("502 Bad Gateway", "<html>502</html>", _HTML),
    http("429 Too Many Requests", "slow down", _TEXT),
    http("404 Not Found", "404 page not found", _TEXT),
    http("200 OK", "<html>Welcome</html>", _HTML),
)
_BROKEN_AFTER = 60  # bytes: somewhere in the head, or in a line of a watch that has begun
_EARLIER = 3


class Door(Listener):
    """Passes connections on to etcd; to be used in a ``with``. Its methods may be called at any time."""

    def __init__(self, namespace: Namespace, address: str) -> None:
        super().__init__(self._pass_on, (address, DOOR), namespace)
        self._target = (address, PORT)
        self._orders = threading.Lock()
        self._troubles: list[Mishap] = []
        self._refusals = 0
        self._connections = 0
        self._lag = 0.0
        #: Cleared while answers are held back.
        self._flows = threading.Event()
        self._flows.set()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._flows.set()

    # ---- what a test orders ----------------------------------------------------------------------

    def trouble(self, trouble: Mishap, times: int = 1) -> None:
        """Make that of so many requests to come."""
        with self._orders:
            self._troubles += [trouble] * times

    def slow_down(self, seconds: float) -> None:
        """Keep each piece of an answer so long; on other connections half as long, or not at all."""
        self._lag = seconds

    def hold(self) -> None:
        """Take requests and keep the answers."""
        self._flows.clear()

    def mend(self) -> None:
        """Be a door as it should be, and give out what was kept."""
        with self._orders:
            self._troubles.clear()
        self._lag = 0.0
        self.reopen()
        self._flows.set()

    # ---- how it is done --------------------------------------------------------------------------

    def _pass_on(self, client: socket.socket) -> None:
        with self._orders:
            self._connections += 1
            number = self._connections
        with self.connected(self._target) as server:
            _Passage(client, server, self._next_trouble, lambda: self._wait(number)).run()

    def _next_trouble(self, is_watch: bool) -> tuple[Mishap | None, bytes]:
        """The first that can befall such a request, and what to answer if it is refused."""
        with self._orders:
            found = next((each for each in self._troubles if is_watch or each != "repeat"), None)
            if found:
                self._troubles.remove(found)
            if found == "refused":
                self._refusals += 1
            return found, _REFUSALS[self._refusals % len(_REFUSALS)]

    def _wait(self, number: int) -> float:
        """Until an answer may go on; how long it is to be kept after that, in seconds."""
        self._flows.wait()
        return self._lag * (number % 3) / 2


class _Passage:
    """One connection of a client, and one to etcd for it."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        next_trouble: Callable[[bool], tuple[Mishap | None, bytes]],
        wait: Callable[[], float],
    ) -> None:
        self._client = client
        self._server = server
        self._next_trouble = next_trouble
        self._wait = wait
        self._ended = threading.Event()
        #: How many bytes of the answer may still pass.
        self._left: int | None = None

    def run(self) -> None:
        """Until one side ends it."""
        back = threading.Thread(target=self._answers, daemon=True)
        back.start()
        with suppress(OSError), self._client.makefile("rb") as asked:
            while request := _read_request(asked):
                self._pass_on(request)
        self._end()
        back.join()

    def _end(self) -> None:
        self._ended.set()
        end(self._client)
        end(self._server)

    def _pass_on(self, request: bytes) -> None:
        trouble, refusal = self._next_trouble(_is_watch(request))
        match trouble:
            case "refused":
                self._client.sendall(refusal)
                return
            case "lost":
                self._end()
                return
            case "unheard":
                self._left = 0
            case "broken":
                self._left = _BROKEN_AFTER
            case "repeat":
                request = _earlier(request)
        self._server.sendall(request)

    def _answers(self) -> None:
        with suppress(OSError):
            while data := self._server.recv(65536):
                self._ended.wait(self._wait())
                if self._left is None:
                    self._client.sendall(data)
                    continue
                self._client.sendall(data[: self._left])
                self._left -= len(data)
                if self._left <= 0:
                    break
        self._end()


def _read_request(asked: BinaryIO) -> bytes:
    """One request with its body, empty at the end of the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = asked.readline()
        if not line:
            return b""
        head += line
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    return head + (asked.read(int(length[1])) if length else b"")


#: Where a watch begins: the index in a long poll of v2, the revision in a stream of v3.
_BEGIN = re.compile(rb'(waitIndex=|"start_revision": ?")(\d+)')


def _is_watch(request: bytes) -> bool:
    return _BEGIN.search(request) is not None


def _earlier(request: bytes) -> bytes:
    """The same watch, from an earlier moment, if it can be told in as many digits."""

    def back(found: re.Match[bytes]) -> bytes:
        number = str(max(1, int(found[2]) - _EARLIER)).encode()
        return found[1] + (number if len(number) == len(found[2]) else found[2])

    return _BEGIN.sub(back, request)
