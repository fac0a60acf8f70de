"""Files that are replaced atomically and durably."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file, also with equal content: watchers expect it.

    Raises ``OSError``; the old file is then unchanged.
    """
    _write(path, content, mode, lambda temporary: temporary.replace(path))


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Create a file with its full content in one step. Raises ``FileExistsError`` if it exists."""

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
            os.fchmod(descriptor, mode)  # fchmod ignores the umask, which the mode of open does not
            os.fsync(descriptor)
        put(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read(path: Path, limit: int, check: Callable[[os.stat_result], None] = lambda _: None) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises ``OSError``.

    ``check`` may raise an exception to refuse the open file.
    """
    # Without O_NONBLOCK, opening a FIFO in its place would block for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        check(found)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"larger than {limit} bytes")
    return content


def sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
