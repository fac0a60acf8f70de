"""Writer of the log that blocks the daemon for a limited time only, even if the reader is stuck."""

from __future__ import annotations

import errno
import os
import select
import time

#: Bytes that a writable pipe takes without blocking (pipe(7), PIPE_BUF).
_PIECE = 4096
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Seconds to wait for the reader to make room.
PATIENCE = 1.0


class LogWriter:
    """Writer of lines to a file descriptor. Lines that find no room in time are lost.

    Once there is room again, a line reports their number.
    """

    def __init__(self, fd: int, time_limit: float = PATIENCE) -> None:
        self._fd = fd
        self._patience = time_limit
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lost = 0
        #: True if the end of the last written line was lost.
        self._is_torn = False

    def write(self, line: str) -> None:
        """Write a line, given without its newline. Raises ``OSError`` if there is no reader."""
        # After a lost line, do not wait for this reader again.
        deadline = time.monotonic() + (0.0 if self._lost else self._patience)
        if self._lost:
            gap = "\n" if self._is_torn else ""
            lost = "1 line of the log is" if self._lost == 1 else f"{self._lost} lines of the log are"
            line = f"{gap}... {lost} lost: there was no room\n{line}"
        if self._write(f"{line}\n".encode(errors="backslashreplace"), deadline):
            self._lost, self._is_torn = 0, False
        else:
            self._lost += 1

    def _write(self, data: bytes, deadline: float) -> bool:
        rest = memoryview(data)
        while rest:
            if not self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                break
            try:
                rest = rest[os.write(self._fd, rest[:_PIECE]) :]
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                break
        self._is_torn |= 0 < len(rest) < len(data)
        return not rest
