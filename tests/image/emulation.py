"""Emulation of other processors by QEMU, registered with the kernel's binfmt_misc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.namespace import run

#: The kernel's files, Documentation/admin-guide/binfmt-misc.rst; and Debian's lines for ``register``.
BINFMT_MISC = Path("/proc/sys/fs/binfmt_misc")
LINES = Path("/usr/lib/binfmt.d")


@contextmanager
def emulated(processor: str) -> Iterator[None]:
    """Let the kernel run the programs of a processor, named as QEMU does.

    A handler that the host has already is used, and stays.
    """
    if not (BINFMT_MISC / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT_MISC))
    name = f"qemu-{processor}"
    handler = BINFMT_MISC / name
    if handler.exists():
        yield
        return
    (BINFMT_MISC / "register").write_text((LINES / f"{name}.conf").read_text())
    try:
        yield
    finally:
        handler.write_text("-1")
