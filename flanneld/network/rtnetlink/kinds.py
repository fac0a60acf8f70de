"""Codecs of the kinds of devices that backends create.

Source: linux/if_link.h (IFLA_VXLAN_*, IFLA_TUN_*) and linux/if_tunnel.h (IFLA_IPTUN_*).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from flanneld.findings import Command, command
from flanneld.model import IPAddress
from flanneld.network import interfaces
from flanneld.network.rtnetlink.links import Attribute, LinkCodec, SeenLink, link_info, number
from flanneld.network.rtnetlink.messages import address_of
from flanneld.state.resources import Dummy, ForeignLink, Ipip, Link, Tun, Vxlan, WireGuard


class DummyCodec(LinkCodec[Dummy]):
    """Codec of dummy devices. They drop all packets, so routes lead there that must not lead elsewhere."""

    resource = Dummy
    names = re.compile(r"flannel-ipsec")


_IPIP_LOCAL, _IPIP_REMOTE = 2, 3


class IpipCodec(LinkCodec[Ipip]):
    """Codec of IPIP tunnels. The address 0.0.0.0 means any host."""

    resource = Ipip
    names = re.compile(r"flannel\.ipip")
    spares_others = True

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> Ipip:
        local, remote = (_end(data.get(each)) for each in (_IPIP_LOCAL, _IPIP_REMOTE))
        return Ipip(name=seen.name, local=local, mtu=seen.mtu, remote=remote, up=seen.up)

    def data(self, desired: Ipip) -> Iterator[Attribute]:
        """Yield the tunnel's attributes. Path MTU discovery is turned off: it would forbid fragmentation."""
        if desired.local is not None:
            yield "IFLA_IPIP_LOCAL", str(desired.local)
        if desired.remote is not None:
            yield "IFLA_IPIP_REMOTE", str(desired.remote)
        yield from (("IFLA_IPIP_TTL", 0), ("IFLA_IPIP_TOS", 0), ("IFLA_IPIP_PMTUDISC", 0))

    def ends(self, link: Ipip) -> tuple[object, ...]:
        return (link.local, link.remote)

    def make_commands(self, desired: Ipip, parent: str) -> Iterator[Command]:
        ends = ("local", desired.local or "any", "remote", desired.remote or "any")
        for plain in super().make_commands(desired, parent):
            yield command(*plain, *ends, "ttl", "inherit", "nopmtudisc")


def _end(raw: bytes | None) -> IPAddress | None:
    return address_of(raw) if raw and any(raw) else None


_TYPE, _PERSIST, _IFF_TUN = 3, 6, 1


class TunCodec(LinkCodec[Tun]):
    """Codec of persistent TUN devices. Those of Go flannel belong to its process."""

    resource = Tun
    names = re.compile(r"flannel[0-9]+")
    is_made_otherwise = True

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> Tun | ForeignLink:
        """Return the device. Before Linux 4.20 the kernel sends no details: any TUN device counts as ours."""
        if data and number(data.get(_TYPE)) != _IFF_TUN:
            return ForeignLink(seen.name, "a tap device of kind tun", Tun.make)
        if data and not number(data.get(_PERSIST)):
            return ForeignLink(seen.name, "another process's device of kind tun", Tun.make)
        return super().parse(seen, data)

    def make(self, desired: Tun) -> bool:
        interfaces.make(desired.name)
        return True

    def make_commands(self, desired: Tun, parent: str) -> Iterator[Command]:
        del parent
        yield ("ip", "tuntap", "add", "dev", desired.name, "mode", "tun")
        yield command("ip", "link", "set", desired.name, "mtu", desired.mtu)


_ID, _GROUP, _LINK, _LOCAL, _LEARNING, _L2MISS, _PORT = 1, 2, 3, 4, 7, 13, 15
_GROUP6, _LOCAL6, _GBP, _EXTERNAL, _GPE = 16, 17, 23, 25, 27


