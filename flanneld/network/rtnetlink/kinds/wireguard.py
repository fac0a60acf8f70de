"""WireGuard devices. Keys, port and peers are set over generic netlink."""

from __future__ import annotations

import re

from flanneld.network.rtnetlink.links import LinkCodec
from flanneld.state.resources import WireGuard


class WireGuardCodec(LinkCodec[WireGuard]):
    """Codec of WireGuard devices. rtnetlink tells nothing but their existence."""

    resource = WireGuard
    names = re.compile(r"flannel-wg(-v6)?")

    def carrier(self, link: WireGuard) -> str:
        v6 = link.name.endswith("-v6")
        return f"the UDP port of Backend.{'ListenPortV6 (51821)' if v6 else 'ListenPort (51820)'}"


CODEC = WireGuardCodec()
