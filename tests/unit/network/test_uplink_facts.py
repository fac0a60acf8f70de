"""Addresses of interfaces, as the kernel's flags describe them (linux/if_addr.h)."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from flanneld.network.rtnetlink.messages import SeenAddress
from flanneld.network.uplink_election import AddressFact
from flanneld.network.uplink_facts import _fact

#: IFA_F_SECONDARY of IPv4 and IFA_F_TEMPORARY of IPv6 are one bit.
SECONDARY = TEMPORARY = 0x01
DADFAILED, DEPRECATED, TENTATIVE, PERMANENT = 0x08, 0x20, 0x40, 0x80


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (0, set()),
        (TEMPORARY, {"temporary"}),
        (DADFAILED, {"deprecated"}),
        (DEPRECATED, {"deprecated"}),
        (TENTATIVE, {"tentative"}),
        (PERMANENT, {"permanent"}),
        (PERMANENT | SECONDARY, {"permanent", "temporary"}),
        (PERMANENT | TENTATIVE | DEPRECATED, {"permanent", "tentative", "deprecated"}),
    ],
)
def test_each_flag_of_an_address_means_one_thing(flags: int, names: set[str], address: str) -> None:
    known = names - {"temporary"} if address == "192.0.2.1" else names
    fields = {name: name in known for name in ("permanent", "deprecated", "temporary", "tentative")}
    ip = ip_address(address)
    assert _fact(SeenAddress(2, ip, 24, flags)) == AddressFact(index=2, address=ip, **fields)
