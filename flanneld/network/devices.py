"""Making, changing and removing devices: the only importer of pyroute2.

pyroute2 is imported when a device has to be touched, which a restart over a healthy device never
does, and without its package ``__init__``, which would import every protocol it speaks.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

from flanneld.imports import package_without_init
from flanneld.network import tun
from flanneld.network.links import Step, step
from flanneld.network.resources import ForeignLink, Ipip, Link, Tun, Vxlan


def put(wanted: Link, actual: Link | ForeignLink | None) -> None:
    """Make the device, or turn the one that is there into it. Raises ``OSError``."""
    with _iproute() as route:
        if isinstance(actual, Link) and step(wanted, actual) is Step.SET:
            _set(route, wanted, actual)
            return
        if actual is not None:
            _delete(route, wanted.name)
        _create(route, wanted)


def rename(index: int, name: str) -> None:
    """Give a device another name. Raises ``OSError``."""
    with _iproute() as route:
        try:
            _call(route, "set", index=index, ifname=name)
        except OSError as failure:
            if failure.errno != errno.EBUSY:
                raise
            # Before Linux 6.2 a device has to be down for that.
            _call(route, "set", index=index, state="down")
            _call(route, "set", index=index, ifname=name)
            _call(route, "set", index=index, state="up")


def drop(name: str) -> None:
    """Remove a device; one that is not there is fine. Raises ``OSError``."""
    with _iproute() as route:
        try:
            _delete(route, name)
        except OSError as failure:
            if failure.errno != errno.ENODEV:
                raise


def _create(route: Any, wanted: Link) -> None:
    if isinstance(wanted, Tun):
        tun.make(wanted.name)
        _call(route, "set", index=_index(route, wanted.name), mtu=wanted.mtu)
    else:
        data = _vxlan_data(wanted) if isinstance(wanted, Vxlan) else _ipip_data(wanted)
        _call(route, "add", ifname=wanted.name, kind=wanted.make, mtu=wanted.mtu, txqlen=0, **data)
    _refuse_router_advertisements(wanted.name)
    _call(route, "set", index=_index(route, wanted.name), state="up")


def _vxlan_data(wanted: Vxlan) -> dict[str, Any]:
    return {
        "address": wanted.mac,
        "vxlan_id": wanted.vni,
        "vxlan_link": wanted.parent,
        "vxlan_port": wanted.port,
        "vxlan_learning": wanted.learning,
        "vxlan_local" if wanted.local.version == 4 else "vxlan_local6": str(wanted.local),
        # A flag: the attribute's mere presence turns it on.
        **({"vxlan_gbp": True} if wanted.gbp else {}),
    }


def _ipip_data(wanted: Ipip) -> dict[str, Any]:
    """Path MTU discovery is on unless turned off: no packet could then be fragmented on the way."""
    ends = {"ipip_local": wanted.local, "ipip_remote": wanted.remote}
    return {
        **{name: str(end) for name, end in ends.items() if end is not None},
        "ipip_ttl": 0,
        "ipip_tos": 0,
        "ipip_pmtudisc": 0,
    }


def _set(route: Any, wanted: Link, actual: Link) -> None:
    """Touch only what differs: even a MAC set to what it is makes the kernel forget all neighbours."""
    index = _index(route, wanted.name)
    if isinstance(wanted, Vxlan) and isinstance(actual, Vxlan):
        _set_vxlan(route, index, wanted, actual)
    if actual.mtu != wanted.mtu:
        _call(route, "set", index=index, mtu=wanted.mtu)
    if actual.up != wanted.up:
        _call(route, "set", index=index, state="up" if wanted.up else "down")


def _set_vxlan(route: Any, index: int, wanted: Vxlan, actual: Vxlan) -> None:
    if actual.mac != wanted.mac:
        _call(route, "set", index=index, address=wanted.mac)
    if actual.learning != wanted.learning:
        _call(route, "set", index=index, kind="vxlan", vxlan_learning=wanted.learning, vxlan_id=wanted.vni)


def _delete(route: Any, name: str) -> None:
    _call(route, "del", index=_index(route, name))


def _index(route: Any, name: str) -> int:
    index: int = _call(route, "get", ifname=name)[0]["index"]
    return index


def _call(route: Any, verb: str, **arguments: Any) -> Any:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        return route.link(verb, **arguments)
    except NetlinkError as failure:
        # OSError picks its subclass by errno, so callers can tell a missing device from a refusal.
        raise OSError(failure.code or errno.EIO, f"link {verb}: {failure.args[-1]}") from failure


def _refuse_router_advertisements(name: str) -> None:
    """What the overlay carries must never configure this host. A kernel without IPv6 has no such file."""
    with suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{name}/accept_ra").write_text("0")


def _iproute() -> Any:
    package_without_init("pyroute2")
    from pyroute2.iproute.linux import IPRoute

    return IPRoute()
