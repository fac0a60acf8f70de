"""subnet.env: this node's settings for CNI plugins and scripts, and the memory of the last run."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import ClassVar, TypeVar

from msgspec import Struct

from flanneld.compat.flags import quoted
from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import FAMILIES, IPNetwork, LeaseKey
from flanneld.runtime import clock, files
from flanneld.state.resources import Key, Kind
from flanneld.state.table import LastingTable, Put, Report, Scope, Seen

log = logging.getLogger(__name__)

Net = TypeVar("Net", IPv4Network, IPv6Network)

#: Upstream's variable names by family: the cluster's network, this node's subnet.
NETWORK = {4: "FLANNEL_NETWORK", 6: "FLANNEL_IPV6_NETWORK"}
SUBNET = {4: "FLANNEL_SUBNET", 6: "FLANNEL_IPV6_SUBNET"}
#: Bytes of a subnet file, at most; dotenv takes quadratic time for some larger ones.
MAX_SIZE = 16 * 1024
#: Name and colon of a line ``KEY: value``, which Go's godotenv reads as ``KEY=value``.
_COLON = re.compile(r"^([ \t]*(?:export[ \t]+)?[\w.]+)[ \t]*:", re.MULTILINE)
#: Name of the table.
TABLE = "subnet-file"

#: A cluster's network, and this node's subnet in it.
NetworkAndSubnet = tuple[IPNetwork, IPNetwork]
#: Inode, modification time in nanoseconds and size.
Stamp = tuple[int, int, int]


class SubnetEnv(Struct, frozen=True, gc=False):
    """Contents of the file: at most one network and one subnet of each family, the MTU in bytes."""

    networks: tuple[IPNetwork, ...]
    subnets: tuple[IPNetwork, ...]
    mtu: int
    ip_masq: bool

    @classmethod
    def of(cls, config: Config, own: LeaseKey, mtu: int, *, ip_masq: bool) -> SubnetEnv:
        """Return the contents for a node with this lease."""
        return cls(config.networks, tuple(net for net in own if net is not None), mtu, ip_masq)


class Previous(Struct, frozen=True, gc=False):
    """State of the last run: at most one network of each family, its lease, and the MTU."""

    networks: tuple[IPNetwork, ...] = ()
    subnets: LeaseKey = (None, None)
    mtu: int | None = None

    @property
    def nets(self) -> tuple[NetworkAndSubnet, ...]:
        """Networks that this node had a subnet of, with that subnet."""
        return paired(self.networks, self.subnets)

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """The same networks, with the subnet's length."""
        return tuple((network, subnet.prefixlen) for network, subnet in self.nets)


def paired(networks: Iterable[IPNetwork], subnets: LeaseKey) -> tuple[NetworkAndSubnet, ...]:
    """Return the network and the subnet of each family that has both."""
    known = {net.version: net for net in subnets if net is not None}
    return tuple((network, known[network.version]) for network in networks if network.version in known)


def beside(subnet_file: Path, suffix: str) -> Path:
    """Return the path of another file of this daemon.

    It is ``flanneld.<suffix>`` beside subnet.env, ``flanneld-blue.<suffix>`` beside blue.env.
    """
    name = "flanneld" if subnet_file.name == "subnet.env" else f"flanneld-{subnet_file.stem}"
    return subnet_file.with_name(f"{name}.{suffix}")


def render(env: SubnetEnv) -> str:
    """Return the text of the file: IPv4 before IPv6, and each subnet as its first host address."""
    lines = []
    for family in FAMILIES:
        lines += [f"{NETWORK[family]}={net}" for net in env.networks if net.version == family]
        lines += [f"{SUBNET[family]}={_first_host(net)}" for net in env.subnets if net.version == family]
    lines += [f"FLANNEL_MTU={env.mtu}", f"FLANNEL_IPMASQ={str(env.ip_masq).lower()}"]
    return "".join(f"{line}\n" for line in lines)


def _first_host(subnet: IPNetwork) -> str:
    # A single address is its own first host: the next one lies outside the subnet.
    return f"{subnet[min(1, subnet.num_addresses - 1)]}/{subnet.prefixlen}"


def write(path: Path, env: SubnetEnv) -> None:
    """Replace the file atomically and durably, also by an equal one: watchers expect it.

    Raises ``Retryable``; the old file is then unchanged.
    """
    _write(SubnetEnvFile.of(path, env))


def _write(file: SubnetEnvFile) -> None:
    try:
        file.path.parent.mkdir(0o755, parents=True, exist_ok=True)
        files.replace(file.path, file.content)
    except OSError as error:
        raise Retryable(
            f"cannot write {file.path}: {error.strerror}",
            "make the directory writable and leave it some space, or choose another file with -subnet-file",
        ) from error


