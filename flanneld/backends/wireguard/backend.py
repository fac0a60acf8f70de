"""wireguard backend: packets travel encrypted between nodes that authenticate by public keys.

Lease data, device names, ports, modes and the choice of endpoints are those of upstream's backend/wireguard.
Three things differ. Devices and peers outlive the daemon. Each peer's subnet has a route of its own.
Addresses without a peer are unreachable: their packets do not leave the host unencrypted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import cached_property
from ipaddress import IPv6Network, ip_network
from typing import Any, ClassVar

from msgspec import Struct

from flanneld.backends.contract import (
    Backend,
    Host,
    Option,
    OuterPackets,
    Overhead,
    announced,
    inner_mtu,
    peers_public_ip,
    read_options,
    require_type,
)
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import NO_PRESHARED_KEY, AllowedIp, DeviceKey, WgPeer
from flanneld.compat.flags import quoted
from flanneld.compat.json import Fields, GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal, Refused
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, Lease, LeaseAttrs, Secret
from flanneld.state.resources import Address, Blackhole, Resource, Route, WireGuard
from flanneld.state.table import Table

TYPE = "wireguard"
DEVICE, DEVICE_V6 = "flannel-wg", "flannel-wg-v6"
#: Name of the key file in the directory of -secret-dir.
KEY_FILE = "wgkey"
#: Variable that names another key file, as in upstream.
KEY_FILE_VARIABLE = "WIREGUARD_KEY_FILE"

_PORT, _PORT_V6 = 51820, 51821
#: RFC 1918 and RFC 4193.
_PRIVATE: dict[Family, tuple[IPNetwork, ...]] = {
    4: tuple(ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    6: (IPv6Network("fc00::/7"),),
}


class WireGuardMode(Enum):
    """Mode of a dual-stack network: a device for each family, or one device and endpoint for both."""

    SEPARATE = "separate"
    #: One device; each peer's endpoint has the family that more likely works.
    AUTO = "auto"
    IPV4 = "ipv4"
    IPV6 = "ipv6"


class ClonedKey(Refused):
    """Error for a lease with our own public key, as of a cloned machine."""

    code = "cloned key"


class WireGuardConfig(Struct, frozen=True, gc=False):
    """Backend object of the network config; ``mtu`` overrides the uplink's, 0 for the real one."""

    listen_port: int
    listen_port_v6: int
    mtu: int
    preshared_key: Secret
    keepalive: int
    mode: WireGuardMode
    mesh: bool


def _preshared_key(text: str) -> Secret:
    if not text:
        return NO_PRESHARED_KEY
    try:
        return Secret(keys.parse(text))
    except Refused as reason:
        raise Fatal(f"could not parse psk: {reason.problem}", "make one with `wg genpsk`") from None


def _mode(text: str) -> WireGuardMode:
    try:
        return WireGuardMode(text)
    except ValueError:
        modes = ", ".join(mode.value for mode in WireGuardMode)
        raise Fatal(f"Backend.Mode is {quoted(text)}, no valid Mode", f"set it to one of: {modes}") from None


OPTIONS = (
    Option("ListenPort", "listen_port", _PORT, least=1),
    Option("ListenPortV6", "listen_port_v6", _PORT_V6, least=1),
    Option("MTU", "mtu", 0),
    Option("PersistentKeepaliveInterval", "keepalive", 0),
    Option("PSK", "preshared_key", "", made=_preshared_key),
    Option("Mode", "mode", WireGuardMode.SEPARATE.value, made=_mode),
    Option("Mesh", "mesh", False),
)


def read_config(config: Config) -> WireGuardConfig:
    """Return the backend's config. Raises ``Fatal`` for an unusable value."""
    settings = WireGuardConfig(**read_options(config, OPTIONS))
    port = settings.listen_port
    is_double = settings.mode is WireGuardMode.SEPARATE and config.families == (4, 6)
    if is_double and port == settings.listen_port_v6:
        raise Fatal(
            f"Backend.ListenPort and Backend.ListenPortV6 are both {port}, but either family has a device",
            'set two ports, or set Backend.Mode to "auto"',
        )
    return settings


def private_key_of(text: bytes) -> Secret:
    """Parse the contents of a key file. Raises ``Fatal``; the message does not contain the text."""
    try:
        return Secret(keys.parse(text.decode(errors="replace")))
    except Refused as reason:
        remedy = (
            f"put 32 bytes in base64 there, or remove the file to have a key made: {KEY_FILE} in -secret-dir,"
            f" or what {KEY_FILE_VARIABLE} names"
        )
        raise Fatal(f"could not parse private key from file: {reason.problem}", remedy) from None


