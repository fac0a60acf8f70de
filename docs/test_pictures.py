"""The pictures can be read by everybody, and the way of a packet has the entries that the daemon writes."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from msgspec.structs import replace

from flanneld.network.firewall.iptables_text import rule_text
from flanneld.network.firewall.rules import Nets, Purpose, desired_rules

DOCS = Path(__file__).parent
PICTURES = ("house.svg", "packet.svg")
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
