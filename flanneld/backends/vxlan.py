"""vxlan backend: each node is a VTEP on one VXLAN segment; containers' packets travel in UDP.

What leads to a peer, as the packet meets it: an onlink route to the peer's subnet through the
subnet's base address, a permanent neighbour entry that gives this address the peer's VTEP MAC, and
a forwarding entry that sends frames for this MAC to the peer's public IP. All is there before the
first packet, so the segment needs no multicast and nothing is ever asked or learned.

Lease data, device name and addresses are those of upstream's backend/vxlan.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
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
from flanneld.config import Config
from flanneld.errors import Fatal, Refused
from flanneld.model import Family, Lease, LeaseAttrs
from flanneld.state.resources import Address, FdbEntry, Neighbor, Resource, Route, Vxlan
from flanneld.subnet.codec import parse_mac

log = logging.getLogger(__name__)

TYPE = "vxlan"

#: Default UDP port of Linux (drivers/net/vxlan, module parameter udp_port).
LINUX_PORT = 8472
_MAX_VNI = (1 << 24) - 1
#: flannel 0.14 to 0.23 reads the VNI of a lease as uint16 (backend/vxlan/vxlan.go, vxlanLeaseAttrs).
_LARGEST_OF_GO = 0xFFFF
#: linux/if.h IFNAMSIZ, less the terminating zero.
_LONGEST_NAME = 15


class VxlanConfig(Struct, frozen=True, gc=False):
    """Backend object of the network config; ``mtu`` overrides the uplink's, 0 for the real one."""

    vni: int
    port: int
    gbp: bool
    learning: bool
    direct_routing: bool
    mtu: int


def _device_name(family: Family, vni: int) -> str:
    name = f"flannel.{vni}" if family == 4 else f"flannel-v6.{vni}"
    if len(name) > _LONGEST_NAME:
        raise Fatal(
            f"with Backend.VNI {vni} the device would be {name}, but names end at {_LONGEST_NAME} characters",
            "set a VNI with fewer digits",
        )
    return name