class VxlanCodec(LinkCodec[Vxlan]):
    """Codec of VXLAN devices. The MAC is random and persistent, so it identifies a renamed device."""

    resource = Vxlan
    names = re.compile(r"flannel(-v6)?\.[0-9]+")
    settable = ("mac", "mtu", "learning", "up", "cpu_checksums")

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> Vxlan | ForeignLink:
        local = data.get(_LOCAL) or data.get(_LOCAL6)
        port = int.from_bytes(data.get(_PORT, b""), "big")
        if any(data.get(_EXTERNAL, b"")) or _GPE in data:
            return ForeignLink(seen.name, f"a vxlan device for all VNIs, UDP port {port}", Vxlan.make, port)
        if local is None:
            return ForeignLink(seen.name, "a vxlan device without a local address", Vxlan.make)
        for unwanted, what in ((_GROUP, "group"), (_GROUP6, "group"), (_L2MISS, "l2miss")):
            if any(data.get(unwanted, b"")):
                return ForeignLink(seen.name, f"a vxlan device with {what}", Vxlan.make)
        return Vxlan(
            name=seen.name,
            vni=number(data.get(_ID)),
            parent=number(data.get(_LINK)),
            local=address_of(local),
            port=port,
            mac=seen.mac,
            mtu=seen.mtu,
            learning=bool(number(data.get(_LEARNING))),
            gbp=_GBP in data,
            up=seen.up,
        )

    def attributes(self, desired: Vxlan) -> Iterator[Attribute]:
        yield "IFLA_ADDRESS", desired.mac
        yield from super().attributes(desired)

    def data(self, desired: Vxlan) -> Iterator[Attribute]:
        yield "IFLA_VXLAN_ID", desired.vni
        yield "IFLA_VXLAN_LINK", desired.parent
        yield "IFLA_VXLAN_PORT", desired.port
        yield "IFLA_VXLAN_LEARNING", desired.learning
        yield f"IFLA_VXLAN_LOCAL{'' if desired.local.version == 4 else 6}", str(desired.local)
        if desired.gbp:
            # A flag: the presence of the attribute turns it on.
            yield "IFLA_VXLAN_GBP", True

    def changes(self, desired: Vxlan, actual: Vxlan) -> Iterator[Attribute]:
        if actual.mac != desired.mac:
            yield "IFLA_ADDRESS", desired.mac
        if actual.learning != desired.learning:
            learning = ("IFLA_VXLAN_LEARNING", desired.learning)
            yield link_info(desired.make, ("IFLA_VXLAN_ID", desired.vni), learning)

    def completed(self, desired: Vxlan, actual: Vxlan) -> Vxlan:
        if not desired.cpu_checksums:
            return actual
        try:
            return replace(actual, cpu_checksums=not interfaces.offloads_checksums(desired.name))
        except OSError:  # the device has gone meanwhile, which the next read shows
            return actual

    def finish(self, desired: Vxlan) -> None:
        if desired.cpu_checksums:
            interfaces.compute_checksums(desired.name)

    def mark(self, link: Vxlan) -> str:
        return link.mac

    def ends(self, link: Vxlan) -> tuple[object, ...]:
        return (link.local.version, link.vni, link.port)

    def bars(self, desired: Vxlan, other: Link | ForeignLink) -> bool:
        """Compare port, family and flags: devices that are alike share a socket (vxlan_find_sock)."""
        if isinstance(other, Vxlan):
            is_alike = (other.port, other.local.version) == (desired.port, desired.local.version)
            return is_alike and other.gbp != desired.gbp
        return isinstance(other, ForeignLink) and other.port == desired.port

    def make_commands(self, desired: Vxlan, parent: str) -> Iterator[Command]:
        # fmt: off
        yield command(
            "ip", "link", "add", desired.name, "address", desired.mac, "mtu", desired.mtu, "txqueuelen", 0,
            "type", "vxlan", "id", desired.vni, "dev", parent, "local", desired.local,
            "dstport", desired.port, _learning(desired), *(["gbp"] if desired.gbp else []),
        )
        # fmt: on
        if desired.cpu_checksums:
            yield _cpu_checksums(desired)

    def change_commands(self, desired: Vxlan, actual: Vxlan) -> Iterator[Command]:
        change = ("ip", "link", "set", desired.name)
        if actual.mac != desired.mac:
            yield (*change, "address", desired.mac)
        if actual.learning != desired.learning:
            yield (*change, "type", "vxlan", "id", str(desired.vni), _learning(desired))
        if actual.cpu_checksums != desired.cpu_checksums:
            yield _cpu_checksums(desired)


def _cpu_checksums(desired: Vxlan) -> Command:
    return ("ethtool", "-K", desired.name, "tx-checksum-ip-generic", "off")


def _learning(desired: Vxlan) -> str:
    return "learning" if desired.learning else "nolearning"


class WireGuardCodec(LinkCodec[WireGuard]):
    """Codec of WireGuard devices. Keys, port and peers are read and set over generic netlink."""

    resource = WireGuard
    names = re.compile(r"flannel-wg(-v6)?")


CODECS = (DummyCodec(), IpipCodec(), TunCodec(), VxlanCodec(), WireGuardCodec())
