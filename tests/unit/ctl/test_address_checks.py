"""What the doctor says about MAC addresses and addresses, and about who else sets them."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks.kernel import twins
from flanneld.ctl.doctor import examine
from flanneld.ctl.losses import Lost
from flanneld.ctl.neighbors import Claim
from flanneld.ctl.paths import TO_NODES, PathToPeer
from flanneld.state.resources import Neighbor
from tests.unit.ctl.findings import HINT, PROBLEM, document, evidence, number, said
from tests.unit.ctl.test_checks import (
    CONTAINER,
    DOCUMENT,
    MAC,
    OTHER_MAC,
    WELL,
    bridge,
    flannel,
    link,
    path,
    peer,
    port_of,
)


@pytest.mark.parametrize(
    ("seen", "macs", "found"),
    [(MAC, [MAC], 0), (MAC, [MAC.upper()], 0), (OTHER_MAC, [MAC], 1), ("", [MAC], 0), (OTHER_MAC, [], 0)],
    ids=["as announced", "in capitals", "another", "no MAC", "none announced"],
)
def test_device_has_the_mac_that_the_lease_announces(seen: str, macs: list[str], found: int) -> None:
    facts = replace(
        document(lease=DOCUMENT["lease"] | {"macs": macs}), links=(link("eth0"), flannel(mac=seen))
    )
    assert number("mac", facts) == found
    assert evidence("mac", facts) == [f"{OTHER_MAC}, announced is {MAC}"] * found


@pytest.mark.parametrize(
    ("changes", "problem", "cure"),
    [
        (
            {"conflicts": ["10.5.9.0/24"]},
            "MAC of 10.5.9.0/24",
            "ip link set flannel.1 address",
        ),
        ({"conflicts": ["10.5.9.0/24"], "backend": "wireguard"}, "key of 10.5.9.0/24", "remove the key file"),
        ({"macs": [MAC.upper()]}, "MAC of our own device", "ip link set flannel.1 address"),
        ({"conflicts": ["10.5.9.0/24"], "macs": [MAC]}, "MAC of 10.5.9.0/24, our own device", "ip link set"),
    ],
)
def test_clone_is_told_with_whom_it_shares_what(changes: dict[str, Any], problem: str, cure: str) -> None:
    ((_, what, how),) = said("contested", peer(**changes))
    assert what == f"10.5.2.0/24 (192.0.2.2) shares the {problem}"
    assert how.startswith(f"on the cloned node: stop flanneld, {cure}")
    assert not said("contested", peer(macs=[OTHER_MAC]))


@pytest.mark.parametrize(
    ("program", "section"),
    [
        ("NetworkManager", "unmanaged-devices=interface-name:flannel*"),
        ("systemd-networkd", "Unmanaged=yes"),
        ("Zzz", "Unmanaged=yes"),
    ],
)
def test_manager_of_devices_is_told_to_leave_ours(program: str, section: str) -> None:
    facts = replace(WELL, managed=(("flannel.1", program),))
    cure = f"exclude flannel* there: {section}"
    assert said("managers", facts) == [(PROBLEM, f"{program} manages flannel.1", cure)]


@pytest.mark.parametrize(("objects", "rules"), [(False, False), (True, False), (False, True), (True, True)])
def test_fights_about_objects_and_rules_are_told_apart(*, objects: bool, rules: bool) -> None:
    firewall = DOCUMENT["firewall"] | {"fights": rules}
    assert [problem for _, problem, _ in said("fights", document(fights=objects, firewall=firewall))] == [
        *["another program keeps changing its objects"] * objects,
        *["another program keeps changing its rules"] * rules,
    ]


DOCKER0 = (link("eth0"), flannel(), bridge("docker0"), port_of("docker0"))


@pytest.mark.parametrize(
    ("name", "address", "links", "found"),
    [
        ("docker0", "172.17.0.1", DOCKER0, 1),
        ("docker0", "172.17.0.1", DOCKER0[:3], 0),
        ("docker0", "169.254.0.1", DOCKER0, 0),
        ("docker0", "10.5.9.1", DOCKER0, 0),
        ("br7", "172.17.0.1", (*DOCKER0[:2], bridge("br7"), port_of("br7")), 0),
        ("docker0", "172.17.0.1", (*DOCKER0[:2], link("docker0")), 0),
    ],
    ids=["outside", "without containers", "link-local", "inside", "of another runtime", "no bridge"],
)
def test_runtimes_bridge_is_outside_the_network_only_with_containers_and_no_other(
    name: str, address: str, links: tuple[Any, ...], found: int
) -> None:
    facts = replace(WELL, links=links, addresses=(*WELL.addresses[:2], (name, ip_address(address))))
    assert number("other bridge", facts) == found
    assert not said("other bridge", replace(facts, status=document(lease=None).status))
    other = replace(facts, links=(*links, bridge("cni0")), addresses=(*WELL.addresses, *facts.addresses))
    assert not said("other bridge", other)


@pytest.mark.parametrize(
    ("number_lost", "silent", "severity"),
    [
        (1, (), HINT),
        (2, (), PROBLEM),
        (1, (path("tunnel", None),), PROBLEM),
        (1, (path("tunnel", 1450),), HINT),
    ],
)
def test_other_interface_is_a_problem_if_all_leave_by_it_or_the_family_is_silent(
    number_lost: int, silent: tuple[Any, ...], severity: Any
) -> None:
    lost = Lost(TO_NODES, "uplink", "eth1", "route x", number=number_lost, asked=2)
    facts = replace(WELL, lost=(replace(lost, cause="arp"), lost), paths=silent)
    ((found, problem, cure),) = said("uplink choice", facts)
    assert (found, problem) == (severity, "packets to other nodes leave by eth1, and the daemon uses eth0")
    assert cure.endswith("start the daemon with -iface=eth1")
    assert evidence("uplink choice", facts) == [f"route x; so do {number_lost} of 2 looked at"]


def pin(device: str, address: str, mac: str) -> Neighbor:
    return Neighbor(device, ip_address(address), mac)


@pytest.mark.parametrize(
    ("pinned", "inside", "silent", "found"),
    [
        ([pin("eth0", "192.0.2.2", MAC)], [], [], [HINT]),
        ([pin("eth0", "192.0.2.2", MAC)], [], [path("underlay", None)], [PROBLEM]),
        ([pin("eth0", "192.0.2.2", MAC)], [], [path("tunnel", None, "192.0.2.2")], [HINT]),
        ([pin("eth0", "192.0.2.9", MAC)], [], [], []),
        ([pin("cni0", "10.5.1.2", MAC)], [], [], []),
        ([pin("cni0", "10.5.1.2", OTHER_MAC)], [], [], [PROBLEM]),
        ([pin("cni0", "10.5.1.3", OTHER_MAC)], [], [], []),
        ([], [pin("eth0", "10.5.1.1", MAC)], [], []),
        ([], [pin("eth0", "10.5.1.1", OTHER_MAC)], [], [PROBLEM]),
        ([], [pin("eth0", "192.0.2.2", OTHER_MAC)], [], []),
        ([], [pin("eth0", "10.5.1.2", OTHER_MAC)], [], [PROBLEM]),
    ],
    ids=[
        "a node",
        "a silent node",
        "silent elsewhere",
        "no node",
        "a container",
        "a wrong MAC of it",
        "no container",
        "the bridge, inside",
        "a wrong MAC of the bridge",
        "a node, inside",
        "a wrong MAC of itself",
    ],
)
def test_mac_that_is_fixed_by_hand_is_found_where_it_is_wrong_or_may_become_so(
    pinned: list[Neighbor], inside: list[Neighbor], silent: list[Any], found: list[Any]
) -> None:
    at = replace(CONTAINER, mac=MAC, pinned=tuple(inside))
    facts = replace(WELL, containers=(at,), pinned=tuple(pinned), paths=tuple(silent))
    seen = said("pinned neighbours", facts)
    assert [severity for severity, *_ in seen] == found
    for _, problem, cure in seen:
        one = (*pinned, *inside)[0]
        assert problem == f"the MAC address of {one.address} is fixed by hand: {one.mac}"
        start = "nsenter --net=/run/netns/a " if inside else ""
        assert cure == f"{start}ip neigh del {one.address} dev {one.device}"


THIRD_MAC = "02:00:00:00:00:98"


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        (
            Claim(ip_address("192.0.2.1"), frozenset({THIRD_MAC, OTHER_MAC, MAC})),
            (
                PROBLEM,
                "another host has our address 192.0.2.1",
                f"find {THIRD_MAC}, {OTHER_MAC} at the switch; on the wrong host: ip address del"
                " 192.0.2.1 dev ITS_DEVICE",
            ),
        ),
        (Claim(ip_address("192.0.2.1"), frozenset({MAC})), None),
        (
            Claim(ip_address("192.0.2.1"), length=24),
            (
                PROBLEM,
                "another host has our address 192.0.2.1",
                "take it from the other host; then ip address del 192.0.2.1/24 dev eth0; ip address add"
                " 192.0.2.1/24 dev eth0",
            ),
        ),
        (Claim(ip_address("192.0.2.2"), frozenset({OTHER_MAC})), None),
        (
            Claim(ip_address("192.0.2.2"), frozenset({THIRD_MAC, OTHER_MAC})),
            (
                HINT,
                "two hosts have the address 192.0.2.2",
                f"find {THIRD_MAC}, {OTHER_MAC} at the switch; on",
            ),
        ),
    ],
    ids=["ours", "we ourselves", "ours of IPv6", "a node itself", "a node's"],
)
def test_address_of_two_hosts_is_found(claim: Claim, found: tuple[Any, str, str] | None) -> None:
    seen = said("duplicate addresses", replace(WELL, claims=(claim,)))
    assert [each[:2] for each in seen] == ([found[:2]] if found else [])
    assert all(found and cure.startswith(found[2]) for *_, cure in seen)


def claim(number: int, *macs: str, answers: bool = False) -> Claim:
    return Claim(ip_address(f"192.0.2.{number}"), frozenset(macs), answers=answers)


@pytest.mark.parametrize(
    ("claims", "about"),
    [
        ((claim(2, THIRD_MAC), claim(3, THIRD_MAC, answers=True)), [THIRD_MAC]),
        ((claim(3, THIRD_MAC, answers=True), claim(2, THIRD_MAC)), [THIRD_MAC]),
        (
            (claim(2, OTHER_MAC, THIRD_MAC, MAC), claim(3, THIRD_MAC, OTHER_MAC, answers=True)),
            [MAC, THIRD_MAC, OTHER_MAC, "192.0.2.2"],
        ),
        ((claim(2, THIRD_MAC), claim(3, OTHER_MAC, answers=True)), []),
        (
            (claim(2, THIRD_MAC), claim(3, THIRD_MAC, answers=True), claim(9, THIRD_MAC, answers=True)),
            [],
        ),
        (
            (claim(2, THIRD_MAC), claim(3, THIRD_MAC, answers=True), claim(9, OTHER_MAC, answers=True)),
            [THIRD_MAC],
        ),
        ((claim(2, THIRD_MAC), claim(3, THIRD_MAC, answers=True), claim(9, THIRD_MAC)), [THIRD_MAC]),
        ((claim(2, THIRD_MAC), claim(3, THIRD_MAC)), [THIRD_MAC]),
        ((claim(2, THIRD_MAC, answers=True), claim(3, THIRD_MAC, answers=True)), []),
        ((claim(2, THIRD_MAC), claim(9, THIRD_MAC, answers=True)), []),
        ((claim(9, THIRD_MAC), claim(3, THIRD_MAC, answers=True)), []),
        ((claim(3, OTHER_MAC, THIRD_MAC, answers=True),), []),
    ],
    ids=[
        "a clone",
        "in another order",
        "two of each",
        "of their own",
        "the router's",
        "a router of its own",
        "of no node either",
        "both lose packets",
        "both answer",
        "answered by no node",
        "of no node",
        "two that answer",
    ],
)
def test_silent_node_with_the_mac_of_one_that_answers_is_found(
    claims: tuple[Claim, ...], about: list[str]
) -> None:
    peers = [DOCUMENT["peers"][0] | {"public_ips": [f"192.0.2.{each}"]} for each in (2, 3)]
    facts = replace(document(peers=peers), claims=claims)
    seen = [each for check, each in examine(facts) if check.name == "duplicate addresses"]
    assert [each.about for each in seen] == about
    for each in (each for each in seen if each.about != "192.0.2.2"):
        assert each.severity is PROBLEM
        both = "this host" if each.about == MAC else "192.0.2.3"
        assert each.problem == f"192.0.2.2 and {both} have one MAC address"
        assert each.evidence == f"ARP finds both at {each.about}"
        assert each.cure.startswith("give the clone another: a new one in its hypervisor, or ip link set dev")


def test_node_with_the_mac_of_this_host_is_found() -> None:
    peers = [DOCUMENT["peers"][0] | {"public_ips": ["192.0.2.2"]}]
    uplink = replace(link("eth0"), mac=THIRD_MAC)
    facts = replace(document(peers=peers), links=(uplink,), claims=(claim(2), claim(2, THIRD_MAC)))
    (found,) = twins(facts)
    assert (found.problem, found.about) == ("192.0.2.2 and this host have one MAC address", THIRD_MAC)
    assert not list(twins(replace(facts, claims=(claim(2, OTHER_MAC),))))


def underlay(to: str, carried: int | None) -> PathToPeer:
    return PathToPeer("underlay", ip_address(to), 1500, carried, "10.5.2.0/24")


def test_silent_nodes_with_one_mac_may_be_behind_a_router() -> None:
    peers = [DOCUMENT["peers"][0] | {"public_ips": [f"192.0.2.{each}"]} for each in (2, 3)]
    facts = replace(document(peers=peers), claims=(claim(2, THIRD_MAC), claim(3, THIRD_MAC)))
    for carried, found in ((None, 0), (576, 1)):
        paths = (underlay("192.0.2.2", None), underlay("192.0.2.3", carried))
        assert len(list(twins(replace(facts, paths=paths)))) == found


def test_paths_are_not_blamed_for_the_packets_of_a_twin() -> None:
    peers = [DOCUMENT["peers"][0] | {"public_ips": [f"192.0.2.{each}"]} for each in (2, 3)]
    lossy = replace(document(peers=peers), paths=(underlay("192.0.2.2", 576),))
    assert [check.name for check, _ in examine(lossy)] == ["path"]
    seen = examine(replace(lossy, claims=(claim(2, THIRD_MAC), claim(3, THIRD_MAC))))
    assert [check.name for check, _ in seen] == ["duplicate addresses"]


@pytest.mark.parametrize(
    ("name", "address", "changes", "found"),
    [
        ("flannel.7", "10.5.1.0", {}, 1),
        ("flannel.7", "10.6.1.0", {}, 0),
        ("flannel.7", "10.5.1.0", {"origin": "host"}, 0),
        ("flannel.1", "10.5.1.0", {}, 0),
        ("vx7", "10.5.1.0", {}, 0),
    ],
    ids=["in our network", "in another", "no daemon", "the daemon's", "of others"],
)
def test_device_is_left_over_if_it_is_flannels_in_our_network(
    name: str, address: str, changes: dict[str, Any], found: int
) -> None:
    links = (*WELL.links, replace(flannel(), name=name))
    facts = replace(WELL, links=links, addresses=(*WELL.addresses, (name, ip_address(address))))
    assert number("left devices", replace(facts, **changes)) == found
