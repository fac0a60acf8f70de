"""Annotations and podCIDRs: what a node says, and what is written to it."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.config import Config, parse
from flanneld.errors import Fatal, Refused, Retryable
from flanneld.model import Lease, LeaseAttrs
from flanneld.subnet.kube.node_table import NAME, NodeCache, Saved
from flanneld.subnet.kube.nodes import (
    MANAGED,
    SUFFIXES,
    KubeNode,
    NodeReader,
    changed_notes,
    decoded,
    full_prefix,
    items,
    key_of,
    lease_of,
    own_key,
    own_public_ip,
    wanted_notes,
)

PREFIX = "flannel.alpha.coreos.com/"
DUAL = parse(
    '{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:5::/48",'
    ' "Backend": {"Type": "vxlan"}}'
)
IPV4 = parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}')
IPV6 = parse(
    '{"EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fd00:5::/48", "Backend": {"Type": "vxlan"}}'
)
MAC, MAC6 = {"VNI": 1, "VtepMAC": "02:cf:cf:86:37:9c"}, {"VNI": 1, "VtepMAC": "02:cf:cf:86:37:9d"}
NODE = KubeNode(
    "n1",
    "some-uid",
    ("10.5.1.0/24", "fd00:5:0:1::/64"),
    {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": json.dumps(MAC),
        "public-ip": "198.18.0.1",
        "backend-v6-data": json.dumps(MAC6),
        "public-ipv6": "fd00:18::1",
    },
)
ATTRS = LeaseAttrs(IPv4Address("198.18.0.1"), IPv6Address("fd00:18::1"), "vxlan", MAC, MAC6)
KEY = (IPv4Network("10.5.1.0/24"), IPv6Network("fd00:5:0:1::/64"))


def saying(**notes: str) -> KubeNode:
    """The node with other annotations, ``_`` for ``-``; an empty one is left out."""
    changed = {**NODE.notes, **{name.replace("_", "-"): text for name, text in notes.items()}}
    return replace(NODE, notes={name: text for name, text in changed.items() if text})


# ---- the prefix -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/"),
        ("org.com", "org.com/"),
        ("org.com/", "org.com/"),
        ("org.com/9", "org.com/9-"),
        ("org.com/prefix-", "org.com/prefix-"),
        ("a_b.c-d/e_f", "a_b.c-d/e_f-"),
    ],
)
def test_a_prefix_is_completed_as_go_flanneld_does_it(given: str, full: str) -> None:
    assert full_prefix(given) == full


@pytest.mark.parametrize(
    "text", ["", "org", "org/prefix", "org.com/a/b", "org.com//", "Org.com", "org.com/A", "/a", "org.com/a b"]
)
def test_a_prefix_that_go_flanneld_refuses_is_refused(text: str) -> None:
    with pytest.raises(Fatal, match="-kube-annotation-prefix"):
        full_prefix(text)


# ---- reading a node -------------------------------------------------------------------------------


def api_node(**spec: Any) -> dict[str, Any]:
    annotations = {f"{PREFIX}public-ip": "198.18.0.1", f"{PREFIX}other": "x", "public-ip": "y"}
    return {"metadata": {"name": "n1", "uid": "u", "annotations": annotations}, "spec": spec}


def test_node_reader_keeps_only_used_fields() -> None:
    node = NodeReader(PREFIX).read(api_node(podCIDR="10.5.1.0/24", podCIDRs=["10.5.1.0/24"]))
    assert node == KubeNode("n1", "u", ("10.5.1.0/24",), {"public-ip": "198.18.0.1"})
    assert NodeReader("org.com/9-").read(api_node()).notes == {}


def test_nodes_are_ordered_by_their_creation() -> None:
    times = ["2025-12-31T23:59:59Z", "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "2026-02-01T00:00:00Z"]
    odd = [None, 7, "", "yesterday", "2026-01-01T00:00:00+1", "2026-01-01 00:00:00.1", "2026-01-01T00:00:0xZ"]
    found = []
    for text in [*odd, *times]:
        node = api_node()
        node["metadata"]["creationTimestamp"] = text
        found.append(NodeReader(PREFIX).read(node).created)
    assert found[: len(odd)] == [0] * len(odd)
    assert found[len(odd) :] == sorted(set(found[len(odd) :]))
    assert lease_of(replace(NODE, created=7), DUAL).created == 7


def test_many_nodes_are_saved_and_read(tmp_path: Path) -> None:
    saved = Saved(NODE, tuple(replace(NODE, name=f"peer{number}") for number in range(1000)))
    NodeCache(str(tmp_path)).save(saved)
    assert NodeCache(str(tmp_path)).load() == saved


def test_order_of_nodes_is_saved_and_unknown_in_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    NodeCache(str(tmp_path)).save(Saved(replace(NODE, created=7), ()))
    saved = NodeCache(str(tmp_path)).load()
    assert saved is not None
    assert saved.own.created == 7
    text = (tmp_path / NAME).read_text()
    assert '"created":7' in text
    (tmp_path / NAME).write_text(text.replace(',"created":7', ""))
    assert NodeCache(str(tmp_path)).load() == Saved(NODE, ())


@pytest.mark.parametrize(
    ("spec", "cidrs"),
    [
        ({}, ()),
        ({"podCIDR": "10.5.1.0/24"}, ("10.5.1.0/24",)),
        ({"podCIDR": "10.5.1.0/24", "podCIDRs": None}, ("10.5.1.0/24",)),
        ({"podCIDR": "10.5.1.0/24", "podCIDRs": []}, ("10.5.1.0/24",)),
        ({"podCIDR": "10.5.1.0/24", "podCIDRs": "10.5.2.0/24"}, ("10.5.1.0/24",)),
        ({"podCIDR": "", "podCIDRs": []}, ()),
        (
            {"podCIDR": "10.5.1.0/24", "podCIDRs": ["10.5.1.0/24", "fd00:5::/64"]},
            ("10.5.1.0/24", "fd00:5::/64"),
        ),
        ({"podCIDR": 5, "podCIDRs": [None, 7]}, ()),
    ],
)
def test_pod_cidrs_count_and_without_them_the_pod_cidr(spec: Any, cidrs: tuple[str, ...]) -> None:
    assert NodeReader(PREFIX).read(api_node(**spec)).cidrs == cidrs


@pytest.mark.parametrize(
    ("listing", "held"),
    [({"items": [1]}, [1]), ({"items": {"a": 1}}, []), ({}, []), (["items"], []), (None, [])],
)
def test_list_holds_its_items_and_anything_else_holds_none(listing: Any, held: list[Any]) -> None:
    assert items(listing) == held


@pytest.mark.parametrize(
    ("notes", "managed"), [({MANAGED: "true"}, True), ({MANAGED: "false"}, False), ({}, False)]
)
def test_node_is_managed_only_if_it_says_true(notes: dict[str, str], managed: bool) -> None:
    assert replace(NODE, notes=notes).is_managed is managed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "name", "annotations", "spec", "podCIDR", "podCIDRs", PREFIX + MANAGED]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(json_values)
def test_any_node_is_read_or_refused(value: Any) -> None:
    try:
        node = NodeReader(PREFIX).read(value)
    except Refused:
        return
    assert node.name


IMAGE = {"names": ["registry.example.org/a@sha256:00", "registry.example.org/a:v1"], "sizeBytes": 5}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def some_node(images: Any) -> dict[str, Any]:
    return api_node(podCIDR="10.5.1.0/24") | {"status": {"images": images, "conditions": [{"type": "Ready"}]}}


def read(value: Any) -> KubeNode | None:
    try:
        return NodeReader(PREFIX).read(value)
    except Refused:
        return None


def test_status_is_left_out_and_no_list_is_cut_short() -> None:
    listing = {"items": [some_node([IMAGE])] * 2, "metadata": {"continue": "x", "resourceVersion": "7"}}
    found = decoded(compact(listing))
    assert found["metadata"] == listing["metadata"]
    assert [sorted(node) for node in found["items"]] == [["metadata", "spec"]] * 2
    assert [read(node) for node in found["items"]] == [read(some_node([]))] * 2


def test_event_and_error_of_a_watch_are_decoded() -> None:
    event = decoded(compact({"type": "ADDED", "object": some_node([IMAGE])}))
    assert (event["type"], read(event["object"])) == ("ADDED", read(some_node([])))
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    assert decoded(compact(error))["object"] == {"code": 410, "message": "too old"}


@pytest.mark.parametrize("status", [None, 5, "}]", [[]], {"images": [{"names": ["}]"]}]}, {"images": [{}]}])
def test_strange_status_spoils_nothing_else(status: Any) -> None:
    listing = {"items": [some_node([]) | {"status": status}, some_node([IMAGE])]}
    assert [read(node) for node in decoded(compact(listing))["items"]] == [read(some_node([]))] * 2


@given(json_values)
def test_decoding_leaves_out_nothing_that_is_read(value: Any) -> None:
    assert read(decoded(compact(value))) == read(value)
    listed = decoded(compact({"items": [value, some_node([])]}))
    assert [read(each) for each in items(listed)] == [read(value), read(some_node([]))]
    assert read(decoded(compact({"type": "ADDED", "object": value}))["object"]) == read(value)


def test_text_that_no_go_program_writes_is_decoded_all_the_same() -> None:
    assert decoded(b'{"metadata": {"name": "\\ud800"}, "spec": {}}')["metadata"] == {"name": "\ud800"}
    with pytest.raises(ValueError, match="delimiter"):
        decoded(b'{"metadata" "x"}')


# ---- leases ---------------------------------------------------------------------------------------


def test_a_node_with_both_families_is_a_lease_of_both() -> None:
    assert lease_of(NODE, DUAL) == Lease(ATTRS, *KEY, node="n1")


@pytest.mark.parametrize(
    ("config", "key", "families"),
    [(IPV4, (KEY[0], None), (4,)), (IPV6, (None, KEY[1]), (6,))],
    ids=["v4", "v6"],
)
def test_a_family_that_the_network_does_not_use_is_left_out(config: Config, key: Any, families: Any) -> None:
    lease = lease_of(NODE, config)
    assert lease.key == key
    assert [family for family in (4, 6) if lease.attrs.public(family)] == list(families)


def test_a_node_that_has_only_one_of_the_families_is_a_lease_of_that() -> None:
    assert lease_of(replace(NODE, cidrs=("10.5.1.0/24",)), DUAL).key == (KEY[0], None)
    assert lease_of(saying(public_ipv6=""), DUAL).key == (KEY[0], None)


@pytest.mark.parametrize(
    ("text", "number", "length"),
    [
        ("10.5.1.7/24", "10.5.1.0", 24),
        ("fd00:5:0:1::7/64", "fd00:5:0:1::", 64),
        ("10.5.1.0/024", "10.5.1.0", 24),
    ],
)
def test_pod_cidr_may_have_host_bits(text: str, number: str, length: int) -> None:
    key = key_of(replace(NODE, cidrs=(text,)), DUAL)
    assert [net for net in key if net] == [ip_network(f"{number}/{length}")]


@pytest.mark.parametrize(
    "text", ["10.5.1.0", "10.5.1/24", "10.5.1.0/255.255.255.0", "10.5.1.0/+24", "10.5.1.0/33", "fd00:5::/129"]
)
def test_pod_cidr_that_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="which is no network"):
        key_of(replace(NODE, cidrs=(text,)), DUAL)


@pytest.mark.parametrize("text", ["null", ""])
def test_backend_data_may_be_null_or_absent(text: str) -> None:
    lease = lease_of(saying(backend_type="host-gw", backend_data=text), IPV4)
    assert (lease.attrs.backend_type, lease.attrs.backend_data) == ("host-gw", None)


@pytest.mark.parametrize("data", [{"VNI": 1}, [1], "text", 7, True])
def test_backend_data_may_be_any_json(data: Any) -> None:
    assert lease_of(saying(backend_data=json.dumps(data)), IPV4).attrs.backend_data == data


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (saying(public_ip="198.18.0.300"), "public-ip"),
        (saying(public_ip="fd00::1"), "public-ip"),
        (saying(public_ip="", public_ipv6=""), "public IP"),
        (saying(public_ip="0.0.0.0", public_ipv6=""), "public IP"),
        (saying(public_ipv6="fe80::1%eth0"), "public-ipv6"),
        (saying(backend_data="{no"), "backend-data"),
        (replace(NODE, cidrs=()), "no podCIDR"),
        (replace(NODE, cidrs=("10.5.1.0/24", "fd00:5:0:1::/64", "10.5.2.0/24")), "3 podCIDRs"),
        (replace(NODE, cidrs=("10.5.1.0/24", "10.5.2.0/24")), "two podCIDRs of one family"),
        (replace(NODE, cidrs=("10.6.1.0/24",)), "outside Network 10.5.0.0/16"),
        (replace(NODE, cidrs=("10.0.0.0/8",)), "outside Network 10.5.0.0/16"),
        (replace(NODE, cidrs=("fd00:6::/64",)), "outside Network fd00:5::/48"),
        (replace(NODE, cidrs=("10.5.1.0",)), "10.5.1.0"),
        (replace(NODE, cidrs=("10.5.1.0/255.255.255.0",)), "no network"),
        (replace(NODE, cidrs=("0.0.0.0/0",)), "no subnet"),
        (replace(NODE, cidrs=("10.5.1.1/32",)), "no subnet"),
        (replace(NODE, cidrs=("x" * 1000,)), "no network"),
    ],
)
def test_a_node_that_makes_no_sense_is_refused_by_its_name(node: KubeNode, words: str) -> None:
    with pytest.raises(Refused) as refusal:
        lease_of(node, DUAL)
    assert "node n1 " in str(refusal.value)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (replace(NODE, cidrs=("x" * 100,)), f'has the podCIDR "{"x" * 60}", which is no network'),
        (
            saying(public_ip="x" * 100),
            f'has "{"x" * 60}" in its annotation public-ip, which is no IPv4 address',
        ),
    ],
)
def test_long_value_is_truncated_in_messages(node: KubeNode, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        lease_of(node, DUAL)
    assert caught.value.problem == f"node n1 {problem}"


def test_a_network_of_one_node_may_be_its_pod_cidr() -> None:
    config = parse('{"Network": "10.5.1.0/24", "Backend": {"Type": "vxlan"}}')
    assert key_of(NODE, config) == (KEY[0], None)


@pytest.mark.parametrize(
    ("cidrs", "config", "words"),
    [
        ((), IPV4, "no podCIDR yet"),
        ((), DUAL, "no IPv4 podCIDR yet"),
        (("10.5.1.0/24",), DUAL, "no IPv6 podCIDR yet"),
        (("10.9.1.0/24",), IPV4, "outside Network"),
    ],
)
def test_our_own_node_is_waited_for_until_it_has_what_it_needs(
    cidrs: tuple[str, ...], config: Config, words: str
) -> None:
    with pytest.raises(Retryable, match=words):
        own_key(replace(NODE, cidrs=cidrs), config)
    assert own_key(NODE, DUAL) == KEY


# ---- writing --------------------------------------------------------------------------------------

BARE = replace(NODE, notes={})


def patch(attrs: LeaseAttrs, node: KubeNode = BARE) -> str:
    return NodeReader(PREFIX).patch(changed_notes(attrs, node))


def test_the_first_patch_is_byte_for_byte_that_of_go_flanneld() -> None:
    attrs = LeaseAttrs(IPv4Address("10.99.0.11"), None, "vxlan", MAC)
    assert patch(attrs) == (
        r'{"metadata":{"annotations":{"flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"02:cf:cf:86:37:9c\"}",'
        r'"flannel.alpha.coreos.com/backend-type":"vxlan","flannel.alpha.coreos.com/kube-subnet-manager":"true",'
        r'"flannel.alpha.coreos.com/public-ip":"10.99.0.11"}}}'
    )


def test_patch_has_only_changes() -> None:
    node = replace(NODE, notes=wanted_notes(ATTRS, BARE))
    assert changed_notes(ATTRS, node) == {}
    assert changed_notes(replace(ATTRS, backend_v6_data=MAC), node) == {
        "backend-v6-data": '{"VNI":1,"VtepMAC":"02:cf:cf:86:37:9c"}'
    }


def test_host_gw_announces_null_and_both_addresses() -> None:
    attrs = LeaseAttrs(IPv4Address("198.18.0.1"), IPv6Address("fd00:18::1"), "host-gw")
    assert wanted_notes(attrs, BARE) == {
        "kube-subnet-manager": "true",
        "backend-type": "host-gw",
        "backend-data": "null",
        "public-ip": "198.18.0.1",
        "backend-v6-data": "null",
        "public-ipv6": "fd00:18::1",
    }


def test_a_family_without_address_is_not_announced() -> None:
    attrs = LeaseAttrs(None, IPv6Address("fd00:18::1"), "vxlan", None, MAC6)
    assert wanted_notes(attrs, BARE).keys() == {MANAGED, "backend-type", "public-ipv6", "backend-v6-data"}


def test_an_overwrite_is_announced_in_place_of_our_address() -> None:
    node = saying(public_ip_overwrite="192.0.2.7", public_ipv6_overwrite="2001:db8::7")
    notes = wanted_notes(ATTRS, node)
    assert (notes["public-ip"], notes["public-ipv6"]) == ("192.0.2.7", "2001:db8::7")
    assert wanted_notes(ATTRS, saying(public_ip_overwrite="here"))["public-ip"] == "198.18.0.1"


def test_the_operator_may_say_where_a_node_is() -> None:
    node = saying(node_public_ip="192.0.2.8", node_public_ipv6="nonsense")
    assert own_public_ip(node, 4) == IPv4Address("192.0.2.8")
    with pytest.raises(Refused, match="node-public-ipv6"):
        own_public_ip(node, 6)


def test_all_annotations_of_go_flanneld_are_known_and_one_more() -> None:
    assert set(SUFFIXES) - {"endpoints"} == {
        "kube-subnet-manager", "backend-type",
        "backend-data", "public-ip", "public-ip-overwrite", "node-public-ip",
        "backend-v6-data", "public-ipv6", "public-ipv6-overwrite", "node-public-ipv6",
    }  # fmt: skip
