"""What a kernel might tell: rtnetlink, nf_tables, x_tables and libnftables, tampered with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import FAMILIES, Family
from flanneld.network import routing
from flanneld.network.firewall import netlink
from flanneld.network.firewall.nft_json import read_chains
from flanneld.network.firewall.nftables import read_listing, rule_json
from flanneld.network.firewall.rules import Purpose, desired_rules
from flanneld.network.firewall.xtables import TableDump
from flanneld.network.rtnetlink import kernel, links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import MalformedNetlink, attribute, message, messages
from tests.unit.mutations import tampered_bytes, tampered_json
from tests.unit.network.firewall.test_rules import NETS

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str, part: str) -> Any:
    return json.loads((GOLDEN / name).read_text())[part]


# ---- rtnetlink -----------------------------------------------------------------------------------

DUMPS = [bytes.fromhex(each) for each in golden("rtnetlink-dumps.json", "messages")]
DECODERS: tuple[Callable[[bytes, int, int], object], ...] = (
    lambda data, offset, end: rtnl.decode_route(data, offset, end, str),
    lambda data, offset, end: rtnl.decode_neighbor(data, offset, end, str),
    lambda data, offset, end: rtnl.decode_gone_neighbor(data, offset, end, str),
    rtnl.outline,
    rtnl.decode_blackhole,
    rtnl.decode_address,
    links.decode,
    routing.decode_default_route,
    routing.decode_lookup,
    routing.decode_host_route,
    routing.decode_local,
)


def test_what_a_real_kernel_sent_is_understood() -> None:
    told = [
        kernel.decode_notification(kind, data, at, end, str)
        for data in DUMPS
        for kind, *_, at, end in messages(data)
    ]
    assert len(told) >= len(DUMPS)
    assert kernel.Overrun() not in told
    names = [str(item.resource) for item in told if isinstance(item, kernel.ResourceChanged)]
    assert any(name.startswith("route 10.5.3.0/24 via 10.5.3.0") for name in names)
    assert any(name.startswith("fdb 02:00:00:00:00:11 dst 198.18.0.101") for name in names)


@given(tampered_bytes(DUMPS))
def test_a_tampered_dump_is_read_or_malformed(data: bytes) -> None:
    for kind, *_, offset, end in messages(data):
        kernel.decode_notification(kind, data, offset, end, str)
        for decode in DECODERS:
            with suppress(MalformedNetlink):
                decode(data, offset, end)


# ---- nf_tables -----------------------------------------------------------------------------------

REMOVALS = [
    message(
        0x0A00 | kind, 0, bytes([family, 0, 0, 0]) + attribute(1, b"nat\0") + attribute(2, b"FLANNEL-FWD\0")
    )
    + message(0x0A0F, 0, b"\0\0\0\0" + attribute(3, b"nft\0"))
    for kind in (2, 5, 8)
    for family in (2, 10)
]


@pytest.mark.parametrize(("family", "number"), [(4, 2), (6, 10)])
@pytest.mark.parametrize(
    ("kind", "name", "chain"), [(2, 3, ""), (5, 3, "FLANNEL-FWD"), (8, 2, "FLANNEL-FWD")]
)
def test_removal_of_a_table_a_chain_and_a_rule_is_read_with_its_author(
    kind: int, name: int, chain: str, family: Family, number: int
) -> None:
    """linux/netfilter/nf_tables.h: DELTABLE, DELCHAIN, DELRULE; NFTA_CHAIN_NAME is 3, NFTA_RULE_CHAIN 2."""
    body = bytes([number, 0, 0, 0]) + attribute(1, b"nat\0") + attribute(name, b"FLANNEL-FWD\0")
    data = message(0x0A00 | kind, 0, body)
    assert netlink._fold(set(), data) == {netlink.Removal(family, "nat", chain)}
    done = message(0x0A0F, 0, b"\0\0\0\0" + attribute(3, b"nft\0"))
    assert netlink._fold(set(), data + done) == {netlink.Removal(family, "nat", chain, "nft")}


@given(tampered_bytes(REMOVALS))
def test_a_tampered_removal_is_one_or_none(data: bytes) -> None:
    found = netlink._fold(set(), data)
    assert all(isinstance(each, netlink.Removal) for each in found)


def test_a_message_without_a_body_tells_nothing() -> None:
    assert netlink._fold(set(), message(0x0A08, 0, b"")) == set()


# ---- x_tables ------------------------------------------------------------------------------------

TABLES = [
    TableDump(given["family"], given["hooks"], given["entries"], bytes.fromhex(given["data"]))
    for given in golden("x_tables-nat.json", "snapshots")
]


@pytest.mark.parametrize("table", TABLES, ids=["IPv4", "IPv6"])
def test_a_real_table_is_understood(table: TableDump) -> None:
    masquerade, leads_there = table.rules("FLANNEL-POSTRTG"), table.rules("POSTROUTING")
    assert masquerade is not None
    assert [(rule.verdict, rule.random, rule.extra) for rule in masquerade] == [
        ("RETURN", False, ""),
        ("MASQUERADE", True, ""),
    ]
    assert leads_there is not None
    assert [rule.verdict for rule in leads_there] == ["FLANNEL-POSTRTG"]


#: Where an entry says where the next one begins.
NEXT = {4: 90, 6: 142}


@given(st.data(), st.sampled_from(TABLES))
def test_a_tampered_table_is_read_or_malformed(data: st.DataObject, table: TableDump) -> None:
    tampered = TableDump(table.family, table.hooks, table.entries, data.draw(tampered_bytes([table.data])))
    for chain in ("POSTROUTING", "FLANNEL-POSTRTG"):
        with suppress(MalformedNetlink):
            tampered.rules(chain)
    assert isinstance(tampered.count(), int)


@pytest.mark.parametrize("table", TABLES, ids=["IPv4", "IPv6"])
def test_an_entry_that_leads_to_itself_ends_the_reading(table: TableDump) -> None:
    place = table.hooks["POSTROUTING"][0] + NEXT[table.family]
    data = bytearray(table.data)
    assert int.from_bytes(data[place : place + 2], sys.byteorder) > NEXT[table.family]
    data[place : place + 2] = b"\0\0"
    with pytest.raises(MalformedNetlink):
        TableDump(table.family, table.hooks, table.entries, bytes(data)).rules("POSTROUTING")


# ---- libnftables ---------------------------------------------------------------------------------


def listing(family: Family) -> dict[str, Any]:
    rules = desired_rules("native", NETS[family], Purpose(True, True, True))
    chains = [{"chain": {"name": name, "table": table}} for table, name in rules]
    listed = [
        {"rule": {"chain": chain[1], "handle": number, **rule_json(family, rule)}}
        for chain, each in rules.items()
        for number, rule in enumerate(each)
    ]
    return {"nftables": [{"metainfo": {"json_schema_version": 1}}, *chains, *listed]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_listing_of_our_rules_is_understood(family: Family) -> None:
    assert read_listing(family, listing(family)).rules == desired_rules(
        "native", NETS[family], Purpose(True, True, True)
    )


DPORT = {"payload": {"protocol": "udp", "field": "dport"}}
STATE = {"ct": {"key": "state"}}
#: A table of another program, with the statements that ours lacks.
FOREIGN: dict[str, Any] = {
    "nftables": [
        {"chain": {"name": "input"}},
        *(
            {"rule": {"chain": "input", "handle": 7, "expr": [statement, {"jump": {"target": "input"}}]}}
            for statement in (
                {"match": {"op": "in", "left": STATE, "right": ["established", "new"]}},
                {"match": {"op": "==", "left": DPORT, "right": {"set": [53, {"range": [8000, 9000]}]}}},
                {"match": {"op": "!=", "left": {"meta": {"key": "nfproto"}}, "right": "ipv6"}},
                {"vmap": {"key": DPORT, "data": {"set": [[53, {"accept": None}], [80, {"drop": None}]]}}},
                {"limit": {"rate": 5}},
            )
        ),
    ]
}


@given(tampered_json([listing(4), FOREIGN]))
def test_a_tampered_listing_is_read_or_refused(answer: Any) -> None:
    with suppress(ValueError):
        read_listing(4, answer)
    with suppress(ValueError):
        read_chains(json.dumps(answer), 6)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"nftables": [{"rule": {"chain": "forward", "handle": 1, "expr": []}}]},
        {
            "nftables": [
                {"chain": {"name": "forward"}},
                {"rule": {"chain": "forward", "handle": 1, "comment": []}},
            ]
        },
    ],
    ids=["nothing", "a rule before its chain", "a comment that is a list"],
)
def test_a_listing_that_makes_no_sense_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="not understood"):
        read_listing(4, answer)
