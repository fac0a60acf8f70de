"""Files with a key: created once, durably, and only trusted if no other user can write them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.runtime.files import atomic_file

#: Bytes; no key is longer.
_LONGEST = 64 << 10
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read(path: Path, make: Callable[[], bytes] | None = None) -> bytes:
    """Return the content of the file. If it is missing, create it with the result of ``make``.

    Raises ``Fatal`` for a file that others can write, ``Retryable`` for one that cannot be read or created.
    """
    try:
        if make is not None and not path.exists():
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process has just created it, and its key counts
                atomic_file.create(path, make(), 0o400)
        return peek(path)
    except OSError as error:
        remedy = "let flanneld read this file, or create it in its directory"
        raise Retryable(f"cannot keep the key in {path}: {cause_of(error)}", remedy) from None


def peek(path: Path) -> bytes:
    """Return the content of the file. Raises ``OSError``, and ``Fatal`` if others can write it."""
    return atomic_file.read(path, _LONGEST, lambda found: _check(path, found))


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_mode & _OTHERS_WRITE:
        raise Fatal(f"others can write {path}, so its key may be theirs", f"make a new one: rm {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise Fatal(f"{path} belongs to user {found.st_uid}, so its key may be theirs", f"chown root {path}")
