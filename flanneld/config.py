"""Network config, shared by the whole cluster: parsed and checked (pure).

A JSON object at ``<prefix>/config`` in etcd, or the net-conf file in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from msgspec import Struct

from flanneld.compat import json as gojson
from flanneld.compat.json import Fields, GoJsonError
from flanneld.errors import Retryable, shown
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, family_of

#: Backend type if "Backend" is missing. Upstream's guide says vxlan, its code has always said udp.
DEFAULT_BACKEND = "udp"

_PREFIX: dict[Family, str] = {4: "", 6: "IPv6"}
_ADDRESS: dict[Family, type[IPAddress]] = {4: IPv4Address, 6: IPv6Address}
_NETWORK: dict[Family, type[IPNetwork]] = {4: IPv4Network, 6: IPv6Network}
#: Stands for the public IPs of all nodes in MasqueradeExceptions.
_NODES = "nodes"
#: Keys of flannel 0.20 that later versions dropped.
_DROPPED_KEYS = ("Networks", "IPv6Networks")


class ConfigError(Retryable):
    """Error for an unusable network config. The daemon retries: an operator may correct it at any time."""


class SubnetRange(Struct, frozen=True, gc=False):
    """Range of subnets for hosts in one family: ``subnet_min`` to ``subnet_max``, both included."""

    network: IPNetwork
    subnet_len: int
    subnet_min: IPAddress
    subnet_max: IPAddress

    @property
    def family(self) -> Family:
        return family_of(self.network)

    def contains(self, net: IPNetwork) -> bool:
        """Return True if a host may have this subnet under this config."""
        return (
            net.version == self.network.version
            and net.prefixlen == self.subnet_len
            and int(self.subnet_min) <= int(net.network_address) <= int(self.subnet_max)
        )


class Config(Struct, frozen=True, eq=False):
    """Valid network config. Two configs are equal if their texts are.

    ``backend_type`` is in lower case, and empty if "Backend" has no "Type". ``backend`` has the options
    of the backend, which checks them itself. ``warnings`` are sentences for the log.
    """

    source: str
    ranges: tuple[SubnetRange, ...]
    backend_type: str
    backend: Fields
    #: The same network with the backend that runs beside the first, as ``Backend.Also`` says.
    also: Config | None = None
    enable_nftables: bool = False
    #: Destinations outside the network that see the containers' addresses; ``spares_nodes`` adds all nodes'.
    spared: tuple[IPNetwork, ...] = ()
    spares_nodes: bool = False
    warnings: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.source == other.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __repr__(self) -> str:
        # The text may hold a key.
        return f"Config({self.backend_type})"

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(each.family for each in self.ranges)

    @property
    def networks(self) -> tuple[IPNetwork, ...]:
        return tuple(each.network for each in self.ranges)

    def range(self, family: Family) -> SubnetRange | None:
        return next((each for each in self.ranges if each.family == family), None)


def unread_keys(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that the backend did not read. Call it after the backend was built."""
    for place, each in (("Backend", config), ("Backend.Also", config.also)):
        for key, nearest in each.backend.unread() if each else ():
            hint = f"; did you mean {nearest}?" if nearest else ""
            yield f"Unknown key {shown(key)} in {place} of the network config{hint}"


def say_the_same(one: str, other: str) -> bool:
    """Return True if two texts are the same network config apart from their layout."""
    try:
        return gojson.parse(one) == gojson.parse(other)
    except GoJsonError:
        return False


def parse(text: str) -> Config:
    """Parse a network config and fill in its defaults. Raises ``ConfigError``."""
    try:
        return _read(Fields(gojson.parse(text)), text)
    except GoJsonError as error:
        raise ConfigError(f"the network config is wrong: {error}", "correct it where it is stored") from None


def _read(top: Fields, source: str) -> Config:
    ranges = [_range(top, family) for family in FAMILIES]
    if not any(ranges):
        raise ConfigError(
            "the network config disables both IPv4 and IPv6", "set EnableIPv4 or EnableIPv6 to true"
        )
    backend = Fields(top.raw("Backend"), "Backend")
    backend_type = backend.string("Type", "" if top.has("Backend") else DEFAULT_BACKEND)
    enable_nftables = top.boolean("EnableNFTables", False)
    spared = top.strings("MasqueradeExceptions")
    present = tuple(each for each in ranges if each)
    return Config(
        source=source,
        ranges=present,
        backend_type=backend_type.lower(),
        backend=backend,
        also=_also(backend, source, present),
        enable_nftables=enable_nftables,
        spared=tuple(_exception(each) for each in spared if each != _NODES),
        spares_nodes=_NODES in spared,
        warnings=tuple(_warnings(top)),
    )


