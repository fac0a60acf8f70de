"""Where the log goes: whoever reads it, or does not, must not hold the daemon up."""

from __future__ import annotations

import errno
import os
import select
import time

#: What a pipe that can be written to takes without a wait, in bytes (pipe(7), PIPE_BUF).
_PIECE = 4096
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
#: How long a reader may take to make room, in seconds.
PATIENCE = 1.0


class LogWriter:
    """Writes lines to a file descriptor. Those for which there is no room in time are lost.

    When there is room again, a line says how many they were.
    """

    def __init__(self, fd: int, patience: float = PATIENCE) -> None:
        self._fd = fd
        self._patience = patience
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lost = 0
        #: Of the last line that was written, the end was lost.
        self._is_torn = False

    def write(self, line: str) -> None:
        """Write a line, given without its end. Raises ``OSError`` if there is no reader."""
        # Who has made us wait in vain is not waited for again.
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
