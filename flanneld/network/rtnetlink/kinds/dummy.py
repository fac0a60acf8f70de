"""Dummy devices, which drop all packets: routes lead there whose packets must not leave as they are."""

from __future__ import annotations

import re

from flanneld.network.rtnetlink.links import LinkCodec
from flanneld.state.resources import Dummy


class DummyCodec(LinkCodec[Dummy]):
    """Such a device has no properties of its own."""

    resource = Dummy
    names = re.compile(r"flannel-ipsec")

    def carrier(self, link: Dummy) -> str:
        del link
        return "ESP (IP protocol 50), and UDP ports 500 and 4500"


CODEC = DummyCodec()
