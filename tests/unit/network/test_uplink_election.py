"""The election of the uplink, case by case as flannel's users see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.errors import Fatal
from flanneld.model import FAMILIES, Family, IPAddress, Uplink
from flanneld.network.uplink_election import (
    AddressFact,
    DefaultRoute,
    Election,
    HostFacts,
    InterfaceChoice,
    LinkFact,
    NoInterface,
    RouteFact,
    elect,
    keep,
    refuse_link_local,
)

Families = tuple[Family, ...]
Route = Callable[[IPAddress], RouteFact | None]
Texts = list[str | tuple[str, str]]

V4: Families = (4,)
V6: Families = (6,)
DUAL: Families = (4, 6)


def address(index: int, text: str, flags: str = "permanent") -> AddressFact:
    names = ("permanent", "deprecated", "temporary", "tentative")
    return AddressFact(index, ip_address(text), **{name: name in flags.split() for name in names})


def host(*interfaces: tuple[str, Texts], v4: int | None = None, v6: int | None = None) -> HostFacts:
    """Interfaces numbered from 1, each with its addresses; v4 and v6 number the default routes' ones."""
    links, addresses = [], []
    for index, (name, texts) in enumerate(interfaces, 1):
        links.append(LinkFact(name, index, 1500, up=True))
        addresses += [address(index, *([text] if isinstance(text, str) else text)) for text in texts]
    defaults = zip(FAMILIES, (v4, v6), strict=True)
    routes = tuple(DefaultRoute(family, index) for family, index in defaults if index is not None)
    return HostFacts(tuple(links), tuple(addresses), routes)


def wish(
    *ifaces: str, regex: str | tuple[str, ...] = (), reach: str = "", public: str = "", public6: str = ""
) -> InterfaceChoice:
    return InterfaceChoice(
        ifaces,
        (regex,) if isinstance(regex, str) else regex,
        reach,
        IPv4Address(public) if public else None,
        IPv6Address(public6) if public6 else None,
    )


def nowhere(_: IPAddress) -> RouteFact | None:
    return None


def via(index: int, source: str | None) -> Route:
    return lambda _: RouteFact(index, ip_address(source) if source else None, None)


def reason(
    choice: InterfaceChoice, facts: HostFacts, families: Families = V4, route_to: Route = nowhere
) -> str:
    """Why the only wish cannot be met."""
    with pytest.raises(NoInterface) as caught:
        elect(choice, facts, route_to, families)
    (line,) = caught.value.reasons
    return line


LOOPBACK: tuple[str, Texts] = ("lo", ["127.0.0.1", "::1"])
#: The device of Go flannel's TestLookupExtIface.
DUMMY = host(LOOPBACK, ("dummy0", ["1.10.100.1", "192.168.200.128", "172.16.30.18", "172.16.31.200"]))
#: Two networks, both families on each, the default routes on the first.
TWO = host(
    LOOPBACK,
    ("eth0", ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "fe80::1"]),
    ("eth1", ["192.168.0.1", "fd01::1", "fe80::2"]),
    v4=2, v6=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "local", "public"),
    [
        pytest.param(wish(regex=r"192\.168\.200\.\d+"), "192.168.200.128", None, id="ByIfRegexForIPv4"),
        pytest.param(wish(regex=r"dummy\d+"), "1.10.100.1", None, id="ByIfRegexForName"),
        pytest.param(wish("dummy0"), "1.10.100.1", None, id="ByName"),
        pytest.param(wish("172.16.30.18"), "172.16.30.18", None, id="ByIPv4"),
        pytest.param(
            wish(regex=r"172\.16\.30\.\d+", public="172.16.31.200"), "172.16.30.18", "172.16.31.200",
            id="ByIfRegexMatchPublicIPv4",
        ),
        pytest.param(wish(reach="172.16.30.7"), "172.16.30.18", None, id="ByIfCanReach"),
    ],
)  # fmt: skip
def test_the_cases_of_go_flannel_give_the_same_uplink(
    choice: InterfaceChoice, local: str, public: str | None
) -> None:
    found = elect(choice, DUMMY, via(2, "172.16.30.18"), V4)
    expected = Uplink("dummy0", 2, 1500, IPv4Address(local), IPv4Address(public or local))
    assert found == Election(expected, ())


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (wish(), ["Determining IP address of default interface"]),
        (wish(public="172.16.30.18"), ["Searching for interface using 172.16.30.18"]),
        (wish("nowhere", "172.16.30.18"), ["Searching for interface using 172.16.30.18"]),
        (wish("dummy0"), []),
        (wish(regex="dummy0"), []),
    ],
)
def test_each_search_is_told_in_upstreams_words(choice: InterfaceChoice, told: list[str]) -> None:
    said: list[str] = []
    with suppress(NoInterface):
        elect(choice, DUMMY, nowhere, V4, said.append)
    assert said == told


