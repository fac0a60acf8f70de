"""Files that are replaced atomically and durably, their content as structs, and files with a key."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flanneld.errors import Fatal, Retryable, cause_of

Content = TypeVar("Content", bound=msgspec.Struct)


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


def text(path: Path) -> str:
    """Return the text of a file, such as those in /proc; empty if there is none, or it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def number(path: Path) -> int:
    """Return the number in a file, 0 if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return 0


def remove(path: Path) -> bool:
    """Remove a file. Return False if that fails."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def encode(content: msgspec.Struct, indent: int | None = None) -> str:
    """Return a struct as JSON; addresses and networks are texts."""
    return json.dumps(msgspec.to_builtins(content, enc_hook=str), indent=indent)


def decode(text: bytes, kind: type[Content]) -> Content:
    """Return the struct of a JSON text, without the keys that it does not have.

    Raises ``ValueError`` for anything else.
    """
    try:
        return msgspec.convert(json.loads(text), kind, dec_hook=_made)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _made(kind: type[Any], value: Any) -> Any:
    """Make an address or network of its text, and of nothing else."""
    if not isinstance(value, str):
        raise TypeError(f"{kind.__name__} is no text")
    return kind(value)


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


#: Bytes; no key is longer.
_LONGEST = 64 << 10
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_secret(path: Path, make: Callable[[], bytes] | None = None) -> bytes:
    """Return the content of the file. If it is missing, create it with the result of ``make``.

    Raises ``Fatal`` for a file that others can write, ``Retryable`` for one that cannot be read or created.
    """
    try:
        if make is not None and not path.exists():
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process has just created it, and its key counts
                create(path, make(), 0o400)
        return peek_secret(path)
    except OSError as error:
        remedy = "let flanneld read this file, or create it in its directory"
        raise Retryable(f"cannot keep the key in {path}: {cause_of(error)}", remedy) from None


def peek_secret(path: Path) -> bytes:
    """Return the content of the file. Raises ``OSError``, and ``Fatal`` if others can write it."""
    return read(path, _LONGEST, lambda found: _check(path, found))


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_mode & _OTHERS_WRITE:
        raise Fatal(f"others can write {path}, so its key may be theirs", f"make a new one: rm {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise Fatal(f"{path} belongs to user {found.st_uid}, so its key may be theirs", f"chown root {path}")