def _exception(text: str) -> IPNetwork:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(
            f'MasqueradeExceptions has {gojson.compact(text[:60])}, no network and not "{_NODES}"',
            "correct it where the network config is stored",
        ) from None


def _also(backend: Fields, source: str, ranges: tuple[SubnetRange, ...]) -> Config | None:
    value = backend.raw("Also")
    if value is None:
        return None
    also = Fields(value, "Backend.Also")
    also_type = also.string("Type", "")
    if not also_type:
        raise ConfigError("Backend.Also has no Type", "name the backend that runs beside Backend.Type")
    return Config(source, ranges, also_type.lower(), also)


def _warnings(top: Fields) -> Iterator[str]:
    """Yield a warning for each key without effect. Call it last: by then every known key has been read."""
    for name in _DROPPED_KEYS:
        if top.has(name):
            yield f'"{name}" in the network config is not supported; only "{name[:-1]}" has an effect'
    for family in FAMILIES:
        name, switch = f"{_PREFIX[family]}Network", f"EnableIPv{family}"
        if top.has(name) and not top.boolean(switch, family == 4):
            yield f'"{name}" in the network config has no effect unless "{switch}" is true'
    for key, similar in top.unread():
        hint = f', did you mean "{similar}"?' if similar else ""
        yield f"unknown key {gojson.compact(key[:40])} in the network config{hint}"


def _range(top: Fields, family: Family) -> SubnetRange | None:
    """Read the keys of one family and derive its range; None if the family is disabled."""
    prefix = _PREFIX[family]
    network = top.network(f"{prefix}Network", _NETWORK[family])
    subnet_len = top.uint(f"{prefix}SubnetLen", 0)
    low = top.address(f"{prefix}SubnetMin", _ADDRESS[family])
    high = top.address(f"{prefix}SubnetMax", _ADDRESS[family])
    if not top.boolean(f"EnableIPv{family}", family == 4):
        return None
    if network is None:
        raise ConfigError(
            f"the network config has no {prefix}Network", f"set it, or set EnableIPv{family} to false"
        )
    return _derive(prefix, network, subnet_len, low, high)


def _derive(
    prefix: str, network: IPNetwork, subnet_len: int, low: IPAddress | None, high: IPAddress | None
) -> SubnetRange:
    """Fill in the values that the config leaves out.

    By default no host gets the first subnet: its address is also the address of the whole network.
    """
    subnet_len = _subnet_len(prefix, network, subnet_len)
    size = 1 << (network.max_prefixlen - subnet_len)
    address = type(network.network_address)
    low = low or address(int(network.network_address) + size)
    high = high or address(int(network.broadcast_address) - size + 1)
    for name, value in ((f"{prefix}SubnetMin", low), (f"{prefix}SubnetMax", high)):
        if value not in network:
            raise ConfigError(
                f"{name} {value} is outside {prefix}Network {network}", "choose one inside, or leave it out"
            )
        if int(value) % size:
            start = address(int(value) - int(value) % size)
            raise ConfigError(f"{name} {value} is not the start of a /{subnet_len} subnet", f"use {start}")
    if int(low) > int(high):
        raise ConfigError(
            f"{prefix}SubnetMin {low} is above {prefix}SubnetMax {high}", "swap them, or leave one out"
        )
    return SubnetRange(network, subnet_len, low, high)


def _subnet_len(prefix: str, network: IPNetwork, wanted: int) -> int:
    """Return the subnet length: a network holds at least four subnets, and a subnet four addresses."""
    least, most = network.prefixlen + 2, network.max_prefixlen - 2
    if least > most:
        raise ConfigError(f"{prefix}Network {network} is too small", f"use a /{most - 2} or a larger one")
    if not wanted:
        return max(least, 24 if network.version == 4 else 64)
    if not least <= wanted <= most:
        raise ConfigError(
            f"{prefix}SubnetLen {wanted} does not fit {prefix}Network {network}",
            f"use {least} to {most}, or leave it out",
        )
    return wanted