def test_an_ipv4_literal_in_dual_stack_takes_the_public_ipv6_of_the_same_interface() -> None:
    """Go flannel's ByIPv4DualStack."""
    uplink = elect(wish("10.0.0.2", public6="fd00::2"), TWO, nowhere, DUAL).uplink
    v4, v6 = IPv4Address("10.0.0.2"), IPv6Address("fd00::2")
    assert uplink == Uplink("eth0", 2, 1500, v4, v4, v6, v6)


@pytest.mark.parametrize(
    ("choice", "families", "name", "v4", "v6"),
    [
        (wish(), V4, "eth0", "10.0.0.1", None),
        (wish(), V6, "eth0", None, "fd00::1"),
        (wish(), DUAL, "eth0", "10.0.0.1", "fd00::1"),
        (wish("eth1"), V6, "eth1", None, "fd01::1"),
        (wish("eth1"), DUAL, "eth1", "192.168.0.1", "fd01::1"),
        (wish("fd00::2"), V6, "eth0", None, "fd00::2"),
        (wish("fe80::2"), V6, "eth1", None, "fe80::2"),
        (wish("::ffff:10.0.0.2"), V4, "eth0", "10.0.0.2", None),
        (wish("10.0.0.2"), DUAL, "eth0", "10.0.0.2", "fd00::1"),
        (wish("fd01::1"), DUAL, "eth1", "192.168.0.1", "fd01::1"),
        (wish("fd00::1", public6="fd01::1"), DUAL, "eth1", "192.168.0.1", "fd01::1"),
        (wish(public="192.168.0.1"), V4, "eth1", "192.168.0.1", None),
        (wish(public6="fd01::1"), V6, "eth1", None, "fd01::1"),
        (wish(public6="fd01::1"), DUAL, "eth1", "192.168.0.1", "fd01::1"),
        (wish(public="10.0.0.2", public6="fd00::2"), DUAL, "eth0", "10.0.0.2", "fd00::2"),
        (wish("fd00::2", public6="2001:db8::1"), V6, "eth0", None, "fd00::2"),
        (wish(regex="th"), V4, "eth0", "10.0.0.1", None),
        (wish(regex="th1"), V4, "eth1", "192.168.0.1", None),
        (wish(regex="0::2$"), V6, "eth0", None, "fd00::2"),
        (wish(regex="2$"), DUAL, "eth0", "10.0.0.2", "fd00::2"),
        (wish(regex=r"^192\.|^fd01"), DUAL, "eth1", "192.168.0.1", "fd01::1"),
        (wish(regex=r"^192\.|^eth0"), DUAL, "eth0", "10.0.0.1", "fd00::1"),  # One family is not enough.
    ],
)
def test_a_wish_finds_its_interface_and_addresses(
    choice: InterfaceChoice, families: Families, name: str, v4: str | None, v6: str | None
) -> None:
    uplink = elect(choice, TWO, nowhere, families).uplink
    found = (uplink.name, uplink.address, uplink.ipv6_address)
    assert found == (name, v4 and IPv4Address(v4), v6 and IPv6Address(v6))