class KeptFile(Struct, frozen=True, gc=False):
    """File with its content, the only one of the ``table``."""

    kind: ClassVar[Kind] = Kind.FILE
    table: ClassVar[str]
    path: Path
    content: bytes

    @property
    def key(self) -> Key:
        return (self.table, str(self.path))

    def __str__(self) -> str:
        return str(self.path)


class SubnetEnvFile(KeptFile, frozen=True, gc=False):
    """The file with its content."""

    table = TABLE

    @classmethod
    def of(cls, path: Path, env: SubnetEnv) -> SubnetEnvFile:
        return cls(path, render(env).encode())


class SubnetFileTable(LastingTable):
    """Table of the one file.

    ``on_write`` is called after each write, and when another program replaced the file by an equal one.
    """

    name = TABLE
    vital = True

    def __init__(self, path: Path, on_write: Callable[[], None] = lambda: None) -> None:
        super().__init__(clock.now)
        self.what = f"the contents of {path}"
        self._path = path
        self._on_write = on_write
        #: Stamp of the file as we wrote it; None before the first write.
        self._stamp: Stamp | None = None
        self._written = b""

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield the file once this run has written it.

        Before that, it is an earlier run's and must be replaced.
        """
        if self._stamp is None:
            return
        content = _content(self._path)
        stamp = stamp_of(self._path)
        if stamp is None or content is None:
            return
        found = SubnetEnvFile(self._path, content)
        yield Seen(found)
        if stamp != self._stamp and scope.desired.get(found.key) == found:
            self._stamp = stamp
            self._on_write()

    def put(self, puts: Sequence[Put]) -> Report:
        """Write the file. Raises ``Retryable``."""
        report = Report()
        for put in puts:
            assert isinstance(put.want, SubnetEnvFile)
            _write(put.want)
            self._stamp = stamp_of(self._path)
            self._on_write()
            report.made.append(put.want)
            if self._written != put.want.content:
                self._written = put.want.content
                log.info("Wrote subnet file to %s", self._path)
            else:
                what = "removed" if put.was is None else "changed"
                report.details[put.want.key] = f"another program had {what} it"
        return report

    def script(self, scope: Scope) -> Iterator[str]:
        """Yield the command that writes the file, unless it has the desired content."""
        import shlex  # only for a plan

        for want in scope.desired.values():
            if isinstance(want, SubnetEnvFile) and _content(self._path) != want.content:
                lines = shlex.join(want.content.decode().split())
                yield f"printf '%s\\n' {lines} > {shlex.quote(str(self._path))}"

    def has_changed(self) -> bool:
        return self._stamp is not None and self._stamp != stamp_of(self._path)


def stamp_of(path: Path) -> Stamp | None:
    """Return inode, modification time and size; None for a missing or inaccessible file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _content(path: Path) -> bytes | None:
    """Return the content of the file, None if it cannot be read."""
    try:
        return files.read(path, MAX_SIZE)
    except OSError:
        return None


def read(path: Path) -> Previous:
    """Return the last run's state. Never raises: an invalid file is logged and counts as empty."""
    try:
        text = files.read(path, MAX_SIZE).decode()
    except FileNotFoundError:
        return Previous()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("cannot read %s, going on as if there were none: %s", path, error)
        return Previous()
    return _parse(path, text)


def _parse(path: Path, text: str) -> Previous:
    from dotenv import dotenv_values

    text = _COLON.sub(r"\1=", text)
    # interpolate=False prevents the expansion of ${X} from our environment.
    values = dotenv_values(stream=io.StringIO(text), interpolate=False)

    def find(name: str, kind: type[Net]) -> Net | None:
        return _only_network(f"{name} in {path}", values[name] or "", kind) if name in values else None

    networks = (find(NETWORK[4], IPv4Network), find(NETWORK[6], IPv6Network))
    return Previous(
        networks=tuple(net for net in networks if net is not None),
        subnets=(find(SUBNET[4], IPv4Network), find(SUBNET[6], IPv6Network)),
        mtu=_mtu(values.get("FLANNEL_MTU") or ""),
    )


def _mtu(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _only_network(where: str, text: str, kind: type[Net]) -> Net | None:
    """Return the one network of a comma-separated list; None, with a log line, for any other number."""
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
    """Parse a network; host bits are cleared. Raises ``ValueError`` for a netmask or a missing length."""
    if not text.partition("/")[2].isdigit():
        raise ValueError(f"{quoted(text)} is not of the form address/length")
    return kind(text, strict=False)