class WireGuardBackend(Backend):
    """Backend with one device per family in mode ``separate``, else one for both.

    This node's identity is its private key, as a ``Secret``.
    """

    options = OPTIONS
    #: Outer IPv6 and UDP headers, and WireGuard's type, index, counter and tag. Upstream's for IPv4, too.
    overhead: ClassVar[Overhead] = {4: 80, 6: 80}
    flows = (
        OuterPackets("udp", _PORT, "ListenPort", family=4),
        OuterPackets("udp", _PORT_V6, "ListenPortV6", family=6),
    )
    encrypts = True

    def __init__(self, config: Config, host: Host) -> None:
        self._config = settings = read_config(config)
        self._ports = _own_ports(settings, config.families, host.listen_port)
        self._host = host
        uplink = host.uplink
        self._ranges = {each.family: each.network for each in config.ranges}
        self._uplink = uplink
        self._mtu = min(
            inner_mtu(uplink, self.overhead[family], family, "WireGuard", settings.mtu)
            for family in config.families
        )
        self._devices: dict[Family, str] = {
            family: DEVICE_V6 if family == 6 and settings.mode is WireGuardMode.SEPARATE else DEVICE
            for family in config.families
        }
        for family in _called(settings.mode, config.families):
            if uplink.local(family) is None:
                raise Fatal(
                    f"{uplink.name} has no IPv{family} address for Backend.Mode {settings.mode.value}",
                    "give it one, disable the family, or choose another Mode",
                )

    def claims(self) -> tuple[str, ...]:
        """Return the device names. They imply the ports, so these are not named."""
        return tuple(f"device {device}" for device in sorted(set(self._devices.values())))

    @property
    def mtu(self) -> int:
        return self._mtu

    def identity(self) -> Secret:
        """Read the key of an earlier run, or make one. Raises ``Fatal`` for a file without a valid key."""

        def make_key() -> bytes:
            return keys.text_of(keys.private_key(self._host.random_bytes(keys.LENGTH)).value).encode()

        return private_key_of(self._host.secret(KEY_FILE, make_key, variable=KEY_FILE_VARIABLE))

    @property
    def _private_key(self) -> Secret:
        key = self._host.identity
        assert isinstance(key, Secret), "identity comes first"
        return key

    @cached_property
    def _public_key(self) -> bytes:
        return keys.public_key(self._private_key)

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(
            self._uplink.public_ip,
            self._uplink.public_ipv6,
            TYPE,
            backend_data=self._announcement(4, self._ports[DEVICE]),
            backend_v6_data=self._announcement(6, self._config.listen_port_v6),
        )

    def _announcement(self, family: Family, port: int) -> dict[str, Any] | None:
        if family not in self._devices:
            return None
        return {"PublicKey": keys.text_of(self._public_key), "Port": port}

    def is_self(self, attrs: LeaseAttrs, /) -> bool:
        """Return True for a lease with our public key, or with our public IP unless that is a NAT's.

        Several nodes behind one NAT have one public IP. A node whose key file was lost has another key. In a
        mesh two sites may use one private address.
        """
        known = announced(attrs, TYPE)
        for family in self._devices if known else ():
            try:
                if known and peer_data(known.data(family))[0] == self._public_key:
                    return True
            except Refused:
                continue
        ours = (
            own
            for family in self._devices
            if (own := self._uplink.local(family)) is not None
            and attrs.public(family) == self._uplink.public(family) == own
        )
        return any(not (self._config.mesh and is_private(own)) for own in ours)

    def tables(self) -> tuple[Table, ...]:
        """Return the table of keys, peers and allowed IPs."""
        # Only for this backend.
        from flanneld.backends.wireguard.mesh import Mesh
        from flanneld.backends.wireguard.table import WireGuardTable

        ports = {family: self._ports[self._devices.get(family, DEVICE)] for family in FAMILIES}
        mesh = Mesh(self._public_key, ports, self._config.keepalive) if self._config.mesh else None
        return (WireGuardTable(tuple(dict.fromkeys(self._devices.values())), mesh=mesh),)

    def local(self, own: Lease, /) -> Iterator[Resource]:
        """Yield the guards first: addresses without a peer are unreachable. Then devices, keys, addresses."""
        for network in self._ranges.values():
            yield Blackhole(network, unreachable=True)
        for device in dict.fromkeys(self._devices.values()):
            yield WireGuard(device, self._mtu)
            yield DeviceKey(device, self._private_key, self._public_key, self._ports[device])
        for family, device in self._devices.items():
            subnet = own.net(family)
            if subnet is not None:
                yield Address(device, subnet.network_address)

    def peer(self, own: Lease, lease: Lease, /) -> Iterator[Resource]:
        del own
        lease = require_type(lease, TYPE)
        families = [family for family in self._devices if lease.net(family) is not None]
        if self._config.mode is WireGuardMode.SEPARATE:
            for family in families:
                yield from self._lead(lease, family, (family,))
        elif families:
            yield from self._lead(lease, self._family_to(lease), families)

    def _lead(self, lease: Lease, outer: Family, inner: Iterable[Family]) -> Iterator[Resource]:
        """Yield a peer with an endpoint of family ``outer``, and allowed IPs and routes of its subnets."""
        subnets = [net for family in inner if (net := lease.net(family)) is not None]
        family = subnets[-1].version
        device = self._devices[family]
        public_key, port = peer_data(lease.attrs.data(family))
        if public_key == self._public_key:
            raise ClonedKey(
                f"{lease} announces our own public key",
                "if it is no former lease of this node, remove the key file of one of both and restart there",
            )
        if self._config.mode is not WireGuardMode.SEPARATE:
            port = _port_of_one_device(lease)
        port = port or self._listen_port(device)
        yield WgPeer(
            device,
            public_key,
            self._public_ip_of(lease, outer, port, device),
            port,
            self._config.keepalive,
            self._config.preshared_key,
        )
        for subnet in subnets:
            yield AllowedIp(device, subnet, public_key)
        for subnet in subnets:
            yield Route(subnet, device)

    def _family_to(self, lease: Lease) -> Family:
        """Choose the family of a peer's endpoint. A private address is reachable only from its own site."""
        if self._config.mode is not WireGuardMode.AUTO:
            return 4 if self._config.mode is WireGuardMode.IPV4 else 6
        theirs, theirs_v6 = lease.attrs.public_ip, lease.attrs.public_ipv6
        if theirs_v6 is None or theirs is None:
            return 6 if theirs is None else 4
        ours, ours_v6 = self._uplink.public_ip, self._uplink.public_ipv6
        if ours is not None and not is_private(theirs):
            return 4
        if ours_v6 is not None and not is_private(theirs_v6) and not is_private(ours_v6):
            return 6
        return 4 if ours is not None else 6

    def _public_ip_of(self, lease: Lease, family: Family, port: int, device: str) -> IPAddress | None:
        """Return the address of a peer's endpoint. Raises ``Refused`` if packets would come back to us.

        Nodes behind one NAT have one public IP, and are told apart by their ports. In a mesh a peer needs no
        address of its own: it is None then, and the endpoints that it publishes are tried.
        """
        ours, theirs = self._uplink.public(family), lease.attrs.public(family)
        if self._config.mesh:
            with suppress(Refused):
                return peers_public_ip(lease, family, self._uplink)
            return theirs if theirs == ours and port != self._ports[device] else None
        if theirs is None or theirs != ours or ours == self._uplink.local(family):
            return peers_public_ip(lease, family, self._uplink)
        if port == self._ports[device]:
            raise Refused(
                f"{lease} announces our own public IP {theirs} and our own port {port}",
                "give each node behind one public IP a port of its own, by -wireguard-port",
            )
        return theirs

    def _listen_port(self, device: str) -> int:
        """Return the port of a peer that announces none, as Go flannel before 0.26.6."""
        return self._config.listen_port_v6 if device == DEVICE_V6 else self._config.listen_port


