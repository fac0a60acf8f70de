"""An HTTP answer that does not end, line by line.

urllib3 gives up a connection on which nothing came for a while; here that is no reason to.
"""

from __future__ import annotations

from http.client import HTTPException, HTTPMessage, parse_headers
from io import BytesIO
from socket import socket
from urllib.parse import urlsplit

from flanneld.subnet.watch_lines import Lines

#: Nobody has more to say before the first line of an answer.
_LONGEST_HEAD = 65536
_SIZE = 262_144
#: The line with the size of a chunk; extensions, which nobody uses, included.
_LONGEST_SIZE = 1024


class Stream:
    """One request over a socket, and the lines of its answer. Raises ``OSError`` and ``HTTPException``."""

    def __init__(self, sock: socket) -> None:
        self._sock = sock
        self._raw = b""
        self._lines = Lines()
        self._ready: list[bytes] = []
        self._chunks: Chunks | None = None
        self.status = 0
        self.headers = HTTPMessage()

    def post(self, url: str, headers: dict[str, str], body: str) -> None:
        """Send a request, and receive the head of the answer."""
        parts = urlsplit(url)
        data = body.encode()
        lines = [
            f"POST {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            f"Content-Length: {len(data)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
        while b"\r\n\r\n" not in self._raw:
            if len(self._raw) > _LONGEST_HEAD:
                raise HTTPException("BadStatusLine: no head")
            self._raw += self._receive()
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        self._read_head(head)

    def line(self, timeout: float) -> bytes | None:
        """The next line that is not empty; None if there is none within so many seconds.

        Raises ``Retryable``, too, for one that never ends.
        """
        self._sock.settimeout(timeout)
        while not self._ready:
            if self._chunks and self._chunks.ended:
                return self._last_line()
            if not self._raw:
                try:
                    self._raw = self._receive()
                except TimeoutError:
                    return None
            data, self._raw = self._raw, b""
            self._ready = self._lines.feed(self._unpacked(data))
        return self._ready.pop(0)

    def close(self) -> None:
        self._sock.close()

    def _last_line(self) -> bytes:
        """The gateway says why a watch has ended in a line that it does not end."""
        if line := self._lines.rest():
            return line
        raise HTTPException("the chunks have ended")

    def _receive(self) -> bytes:
        data = self._sock.recv(_SIZE)
        if not data:
            raise ConnectionResetError("the answer has ended")
        return data

    def _unpacked(self, data: bytes) -> bytes:
        return self._chunks.feed(data) if self._chunks else data

    def _read_head(self, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise HTTPException("BadStatusLine")
        self.status = int(words[1])
        self.headers = parse_headers(BytesIO(rest + b"\r\n\r\n"))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            self._chunks = Chunks()


class Chunks:
    """HTTP's chunked transfer encoding, undone (pure)."""

    def __init__(self) -> None:
        #: The last chunk has come. What came with it may say why.
        self.ended = False
        self._left = 0
        self._raw = b""

    def feed(self, data: bytes) -> bytes:
        """What is inside the chunks that have come so far. Raises ``HTTPException`` for what is none."""
        raw = self._raw + data
        found = []
        at = 0
        while at < len(raw) and not self.ended:
            if self._left:
                found.append(raw[at : at + self._left])
                at += len(found[-1])
                self._left -= len(found[-1])
                continue
            if raw[at] in b"\r\n":
                at += 1
                continue
            end = raw.find(b"\r\n", at, at + _LONGEST_SIZE)
            if end < 0:
                break
            self._left, at = _size(raw[at:end]), end + 2
            self.ended = not self._left
        self._raw = raw[at:]
        if not self._left and not self.ended and len(self._raw) >= _LONGEST_SIZE:
            raise HTTPException("BadStatusLine: no chunk")
        return b"".join(found)


def _size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError:
        size = -1
    if size < 0:
        raise HTTPException("BadStatusLine: no chunk")
    return size
