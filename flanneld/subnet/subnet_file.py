"""subnet.env: what CNI plugins and scripts read about this node, and what we remember of our last run."""

from __future__ import annotations

import io
import logging
import math
import threading
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from flanneld.compat.flags import quoted
from flanneld.compat.glog import Once
from flanneld.errors import Retryable
from flanneld.model import FAMILIES, IPNetwork, LeaseKey
from flanneld.runtime import atomic_file, clock
from flanneld.runtime.backoff import Backoff
from flanneld.runtime.outage import Pace

log = logging.getLogger(__name__)

Net = TypeVar("Net", IPv4Network, IPv6Network)

#: By family, upstream's names of the variables: the cluster's network, this node's subnet.
NETWORK = {4: "FLANNEL_NETWORK", 6: "FLANNEL_IPV6_NETWORK"}
SUBNET = {4: "FLANNEL_SUBNET", 6: "FLANNEL_IPV6_SUBNET"}
#: No subnet file is larger, in bytes; dotenv takes quadratic time for some that are.
MAX_SIZE = 16 * 1024
#: Seconds without a foreign change after which the next one is repaired at once again.
_PEACE = 300.0

#: Inode, time of change in nanoseconds and size.
Stamp = tuple[int, int, int]


class SubnetEnv(Struct, frozen=True, gc=False):
    """What the file says: at most one network and one subnet of each family, the MTU in bytes."""

    networks: tuple[IPNetwork, ...]
    subnets: tuple[IPNetwork, ...]
    mtu: int
    ip_masq: bool


class Previous(Struct, frozen=True, gc=False):
    """What the last run left: at most one network of each family, and the lease it had."""

    networks: tuple[IPNetwork, ...] = ()
    subnets: LeaseKey = (None, None)

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """Return each network that this node had a subnet of, with the length of that subnet."""
        lengths = {net.version: net.prefixlen for net in self.subnets if net is not None}
        return tuple((net, lengths[net.version]) for net in self.networks if net.version in lengths)


def beside(subnet_file: Path, suffix: str) -> Path:
    """Name another file of this daemon: ``flanneld.<suffix>``, or ``flanneld-blue.<suffix>`` for blue.env."""
    name = "flanneld" if subnet_file.name == "subnet.env" else f"flanneld-{subnet_file.stem}"
    return subnet_file.with_name(f"{name}.{suffix}")


def render(env: SubnetEnv) -> str:
    """The text of the file: IPv4 before IPv6, and each subnet by its first host address."""
    lines = []
    for family in FAMILIES:
        lines += [f"{NETWORK[family]}={net}" for net in env.networks if net.version == family]
        lines += [f"{SUBNET[family]}={_first_host(net)}" for net in env.subnets if net.version == family]
    lines += [f"FLANNEL_MTU={env.mtu}", f"FLANNEL_IPMASQ={str(env.ip_masq).lower()}"]
    return "".join(f"{line}\n" for line in lines)


def _first_host(subnet: IPNetwork) -> str:
    # One address alone is its own first host: the next one belongs to somebody else.
    return f"{subnet[min(1, subnet.num_addresses - 1)]}/{subnet.prefixlen}"


def write(path: Path, env: SubnetEnv) -> None:
    """Replace the file in one step that survives a power cut, also by an equal one: watchers wait for that.

    Raises ``Retryable``, and then the old file is as it was.
    """
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        atomic_file.replace(path, render(env).encode())
    except OSError as error:
        raise Retryable(
            f"cannot write {path}: {error.strerror}",
            "make the directory writable and leave it some space, or choose another file with -subnet-file",
        ) from error


