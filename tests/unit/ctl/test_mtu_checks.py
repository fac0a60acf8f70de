"""What the doctor says about sizes of packets, and what makes them slow."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.checks import Facts
from flanneld.ctl.neighbors import Claim
from flanneld.ctl.paths import PathToPeer
from flanneld.findings import Severity
from flanneld.subnet.subnet_file import Previous
from tests.unit.ctl.findings import HINT, PROBLEM, backend, document, evidence, number, said
from tests.unit.ctl.test_checks import (
    DOCUMENT,
    WELL,
    bridge,
    container,
    flannel,
    link,
    path,
    port_of,
)


@pytest.mark.parametrize(
    ("links", "facts", "found"),
    [
        ((bridge("cni0", 1450), port_of("cni0")), WELL, 0),
        ((bridge("cni0", 1451), port_of("cni0")), WELL, 1),
        ((bridge("cni0", 1451),), WELL, 0),
        ((link("cni0", 1451),), WELL, 0),
        ((replace(link("cni0", 1451), make=replace(bridge("cni0").make, make="veth")),), WELL, 1),
        ((bridge("cni0", 1451), port_of("cni0")), document(mtu=0), 1),
        ((bridge("cni0", 1451), port_of("cni0")), replace(document(mtu=0), previous=Previous()), 0),
        ((bridge("cni0", 1451), port_of("cni0")), document(mtu=1451), 0),
    ],
    ids=[
        "as allowed",
        "larger",
        "no ports",
        "no bridge",
        "a veth",
        "by the file",
        "not known",
        "another MTU",
    ],
)
def test_way_to_containers_may_have_the_networks_mtu_at_most(
    links: tuple[Any, ...], facts: Facts, found: int
) -> None:
    facts = replace(facts, links=(link("eth0"), flannel(), *links))
    problem = (PROBLEM, "cni0 has the MTU 1451, the network allows 1450", "ip link set dev cni0 mtu 1450")
    assert said("containers", facts) == [problem] * found


NARROW = "1 container whose veth pair has a smaller MTU at one end"
LARGE = "1 container with a larger MTU than the network allows, 1450"
BOTH_ENDS = "ip link set dev veth1 mtu 1450; nsenter --net=/run/netns/a ip link set dev eth0 mtu 1450"


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (container(mtu=1450, port="veth1", port_mtu=1450), []),
        (container(mtu=1451, port="veth1", port_mtu=1500), [(HINT, LARGE, BOTH_ENDS)]),
        (container(mtu=1400, port="veth1", port_mtu=1500), [(PROBLEM, NARROW, BOTH_ENDS)]),
        (container(mtu=1451), [(HINT, LARGE, "nsenter --net=/run/netns/a ip link set dev eth0 mtu 1450")]),
        (
            container(mtu=1500, port="veth1", port_mtu=1449),
            [(PROBLEM, NARROW, BOTH_ENDS), (HINT, LARGE, BOTH_ENDS)],
        ),
        (replace(container(mtu=1500), status=document(mtu=0).status, previous=Previous()), []),
    ],
    ids=["fits", "larger", "smaller inside", "no port", "smaller outside", "not known"],
)
def test_veth_pair_of_a_container_has_the_networks_mtu(
    facts: Facts, found: list[tuple[Severity, str, str]]
) -> None:
    assert said("containers", facts) == found


DUAL = ("10.5.0.0/16", "fc00::/48")


@pytest.mark.parametrize(
    ("facts", "uplink", "devices", "cures"),
    [
        (WELL, 1500, {"flannel.1": 1450}, []),
        (
            WELL,
            1300,
            {"flannel.1": 1280},
            ["raise the MTU of eth0, or set Backend.MTU in the network config"],
        ),
        (
            WELL,
            1499,
            {"flannel.1": 1450},
            ["raise the MTU of eth0, or set Backend.MTU in the network config"],
        ),
        (
            backend("vxlan", *DUAL),
            1499,
            {"flannel.1": 1430, "flannel-v6.1": 1430},
            ["raise the MTU of eth0, or set Backend.MTU in the network config"],
        ),
        (backend("vxlan", *DUAL), 1500, {"flannel.1": 1450, "flannel-v6.1": 1430}, []),
        (
            backend("vxlan", *DUAL),
            1349,
            {"flannel-v6.1": 1280},
            ["ip link set dev eth0 mtu 1350 at least: IPv6 needs 1280 bytes inside"],
        ),
        (
            backend("vxlan", *DUAL),
            1350,
            {"flannel-v6.1": 1281},
            ["raise the MTU of eth0, or set Backend.MTU in the network config"],
        ),
        (backend("host-gw"), 1400, {"flannel.1": 1450}, []),
    ],
)
def test_device_and_its_headers_fit_the_uplink(
    facts: Facts, uplink: int, devices: dict[str, int], cures: list[str]
) -> None:
    links = (link("eth0", uplink), *(link(name, mtu) for name, mtu in devices.items()))
    status = replace(facts.status, devices=(*devices, "flannel.9"))
    found = said("device", replace(facts, status=status, links=links))
    assert [cure for *_, cure in found] == cures
    assert not said("device", replace(facts, status=status, links=links[1:]))


def lossy(name: str, lost: int, carried: int | None = 1450) -> PathToPeer:
    return replace(path(name, carried), required=1450, lost=lost)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ([lossy("tunnel", 1)], []),
        ([lossy("tunnel", 2)], [(PROBLEM, "1 path to peers with losses, whatever the size of packets")]),
        ([lossy("underlay", 9)], [(HINT, "1 path to peers with losses, whatever the size of packets")]),
        (
            [lossy("underlay", 2), lossy("tunnel", 2, 1400)],
            [(PROBLEM, "2 paths to peers with losses, whatever the size of packets")],
        ),
        ([lossy("tunnel", 0, 1449)], [(PROBLEM, "the tunnel to 10.5.2.0 does not carry 1450 bytes")]),
        ([lossy("underlay", 1, 1449)], [(HINT, "the underlay to 192.0.2.2 does not carry 1450 bytes")]),
        ([lossy("tunnel", 0, None)], []),
    ],
)
def test_paths_that_lose_packets_by_chance_or_by_size_are_told_apart(
    paths: list[PathToPeer], found: list[tuple[Severity, str]]
) -> None:
    facts = replace(WELL, paths=tuple(paths))
    assert [each[:2] for each in said("path", facts)] == found
    assert not said("path", replace(facts, queued={("eth0", "tbf"): 1}))
    assert number("path", replace(facts, queued={("eth0", "fq"): 1, ("eth0", "clsact"): 1})) == len(found)


@pytest.mark.parametrize(("carried", "claims", "problems"), [(1450, 1, 0), (1449, 1, 2), (1450, 0, 1)])
def test_path_on_one_link_is_not_smaller_than_what_its_tunnel_carries(
    carried: int, claims: int, problems: int
) -> None:
    """A router may take the tunnel's packets apart, a switch does not."""
    paths = (lossy("underlay", 1, 576), replace(lossy("tunnel", 0, carried), headers=50))
    claim = Claim(paths[0].target, answers=True)
    assert number("path", replace(WELL, paths=paths, claims=(claim,) * claims)) == problems


