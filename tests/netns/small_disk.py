"""A disk that is soon full: some pages of memory, seen by one daemon, and through it by a test (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path

from tests.lab import Node, own_command, wait_for
from tests.netns.strangers import PATIENT

#: Room for the few small files of a daemon.
PAGES = 8
FILLER = "filler"


class SmallDisk:
    """Mounted below a node's directory by the command that becomes the daemon, so that it goes with it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.directory = node.directory / "small"
        self.directory.mkdir()

    def command(self, preparation: str = "true", redirection: str = "") -> list[str]:
        """The daemon on that disk; first the shell does something there."""
        mount = f"mount -t tmpfs -o size={PAGES * os.sysconf('SC_PAGE_SIZE')},mode=755 tmpfs {self.directory}"
        script = f'{mount} && cd {self.directory} && {preparation} && exec "$@" {redirection}'
        return ["sh", "-c", script, "sh", *own_command()]

    @property
    def seen(self) -> Path:
        """The same directory, through the process that sees it."""
        return Path(f"/proc/{self._node.pid}/root{self.directory}")

    def wait_for_files(self, *names: str) -> None:
        """Wait until there are just these; somebody may be about to find that there is no room for more.

        Of the daemon's own files lock and socket do not count, which take no room, nor the history of events,
        which the daemon does without.
        """

        def found() -> set[str]:
            return {
                path.name for path in self.seen.iterdir() if path.suffix not in (".sock", ".lock", ".events")
            }

        wait_for(lambda: found() == set(names), PATIENT, f"just these files: {names}")

    def fill(self) -> None:
        """Take all room, to the last byte."""
        with (self.seen / FILLER).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return

    def make_room(self) -> None:
        (self.seen / FILLER).unlink()


#: What fills the disk before the daemon starts.
FILL = f"(cat /dev/zero >{FILLER} 2>/dev/null || true)"