@pytest.mark.parametrize(
    ("choice", "families", "why"),
    [
        (wish("wlan0"), V4, "--iface=wlan0: there is no interface of this name"),
        (wish("fe80::1%eth0"), V6, "--iface=fe80::1%eth0: there is no interface of this name"),
        (wish("10.9.9.9"), V4, "--iface=10.9.9.9: no interface has the address 10.9.9.9"),
        (wish("fd00::1"), V4, "--iface=fd00::1: the network does not use IPv6"),
        (wish("10.0.0.1"), V6, "--iface=10.0.0.1: the network does not use IPv4"),
        (wish("lo"), V4, "--iface=lo: lo has no IPv4 address that other nodes can reach"),
        (wish("lo"), V6, "--iface=lo: lo has no IPv6 address that other nodes can reach"),
        (
            wish(public="203.0.113.1"), V4,
            "public IP 203.0.113.1: no interface has the address 203.0.113.1; "
            "behind NAT also give --iface the name of the local interface",
        ),
        (
            wish("10.0.0.1", public6="2001:db8::1"), DUAL,
            "--iface=10.0.0.1: no interface has the address 2001:db8::1; "
            "behind NAT also give --iface the name of the local interface",
        ),
        (
            wish("10.0.0.1", public6="fd01::1"), DUAL,
            "--iface=10.0.0.1: both families must use one interface, "
            "but there is 10.0.0.1 on eth0, fd01::1 on eth1",
        ),
        (
            wish(regex="wlan"), V4,
            "--iface-regex=wlan: matches none of lo:[], eth0:[10.0.0.1 10.0.0.2], eth1:[192.168.0.1]",
        ),
        (
            wish(regex="^192"), DUAL,
            "--iface-regex=^192: matches none of lo:[], eth0:[10.0.0.1 10.0.0.2 fd00::1 fd00::2 fe80::1], "
            "eth1:[192.168.0.1 fd01::1 fe80::2]",
        ),
        (wish(reach="10.9.9.9"), V4, "--iface-can-reach=10.9.9.9: no interface has a route to this address"),
    ],
)  # fmt: skip
def test_a_wish_that_cannot_be_met_says_why(choice: InterfaceChoice, families: Families, why: str) -> None:
    assert reason(choice, TWO, families) == why


@pytest.mark.parametrize(
    ("facts", "families", "why"),
    [
        (host(LOOPBACK), V4, "there is no IPv4 default route"),
        (replace(TWO, default_routes=(DefaultRoute(4, 2),)), DUAL, "there is no IPv6 default route"),
        (
            replace(TWO, default_routes=(DefaultRoute(4, 0), DefaultRoute(4, 2))), V4,
            "the IPv4 default route does not lead to a single interface",
        ),
        (
            replace(TWO, default_routes=(DefaultRoute(4, 2), DefaultRoute(6, 3))), DUAL,
            "both families must use one interface, "
            "but there is IPv4 default route on eth0, IPv6 default route on eth1",
        ),
    ],
)  # fmt: skip
def test_a_default_route_that_cannot_serve_says_why(facts: HostFacts, families: Families, why: str) -> None:
    assert reason(wish(), facts, families) == f"default route: {why}"


@pytest.mark.parametrize("choice", [wish(), wish(""), wish(regex="")])
def test_no_wish_or_an_empty_one_takes_the_first_default_route_of_the_family(choice: InterfaceChoice) -> None:
    facts = replace(TWO, default_routes=(DefaultRoute(6, 2), DefaultRoute(4, 3), DefaultRoute(4, 2)))
    assert elect(choice, facts, nowhere, V4).uplink.name == "eth1"


def test_an_interface_without_mtu_is_rejected() -> None:
    facts = replace(TWO, links=tuple(replace(link, mtu=0) for link in TWO.links))
    assert reason(wish("eth0"), facts) == "--iface=eth0: eth0 has MTU 0"


def test_an_interface_that_is_down_can_be_elected() -> None:
    facts = replace(TWO, links=tuple(replace(link, up=False) for link in TWO.links))
    assert elect(wish("eth0"), facts, nowhere, V4).uplink.name == "eth0"


def test_wishes_are_tried_in_order_and_each_failure_is_explained() -> None:
    choice = wish("wlan0", "10.9.9.9", regex=("^wlan", "^lo$", "eth1"), reach="10.0.0.9")
    election = elect(choice, TWO, via(2, "10.0.0.1"), V4)
    assert election.uplink.name == "eth1"
    assert [line.split(":")[0] for line in election.rejected] == [
        "--iface=wlan0", "--iface=10.9.9.9", "--iface-regex=^wlan", "--iface-regex=^lo$",
    ]  # fmt: skip


def test_can_reach_is_tried_last_and_public_ip_alone_no_more() -> None:
    election = elect(wish("wlan0", reach="10.0.0.9", public="192.168.0.1"), TWO, via(2, "10.0.0.2"), V4)
    expected = Uplink("eth0", 2, 1500, IPv4Address("10.0.0.2"), IPv4Address("192.168.0.1"))
    assert election.uplink == expected