def peer_data(data: Any) -> tuple[bytes, int]:
    """Read the public key and the port in a lease's backend data; before 0.26.6 there was no port.

    Raises ``Refused``.
    """
    try:
        fields = Fields(data, "BackendData")
        text, port = fields.string("PublicKey", ""), fields.uint("Port", 0)
    except GoJsonError as error:
        raise Refused(f"the lease is wrong: {error}", "the peer must announce a PublicKey") from None
    if port > 65535:
        raise Refused(f"the lease has the port {port}", "the peer must announce a port below 65536")
    try:
        return keys.parse(text), port
    except Refused as reason:
        raise Refused(f"the PublicKey is wrong: {reason.problem}", "restart flanneld on its node") from None


def is_private(address: IPAddress) -> bool:
    """Return True for an address that is reachable only within a site (RFC 1918, RFC 4193)."""
    return any(address in network for network in _PRIVATE[address.version])


def _port_of_one_device(lease: Lease) -> int:
    """Return the port of a peer's single device, 0 if it announces none.

    It is ListenPort for both families. The IPv6 data have ListenPortV6, on which no device listens then.
    """
    try:
        return peer_data(lease.attrs.backend_data)[1]
    except Refused:
        return 0


def _own_ports(settings: WireGuardConfig, families: tuple[Family, ...], own: int) -> dict[str, int]:
    """Return the ports of this node's devices; a nonzero ``own`` replaces the cluster's ListenPort.

    Raises ``Fatal`` if peers would not learn of it.
    """
    if own and 4 not in families:
        raise Fatal("-wireguard-port is for IPv4, and the network has none", "leave it out")
    ports = {DEVICE: own or settings.listen_port, DEVICE_V6: settings.listen_port_v6}
    if settings.mode is WireGuardMode.SEPARATE and families == (4, 6) and len({*ports.values()}) == 1:
        raise Fatal(f"-wireguard-port and Backend.ListenPortV6 are both {own}", "choose another port")
    return ports


def _called(mode: WireGuardMode, families: tuple[Family, ...]) -> tuple[Family, ...]:
    """Return the families in which this node needs a public IP."""
    match mode:
        case WireGuardMode.IPV4:
            return (4,)
        case WireGuardMode.IPV6:
            return (6,)
    return families if mode is WireGuardMode.SEPARATE else ()