def test_device_that_does_not_fit_explains_the_size_of_a_path() -> None:
    facts = replace(WELL, links=(link("eth0", 1499), flannel()), paths=(lossy("tunnel", 0, 1400),))
    assert (number("device", facts), number("path", facts)) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "used", "possible", "problems"),
    [
        ({}, 1, 2, ["eth0 uses one of its 2 queues"]),
        ({}, 1, 1, []),
        ({}, 2, 4, []),
        ({}, 0, 4, []),
        ({"mtu": 5520}, 0, 0, ["the network's MTU is 1450, eth0 has 5520"]),
        ({"mtu": 5519}, 0, 0, []),
        ({"mtu": 15_999}, 0, 0, ["the network's MTU is 1450, eth0 has 15999"]),
        ({"mtu": 16_000}, 0, 0, []),
    ],
)
def test_queues_and_large_frames_that_are_not_used_slow_vxlan_down(
    changes: dict[str, int], used: int, possible: int, problems: list[str]
) -> None:
    facts = replace(document(uplink=DOCUMENT["uplink"] | changes), queues=(used, possible))
    assert [problem for _, problem, _ in said("speed", facts)] == problems
    assert all(severity is HINT for severity, *_ in said("speed", facts))


@pytest.mark.parametrize(
    ("kernel", "offloaded", "found"),
    [((5, 6), True, 1), ((0, 1), True, 1), ((5, 6), False, 0), ((5, 7), True, 0), ((0, 0), True, 0)],
)
def test_kernel_before_5_7_gets_offloaded_checksums_wrong(
    kernel: tuple[int, int], offloaded: bool, found: int
) -> None:
    facts = replace(WELL, kernel=kernel, offload={"flannel.1": offloaded})
    assert number("checksums", facts) == found
    assert all(each.startswith(f"Linux {kernel[0]}.{kernel[1]}, ") for each in evidence("checksums", facts))
