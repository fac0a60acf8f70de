"""A watch line by line (pure)."""

from __future__ import annotations

from flanneld.errors import Retryable

#: In bytes. The history of a large cluster in one object is some MB.
_LONGEST_LINE = 64 << 20


class Lines:
    """Puts the lines of a stream together, wherever it was cut into pieces."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that this piece completes. Raises ``Retryable`` for one that never ends."""
        if b"\n" not in piece:
            self._rest.append(piece)
            self._size += len(piece)
            if self._size > _LONGEST_LINE:
                raise Retryable("the watch sends a line without end", "see what it is that answers there")
            return []
        *lines, rest = b"".join([*self._rest, piece]).split(b"\n")
        self._rest, self._size = [rest], len(rest)
        return [line for line in lines if line.strip()]

    def rest(self) -> bytes:
        """What has come of a line that no piece has completed; it is not told again."""
        rest, self._rest, self._size = b"".join(self._rest), [], 0
        return rest.strip()