@pytest.mark.parametrize(
    ("target", "source", "families", "v4", "v6"),
    [
        ("192.168.0.9", "10.99.0.1", V4, "10.99.0.1", None),
        ("192.168.0.9", None, V4, "192.168.0.1", None),
        ("192.168.0.9", "192.168.0.1", DUAL, "192.168.0.1", "fd01::1"),
        ("fd01::9", "fd01::5", V6, None, "fd01::5"),
        ("fd01::9", "fd01::5", V4, "192.168.0.1", None),
    ],
)
def test_can_reach_takes_the_source_of_the_route_and_completes_the_other_family(
    target: str, source: str | None, families: Families, v4: str | None, v6: str | None
) -> None:
    uplink = elect(wish(reach=target), TWO, via(3, source), families).uplink
    found = (uplink.name, uplink.address, uplink.ipv6_address)
    assert found == ("eth1", v4 and IPv4Address(v4), v6 and IPv6Address(v6))


def test_can_reach_asks_the_kernel_for_the_address_given() -> None:
    routes: dict[IPAddress, RouteFact] = {IPv6Address("fd01::9"): RouteFact(3, None, None)}
    assert elect(wish(reach="fd01::9"), TWO, lambda ip: routes.get(ip), V6).uplink.name == "eth1"


def test_a_route_to_an_interface_that_has_gone_is_no_route() -> None:
    why = reason(wish(reach="10.0.0.9"), TWO, V4, via(77, "10.0.0.1"))
    assert why == "--iface-can-reach=10.0.0.9: no interface has a route to this address"


def test_a_malformed_can_reach_is_fatal_and_not_worth_waiting_for() -> None:
    with pytest.raises(Fatal, match='"gateway" is not an IP address') as caught:
        elect(wish(reach="gateway"), TWO, nowhere, V4)
    assert not isinstance(caught.value, NoInterface)


def test_nothing_found_names_the_reasons_and_the_remedy() -> None:
    with pytest.raises(NoInterface) as caught:
        elect(wish("wlan0", "wlan1"), TWO, nowhere, V4)
    assert len(caught.value.reasons) == 2
    assert all(why in str(caught.value) for why in caught.value.reasons)
    assert "--iface" in caught.value.remedy


@pytest.mark.parametrize("families", [V4, V6, DUAL])
def test_only_a_family_that_the_network_uses_has_addresses(families: Families) -> None:
    uplink = elect(wish("eth0", public="203.0.113.1", public6="2001:db8::1"), TWO, nowhere, families).uplink
    for family, public in zip(FAMILIES, ("203.0.113.1", "2001:db8::1"), strict=True):
        used = family in families
        assert (uplink.local(family) is not None) == used
        assert uplink.public(family) == (ip_address(public) if used else None)


def test_a_public_ip_of_an_unused_family_is_no_wish() -> None:
    assert elect(wish(public="203.0.113.1"), TWO, nowhere, V6).uplink.ipv6_address == IPv6Address("fd00::1")


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        (["169.254.0.1", "10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        (["169.254.0.1", "169.254.0.2"], "169.254.0.1"),
        (["127.0.0.9", "255.255.255.255", "224.0.0.1", "0.0.0.0", "10.0.0.1"], "10.0.0.1"),
        ([("10.0.0.1", "permanent deprecated"), "10.0.0.2"], "10.0.0.2"),
        ([("10.0.0.1", "permanent deprecated"), "169.254.0.1"], "169.254.0.1"),
        ([("10.0.0.1", ""), "10.0.0.2"], "10.0.0.2"),
        ([("10.0.0.1", ""), "169.254.0.2"], "10.0.0.1"),
        (["fe80::1", "fd00::1"], "fd00::1"),
        (["fe80::1"], "fe80::1"),
        ([("fd00::1", "temporary"), ("fd00::2", ""), ("fd00::3", "")], "fd00::2"),
        ([("fd00::1", ""), ("fd00::2", "permanent temporary")], "fd00::2"),
        ([("fd00::1", "permanent tentative"), "fd00::2"], "fd00::2"),
        ([("fd00::1", "permanent tentative")], "fd00::1"),
        ([("fd00::1", "tentative"), ("fd00::2", "temporary")], "fd00::1"),
    ],
)
def test_the_best_address_is_taken(addresses: Texts, best: str) -> None:
    expected = ip_address(best)
    family = expected.version
    uplink = elect(wish("eth0"), host(("eth0", addresses)), nowhere, (family,)).uplink
    assert uplink.local(family) == expected


