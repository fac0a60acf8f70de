"""The pictures can be read by everybody, and show what the daemon does."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import Backend, Host, OtherBackend
from flanneld.backends.wireguard import keys, mesh, rotation
from flanneld.config import parse
from flanneld.errors import Refused
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.network.firewall.iptables_text import rule_text
from flanneld.network.firewall.rules import Nets, Purpose, desired_rules
from flanneld.state.resources import Route
from tests.bench import timeline
from tests.unit.backends.wireguard.test_mesh import UNABLE, Site

DOCS = Path(__file__).parent
PICTURES = ("house.svg", "mesh.svg", "packet.svg", "start.svg", "switch.svg")
SVG = "{http://www.w3.org/2000/svg}"
NETWORK = IPv4Network("10.5.0.0/16")
SUBNETS = (IPv4Network("10.5.29.0/24"), IPv4Network("10.5.96.0/24"))


def picture(name: str) -> Element:
    return ElementTree.parse(DOCS / name).getroot()  # noqa: S314 - a file of our own


ENTRIES = [
    each.text or "" for each in picture("packet.svg").iter(f"{SVG}text") if each.get("class") == "entry"
]


@pytest.mark.parametrize("entry", dict.fromkeys(ENTRIES))
def test_entry_of_the_daemon_on_the_way_of_a_packet_is_what_it_writes(entry: str) -> None:
    """The page on backends has the kernel's entries; the rules are those of the two nodes."""
    rules = {
        rule_text(replace(rule, comment=""))
        for subnet in SUBNETS
        for chain in desired_rules("own-chains", Nets(NETWORK, subnet), Purpose(True, True)).values()
        for rule in chain
    }
    page = (DOCS / "backends.md").read_text().splitlines()
    assert entry in rules or any(entry in line for line in page)


@pytest.mark.parametrize("name", PICTURES)
def test_picture_has_words_for_screen_readers_and_colours_for_dark_pages(name: str) -> None:
    drawn = picture(name)
    assert drawn.get("role") == "img"
    assert drawn.get("aria-labelledby") == "title desc"
    for part in ("title", "desc"):
        (said,) = drawn.findall(f"{SVG}{part}")
        assert (said.get("id"), bool(said.text)) == (part, True)
    assert "@media (prefers-color-scheme: dark)" in (drawn.findtext(f"{SVG}style") or "")


def test_each_picture_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [each.name for each in DOCS.glob("*.svg") if f"]({each.name})" not in pages] == []


def test_way_of_a_packet_has_entries() -> None:
    assert len(ENTRIES) > 8


VXLAN, WIREGUARD = {"Type": "vxlan"}, {"Type": "wireguard"}
#: ``Backend`` in the network config, before the switch and in each of its phases.
PHASES: list[dict[str, Any]] = [
    VXLAN,
    {**VXLAN, "Also": WIREGUARD},
    {**WIREGUARD, "Also": VXLAN},
    WIREGUARD,
]
WAYS = {
    (int(each.attrib["data-own"]), int(each.attrib["data-peer"])): each.text
    for each in picture("switch.svg").iter(f"{SVG}text")
    if each.get("class") == "way"
}


def node(phase: dict[str, Any], number: int) -> Backend:
    """Return the backend of a node in a phase; nodes of different numbers have different keys and MACs."""
    config = parse(json.dumps({"Network": str(NETWORK), "Backend": phase}))
    facts = {
        "vxlan": {4: f"0a:00:00:00:00:{number:02x}"},
        "wireguard": keys.private_key(bytes([number] * 32)),
    }
    both = tuple(facts[each["Type"]] for each in (phase, phase.get("Also")) if each)
    address = IPv4Address(f"192.0.2.{number}")
    uplink = Uplink("eth0", 2, 1500, address, address)
    identity = both if "Also" in phase else both[0]
    host = Host(uplink, None, lambda _: None, lambda _: None, bytes, identity=identity)
    return registry.factory_for(config)(config, host)


@pytest.mark.parametrize(("own", "peer"), [(own, peer) for own in range(4) for peer in range(4)])
def test_device_to_a_peer_in_the_picture_of_a_switch_is_that_of_its_route(own: int, peer: int) -> None:
    lease = Lease(node(PHASES[peer], 12).attributes(), SUBNETS[1])
    try:
        led = [*node(PHASES[own], 11).peer(Lease(LeaseAttrs(), SUBNETS[0]), lease)]
    except (Refused, OtherBackend):
        led = []
    devices = [each.device for each in led if isinstance(each, Route)]
    assert WAYS[own, peer] == (devices[0] if devices else "not reached")


def test_start_in_time_is_drawn_from_its_data() -> None:
    ends = json.loads(timeline.DATA.read_text())
    assert timeline.PICTURE.read_text() == timeline.draw(ends)
    assert [*ends] == [step.end for step in timeline.STEPS]
    assert [*ends.values()] == sorted(ends.values())


def test_steps_of_the_start_in_time_end_with_the_lines_of_a_log_in_their_order() -> None:
    log = (DOCS.parent / "tests/faults/golden/hosts/healthy/log.txt").read_text()
    places = [log.find(f"I {step.end}") for step in timeline.STEPS]
    assert -1 not in places
    assert places == sorted(places)


SECONDS = {
    "session": rotation.DEAD,
    "silent": rotation.DEAD + rotation.GIVEN_UP,
    "search": rotation.SEARCH_KEEPALIVE,
    "first": rotation.FIRST_TRY,
    "later": rotation.LATER_TRY,
    "nat": mesh.NAT_KEEPALIVE,
}


def test_times_in_the_picture_of_a_mesh_are_those_of_the_code() -> None:
    told = {each.get("data-seconds"): each.text for each in picture("mesh.svg").iter(f"{SVG}tspan")}
    assert told == {name: f"{value:g} s" for name, value in SECONDS.items()}


def test_pairs_in_the_picture_of_a_mesh_meet_as_in_the_simulation() -> None:
    cells = {
        (each.attrib["data-own"], each.attrib["data-peer"]): each.text
        for each in picture("mesh.svg").iter(f"{SVG}text")
        if "data-own" in each.attrib
    }
    assert cells == {
        (one.value, other.value): "does not" if {one, other} in UNABLE else "meets"
        for one in Site
        for other in Site
    }
