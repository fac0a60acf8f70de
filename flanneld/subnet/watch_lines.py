"""Line splitter for watch streams (pure)."""

from __future__ import annotations

from flanneld.errors import Retryable

#: Bytes of a line, at most. The history of a large cluster in one object takes some MB.
LONGEST_LINE = 64 << 20


class Lines:
    """Assembler of lines from the pieces of a stream."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that a piece completes. Raises ``Retryable`` for one that exceeds the limit."""
        if b"\n" not in piece:
            self._rest.append(piece)
            self._size += len(piece)
            if self._size > LONGEST_LINE:
                raise Retryable("the watch sends a line without end", "see what it is that answers there")
            return []
        *lines, rest = b"".join([*self._rest, piece]).split(b"\n")
        self._rest, self._size = [rest], len(rest)
        return [line for line in lines if line.strip()]

    @property
    def is_incomplete(self) -> bool:
        """Return True if the end of a line has yet to come."""
        return self._size > 0

    def rest(self) -> bytes:
        """Return and discard the incomplete line at the end."""
        rest, self._rest, self._size = b"".join(self._rest), [], 0
        return rest.strip()