class SubnetFile:
    """The file as a running daemon keeps it. From any thread.

    A file that cannot be written, or that others remove or change, is written again at the next ``look``.
    ``on_write`` is called after each writing.
    """

    def __init__(
        self,
        path: Path,
        on_write: Callable[[], None] = lambda: None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._path = path
        self._on_write = on_write
        self._now = now
        self._lock = threading.Lock()
        self._wanted: SubnetEnv | None = None
        #: What tells the file that we wrote from another one; None if it has yet to be written.
        self._stamp: Stamp | None = None
        self._problem = ""
        self._once = Once()
        self._pace = Pace(now)
        #: When what others changed may be written again: two programs must not write without a pause.
        self._undone = Backoff(first=0.5, longest=30.0)
        self._restored_at = self._next_restore = -math.inf

    @property
    def problem(self) -> str:
        """Why the file does not say what it should; empty if it does, or if it is not known yet what."""
        return self._problem

    def tell(self, env: SubnetEnv) -> None:
        """Have the file say this. Never raises: the network works without it, as upstream has it."""
        with self._lock:
            if env != self._wanted:
                self._wanted, self._stamp = env, None
            self._write()

    def look(self) -> None:
        """Write what could not be written so far, and what somebody removed or changed since."""
        with self._lock:
            self._write()
            if self._stamp is not None and self._stamp != _stamp(self._path):
                self._restore()

    def _write(self) -> None:
        if self._wanted is not None and self._stamp is None and self._try_to_write():
            log.info("Wrote %s", self._path)

    def _restore(self) -> None:
        assert self._wanted is not None
        found = _content(self._path)
        if found == render(self._wanted).encode():
            self._stamp, self._problem = _stamp(self._path), ""  # touched, or replaced by a copy
            self._on_write()
            return
        now = self._now()
        if now < self._next_restore:
            self._problem = f"another program keeps removing or changing {self._path}; find and stop it"
            return
        if now - self._restored_at > _PEACE:
            self._undone.reset()
        if self._try_to_write():
            self._restored_at, self._next_restore = now, now + self._undone.pause()
            if self._pace.allows("restored"):
                what = "removed" if found is None else "changed"
                log.warning("Restored %s: another program had %s it", self._path, what)

    def _try_to_write(self) -> bool:
        assert self._wanted is not None
        try:
            write(self._path, self._wanted)
        except Retryable as failure:
            self._problem = str(failure)
            self._once.warn(log, "write", str(failure))
            return False
        self._once.clear("write")
        self._problem = ""
        self._stamp = _stamp(self._path)
        self._on_write()
        return True


def _stamp(path: Path) -> Stamp | None:
    """Return inode, time of change and size; None for a file that is not there or cannot be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _content(path: Path) -> bytes | None:
    """Return what the file says, None if it cannot be read."""
    try:
        return atomic_file.read(path, MAX_SIZE)
    except OSError:
        return None


def read(path: Path) -> Previous:
    """What the last run left. Never raises: a file that makes no sense is logged and counts as empty."""
    try:
        text = atomic_file.read(path, MAX_SIZE).decode()
    except FileNotFoundError:
        return Previous()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("cannot read %s, going on as if there were none: %s", path, error)
        return Previous()
    return _parse(path, text)


def _parse(path: Path, text: str) -> Previous:
    from dotenv import dotenv_values

    # Without interpolate=False, ${X} would be taken from our environment.
    values = dotenv_values(stream=io.StringIO(text), interpolate=False)

    def find(name: str, kind: type[Net]) -> Net | None:
        return _only_network(f"{name} in {path}", values[name] or "", kind) if name in values else None

    networks = (find(NETWORK[4], IPv4Network), find(NETWORK[6], IPv6Network))
    return Previous(
        networks=tuple(net for net in networks if net is not None),
        subnets=(find(SUBNET[4], IPv4Network), find(SUBNET[6], IPv6Network)),
    )


def _only_network(where: str, text: str, kind: type[Net]) -> Net | None:
    """The one network of a comma-separated list; None, and a line in the log, when there is not one."""
    found = []
    for entry in filter(None, map(str.strip, text.split(","))):
        try:
            found.append(_network(entry, kind))
        except ValueError as error:
            log.warning("skipping an entry of %s: %s", where, error)
    if len(found) != 1:
        log.error("ignoring %s: expected one network, found %d", where, len(found))
        return None
    return found[0]


def _network(text: str, kind: type[Net]) -> Net:
    """``10.5.72.1/24`` is 10.5.72.0/24. Raises ``ValueError``, also for a netmask or no length at all."""
    if not text.partition("/")[2].isdigit():
        raise ValueError(f"{quoted(text)} is not of the form address/length")
    return kind(text, strict=False)
