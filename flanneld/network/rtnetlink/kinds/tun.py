"""Persistent TUN devices (linux/if_link.h, IFLA_TUN_*)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flanneld.network import interfaces
from flanneld.network.rtnetlink.links import LinkCodec, SeenLink, number
from flanneld.runtime.shell import Command, command
from flanneld.state.resources import ForeignLink, Tun

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

    def carrier(self, link: Tun) -> str:
        del link
        return "the UDP port of Backend.Port (8285)"

    def make_commands(self, desired: Tun, parent: str) -> Iterator[Command]:
        del parent
        yield ("ip", "tuntap", "add", "dev", desired.name, "mode", "tun")
        yield command("ip", "link", "set", desired.name, "mtu", desired.mtu)


CODEC = TunCodec()
