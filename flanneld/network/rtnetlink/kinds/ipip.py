"""IPIP tunnels (linux/if_tunnel.h, IFLA_IPTUN_*)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flanneld.model import IPAddress
from flanneld.network.rtnetlink.links import Attribute, LinkCodec, SeenLink
from flanneld.network.rtnetlink.messages import address_of
from flanneld.runtime.shell import Command, command
from flanneld.state.resources import Ipip

_LOCAL, _REMOTE = 2, 3


class IpipCodec(LinkCodec[Ipip]):
    """Codec of IPIP tunnels. The address 0.0.0.0 means any host."""

    resource = Ipip
    names = re.compile(r"flannel\.ipip")
    spares_others = True

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> Ipip:
        local, remote = (_end(data.get(each)) for each in (_LOCAL, _REMOTE))
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

    def carrier(self, link: Ipip) -> str:
        del link
        return "IP protocol 4"

    def make_commands(self, desired: Ipip, parent: str) -> Iterator[Command]:
        ends = ("local", desired.local or "any", "remote", desired.remote or "any")
        for plain in super().make_commands(desired, parent):
            yield command(*plain, *ends, "ttl", "inherit", "nopmtudisc")


def _end(raw: bytes | None) -> IPAddress | None:
    return address_of(raw) if raw and any(raw) else None


CODEC = IpipCodec()
