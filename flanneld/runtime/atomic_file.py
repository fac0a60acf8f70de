"""Files that are replaced in one step that survives a power cut."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file anew, also with equal content: watchers wait for that.

    Raises ``OSError``, and then the old file is as it was.
    """
    _write(path, content, mode, lambda temporary: temporary.replace(path))


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Make a file with all of its content at once. Raises ``FileExistsError`` if there is one."""

    def put(temporary: Path) -> None:
        path.hardlink_to(temporary)
        temporary.unlink()

    _write(path, content, mode, put)


def _write(path: Path, content: bytes, mode: int, put: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)  # unlike the mode of open, not cut by the umask
            os.fsync(descriptor)
        put(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read(path: Path, limit: int, check: Callable[[os.stat_result], None] = lambda _: None) -> bytes:
    """Return what is in a file of at most ``limit`` bytes. Raises ``OSError``, also for what is no file.

    ``check`` may refuse the open file by an exception.
    """
    # Without O_NONBLOCK, a FIFO in the file's place would stop us here for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        check(found)
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
