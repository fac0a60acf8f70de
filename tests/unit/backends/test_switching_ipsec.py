"""ipsec beside another backend: which policies and routes lead to a peer, and which accept its packets."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import (
    Backend,
    ExitPolicy,
    Host,
    OtherBackend,
    announced,
    with_also,
)
from flanneld.backends.ipsec.resources import Charon, IkeConnection
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import AllowedIp
from flanneld.config import parse
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.network.xfrm import Direction, XfrmPolicy, guards, tunnel_policies
from flanneld.state.resources import Blackhole, Dummy, Resource, Route
from flanneld.subnet.codec import format_attrs, parse_attrs

NETWORK, OUR_SUBNET, SUBNET = (IPv4Network(each) for each in ("10.1.0.0/16", "10.1.5.0/24", "10.1.6.0/24"))
HERE, THERE = IPv4Address("192.0.2.5"), IPv4Address("192.0.2.6")
OWN = Lease(LeaseAttrs(), OUR_SUBNET)
PRIVATE = keys.private_key(bytes(range(32)))
THEIRS = keys.text_of(keys.public_key(keys.private_key(bytes(range(1, 33)))))

IPSEC = LeaseAttrs(THERE, None, "ipsec")
WIREGUARD = LeaseAttrs(THERE, None, "wireguard", {"PublicKey": THEIRS, "Port": 51820})
VXLAN = LeaseAttrs(THERE, None, "vxlan", {"VNI": 1, "VtepMAC": "0a:00:00:00:00:06"})

OPTIONS = {"ipsec": {"PSK": "0123456789abcdef" * 6}, "wireguard": {}, "vxlan": {}}
IDENTITIES = {"wireguard": PRIVATE, "vxlan": {4: "0a:00:00:00:00:05"}}


def made(first: str, second: str = "", **options: Any) -> Backend:
    backend: dict[str, Any] = {"Type": first, **OPTIONS[first]}
    identity: Any = IDENTITIES.get(first)
    if second:
        backend["Also"] = {"Type": second, **OPTIONS[second], **options}
        identity = (identity, IDENTITIES.get(second))
    config = parse(json.dumps({"Network": str(NETWORK), "Backend": backend}))
    uplink = Uplink("eth0", 2, 1500, HERE, HERE)
    host = Host(uplink, None, lambda _: None, lambda _: None, bytes, identity=identity)
    return registry.factory_for(config)(config, host)


def to_peer(backend: Backend, attrs: LeaseAttrs) -> list[Resource]:
    return list(backend.peer(OWN, Lease(attrs, SUBNET)))


def policies(resources: list[Resource]) -> list[XfrmPolicy]:
    return [each for each in resources if isinstance(each, XfrmPolicy)]


def devices(resources: list[Resource]) -> list[str]:
    return [each.device for each in resources if isinstance(each, Route)]


#: The policies of a peer that may send by either backend.
ACCEPTING = tunnel_policies(OUR_SUBNET, SUBNET, HERE, THERE, accepts_others=True)


def test_no_policy_blocks_what_the_other_backend_carries() -> None:
    assert policies(list(made("ipsec").local(OWN))) == guards(NETWORK, OUR_SUBNET)
    for pair in (("ipsec", "wireguard"), ("wireguard", "ipsec"), ("vxlan", "ipsec")):
        local = list(made(*pair).local(OWN))
        assert policies(local) == []
        assert Charon() in local


@pytest.mark.parametrize("second", ["wireguard", "vxlan"])
def test_as_the_first_it_has_the_guards_that_are_routes(second: str) -> None:
    backend = made("ipsec", second)
    local = list(backend.local(OWN))
    assert backend.encrypts
    assert Blackhole(NETWORK, unreachable=True) in local
    assert Dummy("flannel-ipsec", 1423) in local


@pytest.mark.parametrize("other", [WIREGUARD, VXLAN])
def test_in_phase_2_a_policy_leads_to_a_peer_that_may_still_send_by_the_former(other: LeaseAttrs) -> None:
    resources = to_peer(made("ipsec", other.backend_type), with_also(other, IPSEC))
    assert policies(resources) == ACCEPTING
    assert devices(resources) == ["flannel-ipsec"]
    assert any(isinstance(each, AllowedIp) for each in resources) == (other is WIREGUARD)


@pytest.mark.parametrize("former", [WIREGUARD, VXLAN])
def test_in_phase_1_no_policy_leads_and_encrypted_packets_are_accepted(former: LeaseAttrs) -> None:
    resources = to_peer(made(former.backend_type, "ipsec"), with_also(former, IPSEC))
    assert policies(resources) == [each for each in ACCEPTING if each.direction is not Direction.OUT]
    assert any(isinstance(each, IkeConnection) for each in resources)
    assert "flannel-ipsec" not in devices(resources)


def test_without_another_backend_only_encrypted_packets_are_accepted() -> None:
    assert policies(to_peer(made("ipsec"), with_also(IPSEC, WIREGUARD))) == tunnel_policies(
        OUR_SUBNET, SUBNET, HERE, THERE
    )


def test_a_peer_with_wireguard_alone_has_no_policy() -> None:
    resources = to_peer(made("ipsec", "wireguard"), WIREGUARD)
    assert policies(resources) == []
    assert devices(resources) == ["flannel-wg"]


def test_peers_in_the_clear_are_refused_unless_that_is_allowed() -> None:
    with pytest.raises(OtherBackend, match="would be reached unencrypted"):
        to_peer(made("ipsec", "vxlan"), VXLAN)
    assert devices(to_peer(made("ipsec", "vxlan", AllowUnencryptedPeers=True), VXLAN)) == ["flannel.1"]


def test_the_exit_policy_is_that_of_the_backend_with_tables() -> None:
    assert made("ipsec", "vxlan").exit_policy is made("vxlan", "ipsec").exit_policy is ExitPolicy.KEEP


def test_resources_of_both_are_claimed() -> None:
    assert made("vxlan", "wireguard").claims() == (*made("vxlan").claims(), "device flannel-wg")


def test_both_announcements_are_read_back_from_the_lease() -> None:
    attrs = made("ipsec", "wireguard").attributes()
    stored = parse_attrs(format_attrs(attrs, with_ipv6=False))
    assert stored.backend_type == "ipsec"
    known = announced(stored, "wireguard")
    assert known is not None
    assert known.backend_data == {"PublicKey": keys.text_of(keys.public_key(PRIVATE)), "Port": 51820}
