"""The defaults of a backend, its options, and what a ``Host`` gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import (
    Backend,
    ExitPolicy,
    Host,
    Option,
    OtherBackend,
    OuterPackets,
    Overhead,
    carried,
    complete,
    exit_policy,
    inner_mtu,
    peers_public_ip,
    ports,
    read_options,
    require_type,
)
from flanneld.backends.host_gw import HostGw
from flanneld.backends.registry import BUILT_IN
from flanneld.config import Config, parse
from flanneld.errors import Fatal, Refused
from flanneld.model import Family, IPAddress, Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Address, Resource
from tests.unit.backends.test_host_gw import made, nothing

UPLINK = Uplink("eth0", 2, 1500)
SUBNET = IPv4Network("10.1.6.0/24")


def test_resources_stay_at_exit_unless_the_backend_declares_otherwise() -> None:
    class Announcing(HostGw):
        exit_policy = ExitPolicy.REMOVE

    assert exit_policy(made()) is ExitPolicy.KEEP
    assert exit_policy(made(kind=Announcing)) is ExitPolicy.REMOVE


def test_a_host_made_from_plain_values_says_that_it_lacks_a_service() -> None:
    host = Host(Uplink("eth0", 2, 1500), None, nothing, nothing, bytes)
    with pytest.raises(NotImplementedError, match="without that service"):
        host.secret("wgkey")


class Duck:
    """Backend of another package that knows the contract from its description only."""

    __slots__ = ("address",)
    has_peers = False
    mtu = 1400

    def __init__(self) -> None:
        self.address = IPv4Address("192.0.2.5")

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self.address)

    def local(self, own: Lease) -> list[Resource]:
        return [Address("eth0", self.address)] if own.subnet else []

    def peer(self, own: Lease, lease: Lease) -> Iterator[Resource]:
        yield Address(f"{own}", IPv4Address(lease.asof))

    def claims(self) -> tuple[str, ...]:
        return ("the pond",)


def test_backend_of_another_class_gets_the_defaults_of_what_it_leaves_out() -> None:
    duck = Duck()
    backend = complete(duck)
    own = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
    assert (backend.mtu, backend.has_peers, backend.claims()) == (1400, False, ("the pond",))
    assert backend.local(own) == duck.local(own)
    assert list(backend.peer(own, own)) == list(duck.peer(own, own))
    assert (backend.encrypts, backend.exit_policy, backend.tables()) == (False, ExitPolicy.KEEP, ())
    assert backend.identity() is None
    assert backend.is_self(LeaseAttrs(duck.address, backend_type="pond"))
    assert not backend.is_self(LeaseAttrs(IPv4Address("192.0.2.6")))
    assert backend.gives("claims")
    assert not any(map(backend.gives, ("identity", "is_self", "tables")))


def test_backend_that_lacks_a_part_serves_for_the_others() -> None:
    class Half:
        mtu = 1400

    assert complete(Half()).mtu == 1400


def test_backend_that_is_complete_stays_as_it_is() -> None:
    backend = made()
    assert complete(backend) is backend
    assert isinstance(backend, Backend)


def test_package_that_does_not_load_tells_nothing_of_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_pond.py").write_text("raise RuntimeError")
    info = tmp_path / "broken_pond-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-pond\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\npond = broken_pond:Pond\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError):
        registry.load("pond")
    assert registry.described("pond") is Backend


def test_kernel_features_beside_devices_are_named_by_the_backend_alone() -> None:
    features = {name: registry.described(name).kernel_features for name in BUILT_IN}
    assert [(each.name, each.modules, each.protocol) for each in features.pop("ipsec")] == [
        ("XFRM", "xfrm_user esp4", 6)  # linux/netlink.h, NETLINK_XFRM
    ]
    assert not any(features.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_guide_names_each_option_of_a_backend(name: str) -> None:
    docs = Path(__file__).parents[3] / "docs"
    guide = "".join((docs / name).read_text() for name in ("backends.md", "encryption.md"))
    options = registry.described(name).options
    assert [each.name for each in options if f"`{each.name}`" not in guide] == []


# ---- options and MTU -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "option", "mtu"),
    [(4, None, 1450), (4, 0, 1450), (4, 1400, 1350), (4, 118, 68), (6, 1330, 1280)],
    ids=["the uplink's", "not set", "set", "as small as IPv4 allows", "as small as IPv6 allows"],
)
def test_outer_headers_take_their_room_from_the_mtu(family: Family, option: int | None, mtu: int) -> None:
    assert inner_mtu(UPLINK, 50, family, "headers", option) == mtu


@pytest.mark.parametrize(
    ("family", "uplink", "option", "reason"),
    [
        (4, 117, None, "an uplink MTU of 117 leaves 67 bytes inside headers; raise the MTU of eth0"),
        (6, 1329, 0, "of 1329 leaves 1279 bytes inside headers; raise the MTU of eth0 or set Backend.MTU"),
        (6, 1500, 1329, "of 1329 leaves 1279 bytes inside headers; raise the MTU of eth0 or set Backend.MTU"),
    ],
)
def test_an_mtu_that_leaves_too_little_ends_the_daemon(
    family: Family, uplink: int, option: int | None, reason: str
) -> None:
    with pytest.raises(Fatal) as failed:
        inner_mtu(Uplink("eth0", 2, uplink), 50, family, "headers", option)
    assert str(failed.value).endswith(reason)


class Tunnel(HostGw):
    """Backend that carries IPv4 only."""

    overhead: ClassVar[Overhead] = {4: 20}


class StrictTunnel(Tunnel):
    refuses_others = True


def network(*families: Family, **options: Any) -> Config:
    enabled = {f"EnableIPv{family}": family in families for family in (4, 6)}
    ranges = {"Network": "10.1.0.0/16", "IPv6Network": "fd00::/48"}
    return parse(json.dumps({**enabled, **ranges, "Backend": {"Type": "tunnel", **options}}))


@pytest.mark.parametrize(
    ("backend", "families", "left"),
    [(HostGw, (4, 6), [4, 6]), (Tunnel, (4, 6), [4]), (Tunnel, (4,), [4]), (StrictTunnel, (4,), [4])],
)
def test_a_backend_carries_the_families_that_it_has_headers_for(
    backend: type[Backend], families: tuple[Family, ...], left: list[Family]
) -> None:
    assert [each.family for each in carried(backend, network(*families))] == left


@pytest.mark.parametrize(("backend", "families"), [(Tunnel, (6,)), (StrictTunnel, (4, 6))])
def test_a_network_that_a_backend_cannot_carry_ends_the_daemon(
    backend: type[Backend], families: tuple[Family, ...]
) -> None:
    with pytest.raises(Fatal) as failed:
        carried(backend, network(*families))
    assert failed.value.problem == "tunnel carries IPv4 only"
    assert failed.value.remedy.startswith("set EnableIPv4 to true and EnableIPv6 to false, or choose")


@pytest.mark.parametrize(
    ("families", "options", "found"),
    [
        ((4, 6), {}, (("esp", 0), ("udp", 51820), ("udp", 51821))),
        ((6,), {}, (("esp", 0), ("udp", 51821))),
        ((4,), {"Port": 7, "Other": 8}, (("esp", 0), ("udp", 7))),
        ((4, 6), {"Other": 8}, (("esp", 0), ("udp", 51820), ("udp", 8))),
    ],
)
def test_firewalls_are_told_the_ports_of_the_network_s_families(
    families: tuple[Family, ...], options: dict[str, int], found: tuple[tuple[str, int], ...]
) -> None:
    class Flowing(HostGw):
        flows = (
            OuterPackets("esp"),
            OuterPackets("udp", 51820, "Port", family=4),
            OuterPackets("udp", 51821, "Other", family=6),
        )

    assert ports(Flowing, network(*families, **options)) == found


OPTIONS = (
    Option("Number", "number", 7, least=1, most=9),
    Option("Size", "size", 0),
    Option("Switch", "switch", False),
    Option("Word", "word", "none"),
    Option("Any", "anything", (), made=lambda value: ("made of", value)),
)


def test_options_get_their_defaults_or_what_the_network_has() -> None:
    fields = ("number", "size", "switch", "word", "anything")
    defaults = (7, 0, False, "none", ("made of", None))
    assert read_options(network(4), OPTIONS) == dict(zip(fields, defaults, strict=True))
    given: dict[str, Any] = {"Number": 9, "Size": 65535, "Switch": True, "Word": "some", "Any": [1]}
    found = (9, 65535, True, "some", ("made of", [1]))
    assert read_options(network(4, **given), OPTIONS) == dict(zip(fields, found, strict=True))
    assert read_options(network(4, Number=1), OPTIONS)["number"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"Number": 0}, "Backend.Number is 0; set it to a number from 1 to 9"),
        ({"Number": 10}, "Backend.Number is 10; set it to a number from 1 to 9"),
        ({"Size": -1}, "Backend.Size is -1; set it to a number from 0 to 65535"),
        ({"Size": 65536}, "Backend.Size is 65536; set it to a number from 0 to 65535"),
        ({"Switch": 1}, "the network config is wrong: .*Switch.*; correct Backend in the store"),
        ({"Word": 1}, "the network config is wrong: .*Word.*; correct Backend in the store"),
    ],
)
def test_an_option_that_is_unusable_ends_the_daemon(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Fatal, match=f"^{reason}$"):
        read_options(network(4, **options), OPTIONS)


# ---- a peer's type -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "named"), [("vxlan", "vxlan"), ("", "nameless"), ("x" * 64, "x" * 64)])
def test_node_with_another_backend_is_told_by_it(theirs: str, named: str) -> None:
    with pytest.raises(OtherBackend) as failed:
        require_type(Lease(LeaseAttrs(backend_type=theirs), SUBNET), "host-gw")
    assert failed.value.problem == f"{SUBNET} is a {named} node, we run host-gw"


@pytest.mark.parametrize("theirs", ["x" * 65, "vx\nlan"])
def test_type_that_no_backend_has_tells_nothing(theirs: str) -> None:
    with pytest.raises(Refused, match=f"{SUBNET} has a backend type that is none") as failed:
        require_type(Lease(LeaseAttrs(backend_type=theirs), SUBNET), "host-gw")
    assert not isinstance(failed.value, OtherBackend)


# ---- a peer's public IP ----------------------------------------------------------------------------


def public_ip_of(theirs: str | None, ours: str | None) -> IPAddress:
    """Return the public IP of a peer that announces it, for a node that has another one."""
    address, own = (ip_address(each) if each else None for each in (theirs, ours))
    family: Family = 6 if isinstance(address, IPv6Address) else 4
    field = "public_ipv6" if family == 6 else "public_ip"
    announced: dict[str, Any] = {field: address}
    known: dict[str, Any] = {field: own}
    return peers_public_ip(Lease(LeaseAttrs(**announced), SUBNET), family, Uplink("eth0", 2, 1500, **known))


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (None, "192.0.2.5", "announces no public IPv4 address"),
        ("127.0.0.1", "192.0.2.5", "announces 127.0.0.1, which is no host's"),
        ("169.254.0.6", "192.0.2.5", "announces 169.254.0.6, which leads nowhere from here"),
        ("169.254.0.6", None, "announces 169.254.0.6, which leads nowhere from here"),
        ("fe80::6", "fd77::5", "announces fe80::6, which leads nowhere from here"),
        ("192.0.2.5", "192.0.2.5", "announces our own public IP 192.0.2.5"),
        ("fe80::5", "fe80::5", "announces our own public IP fe80::5"),
    ],
)
def test_peer_whose_public_ip_cannot_lead_to_it_is_refused(
    theirs: str | None, ours: str | None, reason: str
) -> None:
    with pytest.raises(Refused) as failed:
        public_ip_of(theirs, ours)
    assert failed.value.problem == f"{SUBNET} {reason}"
    assert "--public-ip" in failed.value.remedy


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("192.0.2.6", "192.0.2.5"), ("192.0.2.6", None), ("169.254.0.6", "169.254.0.5"), ("fe80::6", "fe80::5")],
)
def test_peer_is_reached_at_its_public_ip_and_on_a_shared_link_at_that_of_the_link(
    theirs: str, ours: str | None
) -> None:
    assert public_ip_of(theirs, ours) == ip_address(theirs)