class VxlanBackend(Backend):
    """Backend with one device per family. DirectRouting skips it for peers on the uplink's link."""

    options = (
        Option("VNI", "vni", 1, most=_MAX_VNI),
        Option("Port", "port", 0, least=1, made=lambda port: port or LINUX_PORT),
        Option("GBP", "gbp", False),
        Option("Learning", "learning", False),
        Option("DirectRouting", "direct_routing", False),
        Option("MTU", "mtu", 0),
    )
    #: Outer Ethernet, IPv4 and UDP headers and the VXLAN header; IPv6's is 20 bytes longer.
    overhead: ClassVar[Overhead] = {4: 50, 6: 70}
    flows = (OuterPackets("udp", LINUX_PORT, "Port"),)

    def __init__(self, config: Config, host: Host) -> None:
        settings = VxlanConfig(**read_options(config, self.options))
        if host.identity is None:  # the first backend of this run
            log.info(
                "VXLAN config: VNI=%d Port=%d GBP=%s Learning=%s DirectRouting=%s",
                settings.vni, settings.port,
                *(str(each).lower() for each in (settings.gbp, settings.learning, settings.direct_routing)),
            )  # fmt: skip
            if settings.vni > _LARGEST_OF_GO:
                log.warning(
                    "flannel 0.14 to 0.23 cannot read leases with VNI %d; where such nodes take part, set "
                    "Backend.VNI to at most %d",
                    settings.vni, _LARGEST_OF_GO,
                )  # fmt: skip
        self._host = host
        self._direct_routing = settings.direct_routing
        self._devices = {family: self._device(family, settings) for family in config.families}

    def _device(self, family: Family, settings: VxlanConfig) -> Vxlan:
        host = self._host
        name = _device_name(family, settings.vni)
        local = host.uplink.local(family)
        if local is None:
            raise Fatal(f"{host.uplink.name} has no IPv{family} address", "give it one or disable the family")
        return Vxlan(
            name=name,
            vni=settings.vni,
            parent=host.uplink.index,
            local=local,
            port=settings.port,
            mac=_mac(host, family, name),
            mtu=inner_mtu(host.uplink, self.overhead[family], family, "VXLAN", settings.mtu),
            learning=settings.learning,
            gbp=settings.gbp,
            cpu_checksums=host.cpu_checksums,
        )

    @property
    def mtu(self) -> int:
        return min(device.mtu for device in self._devices.values())

    def identity(self) -> dict[Family, str]:
        """Return the MAC of each device: devices keep them when the uplink moves or others change them."""
        return {family: device.mac for family, device in self._devices.items()}

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(
            self._host.uplink.public_ip,
            self._host.uplink.public_ipv6,
            TYPE,
            backend_data=self._announcement(4),
            backend_v6_data=self._announcement(6),
        )

    def _announcement(self, family: Family) -> dict[str, Any] | None:
        device = self._devices.get(family)
        return {"VNI": device.vni, "VtepMAC": device.mac} if device else None

    def claims(self) -> tuple[str, ...]:
        """Return the VNI, from which the devices have their names."""
        return tuple({f"VNI {device.vni}" for device in self._devices.values()})

    def local(self, own: Lease, /) -> Iterator[Resource]:
        """Yield the device with the base address of our subnet, the source address of this host's packets."""
        for family, device in self._devices.items():
            yield device
            subnet = own.net(family)
            if subnet is not None:
                yield Address(device.name, subnet.network_address)

    def peer(self, _own: Lease, lease: Lease, /) -> Iterator[Resource]:
        lease = require_type(lease, TYPE)
        for family, device in self._devices.items():
            subnet = lease.net(family)
            if subnet is None:
                continue
            remote = peers_public_ip(lease, family, self._host.uplink)
            mac = vtep_mac(lease.attrs.data(family))
            link = self._host.link_to(remote) if self._direct_routing else None
            if link is not None:
                yield Route(subnet, link, remote)
                continue
            gateway = subnet.network_address
            yield Neighbor(device.name, gateway, mac)
            yield FdbEntry(device.name, mac, remote)
            yield Route(subnet, device.name, gateway, onlink=True)


def vtep_mac(data: Any) -> str:
    """Return the MAC in a lease's backend data, whose keys Go matches in any case. Raises ``Refused``."""
    if not isinstance(data, dict):
        raise Refused(
            f"backend data {json.dumps(data)[:200]} is not an object", "the peer must announce a VtepMAC"
        )
    mac = data.get("VtepMAC")
    if mac is None:
        mac = next((value for key, value in data.items() if key.lower() == "vtepmac"), None)
    if not isinstance(mac, str):
        raise Refused(
            f"VtepMAC is {json.dumps(mac)[:200]}", "the peer must announce the MAC of its VXLAN device"
        )
    return parse_mac(mac)


def _mac(host: Host, family: Family, name: str) -> str:
    """Return this run's MAC, else that of the device, else the announced one, else a new one.

    A MAC in another node's lease is left to that node: of two with one MAC the peers reach only one.
    """
    if host.identity:
        mac: str = host.identity[family]
        return mac
    for kept in dict.fromkeys((host.mac_of(name), _announced_mac(host.stored, family))):
        if kept and not host.is_others(partial(_announces, family, kept)):
            return kept
        if kept:
            log.warning("%s does not keep the MAC %s: another node's lease has it, as clones do", name, kept)
    return _random_mac(host.random_bytes(6))


def _announced_mac(attrs: LeaseAttrs | None, family: Family) -> str | None:
    """Return the MAC in attributes: a recreated device keeps it, so that no peer has to change."""
    ours = announced(attrs, TYPE) if attrs is not None else None
    try:
        return vtep_mac(ours.data(family)) if ours is not None else None
    except Refused:
        return None


def _announces(family: Family, mac: str, attrs: LeaseAttrs) -> bool:
    return _announced_mac(attrs, family) == mac


def _random_mac(raw: bytes) -> str:
    """Return a locally administered unicast MAC (IEEE 802, the two low bits of the first octet)."""
    return bytes([raw[0] & 0xFE | 0x02, *raw[1:]]).hex(":")