def test_a_literal_names_even_a_deprecated_address() -> None:
    facts = host(("eth0", ["10.0.0.2", ("10.0.0.1", "deprecated")]))
    assert elect(wish("10.0.0.1"), facts, nowhere, V4).uplink.address == IPv4Address("10.0.0.1")


def test_an_address_on_two_interfaces_belongs_to_the_first() -> None:
    facts = host(("eth0", ["10.0.0.1"]), ("eth1", ["10.0.0.1"]))
    facts = replace(facts, links=facts.links[::-1])
    assert elect(wish("10.0.0.1"), facts, nowhere, V4).uplink.name == "eth1"


def test_a_regex_does_not_see_a_deprecated_address() -> None:
    facts = host(("eth0", [("10.0.0.1", "deprecated")]), ("eth1", ["10.0.0.2"]))
    assert elect(wish(regex=r"^10\."), facts, nowhere, V4).uplink.name == "eth1"


def test_a_regex_prefers_an_address_of_a_later_interface_to_an_earlier_name() -> None:
    facts = host(("net10", ["172.16.0.1"]), ("eth0", ["10.0.0.2"]))
    assert elect(wish(regex="10"), facts, nowhere, V4).uplink.name == "eth0"


def test_a_malformed_regex_does_no_harm_when_another_wish_is_met() -> None:
    election = elect(wish(regex=("(?=x)", "eth1")), TWO, nowhere, V4)
    assert election.uplink.name == "eth1"
    assert "is not RE2" in election.rejected[0]


def test_a_malformed_regex_is_fatal_when_no_wish_is_met() -> None:
    with pytest.raises(Fatal, match="is not RE2") as caught:
        elect(wish("wlan0", regex="(?=x)"), TWO, nowhere, V4)
    assert not isinstance(caught.value, NoInterface)


ELECTED = elect(wish("eth0", public="203.0.113.1"), TWO, nowhere, DUAL).uplink


def test_keep_follows_a_new_index_and_mtu() -> None:
    link = LinkFact("eth0", 9, 9000, up=True)
    addresses = tuple(replace(fact, index=9) for fact in TWO.addresses if fact.index == 2)
    assert keep(ELECTED, HostFacts((link,), addresses, ())) == replace(ELECTED, index=9, mtu=9000)


def test_keep_ignores_better_addresses_and_other_default_routes() -> None:
    worse = tuple(replace(fact, permanent=False, deprecated=True) for fact in TWO.addresses)
    facts = replace(TWO, addresses=(address(2, "10.0.0.77"), *worse), default_routes=(DefaultRoute(4, 3),))
    assert keep(ELECTED, facts) == ELECTED


@pytest.mark.parametrize("lost", ["10.0.0.1", "fd00::1"])
def test_keep_ends_when_a_local_address_has_gone(lost: str) -> None:
    left = tuple(fact for fact in TWO.addresses if str(fact.address) != lost)
    assert keep(ELECTED, replace(TWO, addresses=left)) is None


def test_keep_ends_where_a_link_local_address_is_outdone() -> None:
    link, local = LinkFact("eth0", 2, 1500, up=True), address(2, "fe80::1")
    facts = HostFacts((link,), (local,), ())
    uplink = elect(wish("eth0"), facts, nowhere, V6).uplink
    assert keep(uplink, facts) == uplink
    assert keep(uplink, replace(facts, addresses=(local, address(2, "fd00::1")))) is None


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [
        ("fd00::1", "fe80::1", True),
        ("fd00::1", "fd00::2", False),
        ("fe80::2", "fe80::1", False),
        ("fe80::1", "fd00::1", False),
        ("10.0.0.1", "169.254.3.4", True),
        ("169.254.3.4", "169.254.3.5", False),
    ],
)
def test_link_local_address_replaces_only_another(before: str, now: str, is_refused: bool) -> None:
    def at(text: str) -> Uplink:
        facts = HostFacts((LinkFact("eth0", 2, 1500, up=True),), (address(2, text),), ())
        return elect(wish("eth0"), facts, nowhere, V6 if ":" in text else V4).uplink

    with pytest.raises(NoInterface, match=f"lost {before}") if is_refused else nullcontext():
        refuse_link_local(at(now), at(before))


def test_keep_ends_when_the_address_moved_to_another_interface() -> None:
    moved = tuple(replace(fact, index=3) for fact in TWO.addresses)
    assert keep(ELECTED, replace(TWO, addresses=moved)) is None


