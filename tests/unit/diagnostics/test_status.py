"""Parts of the status document as JSON."""

from __future__ import annotations

import json
from ipaddress import IPv4Network

import pytest
from msgspec import UNSET

from flanneld.diagnostics.describe import peers_of, states
from flanneld.diagnostics.status import PeerStatus, encoded, known
from flanneld.model import Lease, LeaseAttrs
from flanneld.reconcile.peers import Refusal, View
from flanneld.state.table import TunnelSession


@pytest.mark.parametrize("text", ["vxlan", "\u00e9", '"\n\0', "\ud800"])
def test_any_text_out_of_a_lease_is_encoded(text: str) -> None:
    assert json.loads(encoded(PeerStatus((), reason=text)))["reason"] == text


def test_a_peer_has_words_for_programs_beside_the_text() -> None:
    subnet = IPv4Network("10.5.2.0/24")
    lease = Lease(LeaseAttrs(), subnet)
    view = View([lease], {}, {}, {lease.key: Refusal("a text", "cloned key")}, {}, synced=True)
    (peer,) = peers_of(view, {}, [TunnelSession(subnet, is_established=False, protocol="ipsec")])
    assert (peer.reason, peer.code) == ("a text", "cloned key")
    assert [each.protocol for each in known(peer.sessions) or ()] == ["ipsec"]


@pytest.mark.parametrize(("vni", "vnis"), [(7, [7]), (True, []), ("7", []), (7.5, [])])
def test_vni_of_a_lease_is_told_if_it_is_a_number(vni: object, vnis: list[int]) -> None:
    lease = Lease(LeaseAttrs(backend_data={"VNI": vni}), IPv4Network("10.5.2.0/24"))
    (peer,) = peers_of(View([lease], {}, {}, {}, {}, synced=True), {})
    assert list(peer.vnis) == vnis


@pytest.mark.parametrize(
    ("also", "told"),
    [({"Type": "vxlan"}, "vxlan"), ({"Type": ""}, UNSET), ({"Type": 7}, UNSET), ("vxlan", UNSET)],
)
def test_second_backend_of_a_peer_is_told(also: object, told: object) -> None:
    lease = Lease(LeaseAttrs(backend_type="host-gw", backend_data={"Also": also}), IPv4Network("10.5.2.0/24"))
    (peer,) = peers_of(View([lease], {}, {}, {}, {}, synced=True), {})
    assert peer.also == told


def test_texts_of_a_lease_are_bounded_and_escaped_in_status_metrics_and_log() -> None:
    word = "\u202e" + "x" * 1_000_000
    told = "\\u202e" + "x" * 199 + "... and 999801 more"
    data = {"VNI": 1, "VtepMAC": word, "PublicKey": word}
    lease = Lease(LeaseAttrs(backend_type=word, backend_data=data), IPv4Network("10.5.2.0/24"))
    view = View([lease], {}, {}, {}, {}, synced=True)
    (peer,) = peers_of(view, {})
    assert (peer.backend, peer.macs) == (told, (told,))
    assert [backend for backend, _ in states(view, {})] == [told]
    assert len(encoded(peer)) < 1000
    assert len(str(lease.attrs)) < 1000
