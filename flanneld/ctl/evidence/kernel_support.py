"""Features that the backend needs and this kernel lacks."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from flanneld.ctl import snapshot
from flanneld.ctl.evidence.encryption import backends_of
from flanneld.ctl.snapshot import ActualState
from flanneld.network.rtnetlink import devices
from flanneld.network.xfrm.table import open_xfrm
from flanneld.state.resources import Link, Tun


class LackingFeature(Struct, frozen=True, gc=False):
    """Feature that this kernel lacks, how that was seen, and the modules that have it."""

    name: str
    evidence: str
    modules: str


def read(document: Mapping[str, Any], found: ActualState) -> Iterator[LackingFeature]:
    """Yield the missing features. Only for a missing device the kernel is asked whether it can make it."""
    wanted = [link for link in snapshot.values(document.get("local")) if isinstance(link, Link)]
    missing = {link.make: link for link in wanted if found.link(link.name) is None}
    for kind, link in missing.items():
        if kind != Tun.make and devices.lacks(kind):
            yield LackingFeature(kind, f"it cannot make a device of this kind; wanted: {link}", kind)
    if "ipsec" in backends_of(document) and _lacks_xfrm():
        yield LackingFeature("XFRM", "it does not know the netlink protocol for it", "xfrm_user esp4")


def _lacks_xfrm() -> bool:
    try:
        open_xfrm().close()
    except OSError as failure:
        return failure.errno == errno.EPROTONOSUPPORT
    return False