def test_keep_ends_when_the_interface_has_another_name_or_no_mtu() -> None:
    renamed = tuple(replace(link, name=f"{link.name}x") for link in TWO.links)
    assert keep(ELECTED, replace(TWO, links=renamed)) is None
    no_mtu = tuple(replace(link, mtu=0) for link in TWO.links)
    assert keep(ELECTED, replace(TWO, links=no_mtu)) is None


NAMES = st.sampled_from(["lo", "eth0", "eth1", "wlan0"])
V4_ADDRESSES = st.sampled_from([f"10.0.0.{n}" for n in range(4)] + ["127.0.0.1", "169.254.0.1"])
V6_ADDRESSES = st.sampled_from([f"fd00::{n}" for n in range(4)] + ["::1", "fe80::1"])
ADDRESSES = (V4_ADDRESSES | V6_ADDRESSES).map(ip_address)
INDEXES = st.integers(0, 4)
LINKS = st.builds(LinkFact, NAMES, st.integers(1, 4), st.sampled_from([1500, 9000, 0]), st.booleans())
DISTINCT = (lambda link: link.name, lambda link: link.index)
FACTS = st.builds(
    HostFacts,
    st.lists(LINKS, min_size=2, unique_by=DISTINCT).map(tuple),
    st.lists(st.builds(AddressFact, INDEXES, ADDRESSES, *[st.booleans()] * 4), min_size=6).map(tuple),
    st.lists(st.builds(DefaultRoute, st.sampled_from(FAMILIES), INDEXES)).map(tuple),
)
NONSENSE = st.text(alphabet=r"eth01.^$[](){}|*+?\:=<!P-", min_size=1, max_size=6)
CHOICES = st.builds(
    InterfaceChoice,
    st.lists(NAMES | ADDRESSES.map(str) | NONSENSE, max_size=2).map(tuple),
    st.lists(NAMES | st.just(r"0\b") | NONSENSE, max_size=2).map(tuple),
    st.just("") | ADDRESSES.map(str) | NONSENSE,
    st.none() | V4_ADDRESSES.map(IPv4Address),
    st.none() | V6_ADDRESSES.map(IPv6Address),
)
ROUTES = st.none() | st.builds(RouteFact, INDEXES, st.none() | ADDRESSES, st.none())


def outcome(choice: InterfaceChoice, facts: HostFacts, route_to: Route, families: Families) -> Uplink | Fatal:
    try:
        return elect(choice, facts, route_to, families).uplink
    except Fatal as error:
        return error


@given(CHOICES, FACTS, ROUTES, st.sampled_from([V4, V6, DUAL]))
@pytest.mark.filterwarnings("ignore:Possible (nested|set)")
def test_every_election_ends_in_a_usable_uplink_or_says_why_not(
    choice: InterfaceChoice, facts: HostFacts, route: RouteFact | None, families: Families
) -> None:
    uplink = outcome(choice, facts, lambda _: route, families)
    if isinstance(uplink, Fatal):
        assert uplink.remedy
        assert uplink.reasons if isinstance(uplink, NoInterface) else "not" in uplink.problem
        return
    link = facts.link(uplink.name)
    assert link is not None
    assert (uplink.index, uplink.mtu) == (link.index, link.mtu or "never 0")
    held = {fact.address for fact in facts.addresses if fact.index == uplink.index}
    if choice.can_reach and route is not None and route.source is not None:
        held.add(route.source)  # The kernel may choose an address of another interface.
    for family in FAMILIES:
        local, public = uplink.local(family), uplink.public(family)
        assert (local in held) if family in families else (local is None)
        assert public == ((choice.public(family) or local) if family in families else None)


@given(CHOICES, FACTS, st.sampled_from([V4, V6, DUAL]))
@pytest.mark.filterwarnings("ignore:Possible (nested|set)")
def test_an_uplink_is_kept_while_nothing_changes(
    choice: InterfaceChoice, facts: HostFacts, families: Families
) -> None:
    uplink = outcome(choice, facts, nowhere, families)
    if isinstance(uplink, Fatal):
        return
    kept: Uplink | Fatal | None = keep(uplink, facts)
    if any(ip.is_link_local for family in families if (ip := uplink.local(family))):
        kept = kept or outcome(choice, facts, nowhere, families)  # an operator may have named that address
    assert kept == uplink
