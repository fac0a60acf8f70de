"""Journal of the extension backend: the SubnetAddCommands run so far, in a file that outlives the daemon.

It has one JSON object per line. A line is written and synced before SubnetAddCommand starts, and another
after it ended. A kill in between leaves a peer that may be set up. So a command may run twice, and none is
forgotten.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from msgspec import Struct

from flanneld.backends.extension.backend import ConfigCommand, PeerSetup
from flanneld.errors import cause_of
from flanneld.runtime import files
from flanneld.runtime.logs import Once

log = logging.getLogger(__name__)

#: Bytes of the file, at most. A peer takes a few hundred, and may have several lines.
_MAX_SIZE = 64 << 20
#: Beginning of a line about a peer that was removed.
_GONE = b'{"gone"'
#: Obsolete lines in the file before it is rewritten.
_MAX_STALE = 1000


class Progress(Enum):
    """Progress of SubnetAddCommand for a peer."""

    #: It is running, or was killed: it may have taken effect.
    BEGUN = "begun"
    FAILED = "failed"
    DONE = "done"


class JournalEntry(Struct, frozen=True, gc=False):
    """A peer for which SubnetAddCommand was run.

    ``remove`` is SubnetRemoveCommand as it was configured then. A later run with another ``base`` runs the
    command again.
    """

    setup: PeerSetup
    remove: ConfigCommand
    base: str
    stage: Progress = Progress.BEGUN


class Journal:
    """Entries by the peer's name, and their file. Used by one thread.

    The function ``base`` is called once, when first needed.
    """

    def __init__(self, path: Path, base: Callable[[], str]) -> None:
        self.path = path
        self._make_base = base
        self._base: str | None = None
        self._entries: dict[str, JournalEntry] | None = None
        self._lines = 0
        # Forces the first write to rewrite the file, which also repairs an incomplete last line.
        self._is_torn = True
        self._once = Once()

    @property
    def base(self) -> str:
        if self._base is None:
            self._base = self._make_base()
        return self._base

    def entries(self) -> dict[str, JournalEntry]:
        """Return the entries. The first call reads the file. Raises ``OSError``."""
        if self._entries is None:
            self._entries = self._load()
        return self._entries

    def begin(self, entry: JournalEntry) -> None:
        """Record that SubnetAddCommand is about to run. If this raises ``OSError``, it must not run."""
        known = self.entries()
        self._write(_line(entry), {**known, entry.setup.name: entry})
        known[entry.setup.name] = entry

    def ended(self, entry: JournalEntry) -> None:
        """Record the end of SubnetAddCommand."""
        self._afterwards(entry.setup.name, entry)

    def gone(self, name: str) -> None:
        """Record that a peer was removed."""
        self._afterwards(name, None)

    def _afterwards(self, name: str, entry: JournalEntry | None) -> None:
        """Record a fact. If it cannot be written, a later run repeats the command."""
        known = self.entries()
        if entry is None:
            known.pop(name, None)
        else:
            known[name] = entry
        try:
            self._write(_line(entry) if entry else files.encode(_Gone(name)), known)
        except OSError as error:
            problem = f"Cannot write {self.path}: {cause_of(error)}; make its directory writable"
            self._once.warn(log, "write", f"{problem}, or the next start runs commands again")

    def _write(self, line: str, entries: dict[str, JournalEntry]) -> None:
        """Append a line. Rewrite the file if its last line is incomplete or most lines are obsolete."""
        if self._is_torn or self._lines > 2 * len(entries) + _MAX_STALE:
            self.path.parent.mkdir(0o755, parents=True, exist_ok=True)
            lines = [_line(entry) for entry in entries.values()]
            files.replace(self.path, "".join(f"{line}\n" for line in lines).encode(), 0o600)
            self._lines = len(lines)
            self._is_torn = False
        else:
            self._append(f"{line}\n".encode())
            self._lines += 1
        self._once.clear("write")

    def _append(self, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._is_torn = True
        descriptor = os.open(self.path, flags, 0o600)
        try:
            while content:
                content = content[os.write(descriptor, content) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self._is_torn = False

    def _load(self) -> dict[str, JournalEntry]:
        entries: dict[str, JournalEntry] = {}
        with suppress(FileNotFoundError):
            # An incomplete last line was cut off by a kill, before its command started.
            for line in files.read(self.path, _MAX_SIZE).split(b"\n")[:-1]:
                self._take(line, entries)
        return entries

    def _take(self, line: bytes, entries: dict[str, JournalEntry]) -> None:
        try:
            if line.startswith(_GONE):
                entries.pop(files.decode(line, _Gone).gone, None)
            else:
                entry = _entry(line)
                entries[entry.setup.name] = entry
        except ValueError:
            self._once.warn(log, "line", f"Ignoring a malformed line of {self.path}")


class _Gone(Struct, frozen=True, gc=False):
    """A line that says that a peer was removed."""

    gone: str


class _Line(Struct, frozen=True, gc=False):
    """A line with an entry."""

    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None
    data: str
    remove: str
    shell: bool
    base: str
    stage: Progress


def _line(entry: JournalEntry) -> str:
    setup, remove = entry.setup, entry.remove
    peer = (setup.ipv4_subnet, setup.ipv6_subnet, setup.public_ip, setup.public_ipv6, setup.data)
    return files.encode(_Line(*peer, remove.text, remove.shell, entry.base, entry.stage))


def _entry(line: bytes) -> JournalEntry:
    told = files.decode(line, _Line)
    setup = PeerSetup(told.subnet, told.ipv6_subnet, told.public_ip, told.public_ipv6, told.data)
    if setup.subnet is None:
        raise ValueError
    return JournalEntry(
        setup, ConfigCommand("SubnetRemoveCommand", told.remove, told.shell), told.base, told.stage
    )
