"""The guard of the tunnel: what is asked of libnftables, and what is made of its answers."""

from __future__ import annotations

import errno
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import pytest

from flanneld.errors import Fatal
from flanneld.model import FAMILIES, Family, Lease, LeaseAttrs
from flanneld.network.firewall import guard
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.network.firewall.guard import Admitted, Guarded, GuardTable, admits, retire
from flanneld.state.resources import Resource
from flanneld.state.table import Claim, Put, Scope, Seen
from tests.unit.network.firewall.stand_ins import FakeKernel, FakeLibrary

NODE, OTHER = Admitted(ip_address("192.0.2.1")), Admitted(ip_address("192.0.2.2"))
NODE6 = Admitted(ip_address("2001:db8::1"))
VXLAN, BOTH = Guarded(4, (8472,)), Guarded(4, (8472, 0))


def rule(comment: Any) -> dict[str, Any]:
    return {"rule": {"chain": "input", "handle": 3, "comment": comment}}


def nodes(*addresses: str) -> dict[str, Any]:
    return {"set": {"name": "nodes", "type": "ipv4_addr", "elem": list(addresses)}}


def scope(*desired: Resource) -> Scope:
    return Scope({each.key: each for each in desired})


def test_lease_admits_its_public_ip_of_each_family() -> None:
    attrs = LeaseAttrs(IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"))
    assert list(admits(Lease(attrs))) == [NODE, NODE6]
    assert list(admits(Lease(attrs), [6])) == [NODE6]
    assert list(admits(Lease(LeaseAttrs(IPv4Address("192.0.2.1"))))) == [NODE]


def test_resources_say_what_they_are() -> None:
    assert [str(each) for each in (NODE, BOTH)] == [
        "guard lets in 192.0.2.1",
        "guard of UDP 8472, ipip for IPv4",
    ]
    nowhere = Admitted(ip_address("0.0.0.0"))
    assert len({each.key for each in (nowhere, NODE, OTHER, NODE6, VXLAN, Guarded(6, (8472,)))}) == 6
    assert VXLAN.key == BOTH.key


@pytest.mark.usefixtures("library", "kernel")
@pytest.mark.parametrize(
    ("resource", "family", "commands"),
    [
        (
            NODE,
            4,
            "add table ip flannel-guard; add set ip flannel-guard nodes { type ipv4_addr; }; "
            "add element ip flannel-guard nodes { 192.0.2.1 }",
        ),
        (
            NODE6,
            6,
            "add table ip6 flannel-guard; add set ip6 flannel-guard nodes { type ipv6_addr; }; "
            "add element ip6 flannel-guard nodes { 2001:db8::1 }",
        ),
        (
            BOTH,
            4,
            "add table ip flannel-guard; add set ip flannel-guard nodes { type ipv4_addr; }; "
            "add chain ip flannel-guard input { type filter hook input priority -10; policy accept; }; "
            "flush chain ip flannel-guard input; "
            "add rule ip flannel-guard input udp dport 8472 ip saddr != @nodes counter drop "
            'comment "8472"; '
            'add rule ip flannel-guard input meta l4proto 4 ip saddr != @nodes counter drop comment "0"',
        ),
    ],
)
def test_guard_is_made_by_these_commands(resource: Resource, family: Family, commands: str) -> None:
    assert GuardTable(family).explain(Put(resource)) == f"nft '{commands}'"


def test_nodes_and_rules_are_set_in_one_transaction(library: FakeLibrary) -> None:
    wanted: list[Resource] = [NODE, OTHER, VXLAN]
    assert GuardTable(4).put([Put(each) for each in wanted]).made == wanted
    (told,) = library.told
    lines = told.splitlines()
    assert "add element ip flannel-guard nodes { 192.0.2.1, 192.0.2.2 }" in lines
    assert sum(line.startswith("add rule ") for line in lines) == 1
    library.refusal = "no\n space"
    with pytest.raises(Rejected, match="nftables refuses our rules: no space"):
        GuardTable(4).put([Put(NODE)])


@pytest.mark.usefixtures("kernel")
def test_guard_is_read_with_its_nodes_and_ports(library: FakeLibrary) -> None:
    library.lists = [
        {"metainfo": {}},
        {"set": {"name": "mine", "elem": ["192.0.2.7"]}},
        nodes("192.0.2.1", "192.0.2.2"),
        {"chain": {"name": "input"}},
        rule("8472"),
        rule("0"),
        rule("an operator's"),
        rule(None),
    ]
    found = list(GuardTable(4).read(scope(NODE, VXLAN)))
    assert found == [Seen(NODE), Seen(OTHER, Claim.LEFT), Seen(BOTH)]
    assert library.told == [[{"list": {"table": {"family": "ip", "name": "flannel-guard"}}}]]
    assert list(GuardTable(4).read(scope()))[-1] == Seen(BOTH, Claim.LEFT)


@pytest.mark.usefixtures("kernel")
def test_guard_without_rules_has_nodes_only(library: FakeLibrary) -> None:
    library.lists = [nodes("192.0.2.1")]
    assert list(GuardTable(4).read(scope(NODE, VXLAN))) == [Seen(NODE)]


def test_guard_that_is_not_there_is_not_listed(kernel: FakeKernel, library: FakeLibrary) -> None:
    kernel.refusal = errno.ENOENT
    assert list(GuardTable(4).read(scope(NODE))) == []
    assert library.told == []


@pytest.mark.parametrize(
    ("found", "command"),
    [
        ((NODE, OTHER), "delete element ip flannel-guard nodes { 192.0.2.1, 192.0.2.2 }"),
        ((NODE, VXLAN), "delete table ip flannel-guard"),
    ],
)
def test_guard_goes_with_its_rules(found: tuple[Resource, ...], command: str, library: FakeLibrary) -> None:
    assert GuardTable(4).drop(found).removed == list(found)
    assert library.told == [command]


@pytest.mark.usefixtures("library")
def test_script_removes_the_guard_of_an_earlier_run(kernel: FakeKernel) -> None:
    table = GuardTable(6)
    assert list(table.script(scope())) == ["nft delete table ip6 flannel-guard"]
    assert list(table.script(scope(NODE6))) == []
    kernel.refusal = errno.ENOENT
    assert list(table.script(scope())) == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_guards_of_both_families_are_retired(dry_run: bool, kernel: FakeKernel, library: FakeLibrary) -> None:
    lines = ["nftables: table ip flannel-guard", "nftables: table ip6 flannel-guard"]
    assert list(retire(dry_run=dry_run)) == lines
    names = ["ip", "ip6"] if not dry_run else []
    assert library.told == [
        [{"delete": {"table": {"family": name, "name": "flannel-guard"}}}] for name in names
    ]
    kernel.refusal = errno.ENOENT
    assert list(retire(dry_run=dry_run)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_guard_without_its_library_is_no_guard(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise Unavailable("no libnftables", "install it")

    monkeypatch.setattr(guard, "load", refuse)
    with pytest.raises(Fatal, match="cannot guard the tunnel: no libnftables; install it"):
        GuardTable(family)
