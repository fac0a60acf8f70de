"""The defaults of a backend, its options, and what a ``Host`` gives."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.backends import registry
from flanneld.backends.contract import Backend, ExitPolicy, Host, complete, exit_policy
from flanneld.backends.host_gw import HostGw
from flanneld.backends.registry import BUILT_IN
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Address, Resource
from tests.unit.backends.test_host_gw import made, nothing


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
