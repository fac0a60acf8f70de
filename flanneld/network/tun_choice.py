"""Choice of this daemon's TUN device: several daemons may share a host, each with its own network."""

from __future__ import annotations

from collections.abc import Sequence

from flanneld.model import IPNetwork
from flanneld.network.host_kernel import HostKernel
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.state.resources import Tun

#: Candidates, as in upstream, where the kernel takes the first free ``flannel%d``.
_NAMES = tuple(f"flannel{number}" for number in range(100))


def tun_for(kernel: HostKernel, networks: Sequence[IPNetwork]) -> str:
    """The device that an earlier run made for one of these networks, else the first free name.

    A device without an address is reused: its creator did not finish. Raises ``OSError``.
    """
    present = {link.name: link for link in kernel.links()}
    ours = (name for name in _NAMES if name in present and _leads_to(kernel, present[name], networks))
    free = (name for name in _NAMES if name not in present)
    return next(ours, None) or next(free)


def _leads_to(kernel: HostKernel, link: SeenLink, networks: Sequence[IPNetwork]) -> bool:
    if not isinstance(link.make, Tun):
        return False
    found = [seen.address for seen in kernel.addresses(4, link.index)]
    return not found or any(address in network for address in found for network in networks)
