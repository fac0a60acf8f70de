"""Files that are replaced in one step that survives a power cut."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file anew, also with equal content: watchers wait for that.

    Raises ``OSError``, and then the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)  # unlike the mode of open, not cut by the umask
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read(path: Path, limit: int) -> bytes:
    """What is in a file of at most so many bytes. Raises ``OSError``, also for what is no file."""
    # Without O_NONBLOCK, a FIFO in the file's place would stop us here for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"larger than {limit} bytes")
    return content


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
