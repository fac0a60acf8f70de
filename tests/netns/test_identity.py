"""Identity of a node, and the test of whose a lease is, in backends rebuilt when the uplink moves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, ip_address

import pytest

from flanneld.backends import vxlan
from flanneld.backends.contract import Host
from flanneld.backends.host_gw import HostGw
from flanneld.config import Config, parse
from flanneld.model import Lease, LeaseAttrs
from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.local_node import UplinkManager, find_uplink
from flanneld.state.resources import Vxlan
from tests.lab.namespace import Namespace, batch, remove

CONFIG = parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}')
CHOICE = InterfaceChoice(ifaces=("up0",))
OWN = Lease(LeaseAttrs(), IPv4Network("10.5.7.0/24"))


class Keyed(HostGw):
    """Goes by a key that is another one each time it is decided."""

    decided = 0

    def __init__(self, config: Config, host: Host) -> None:
        super().__init__(config, host)
        self._key = host.identity

    def identity(self) -> str:
        Keyed.decided += 1
        return f"key {Keyed.decided}"

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, backend_type="host-gw", backend_data=self._key)

    def is_self(self, attrs: LeaseAttrs) -> bool:
        return bool(attrs.backend_data == self._key)


@pytest.fixture
def host() -> Iterator[Namespace]:
    """A namespace in which the test runs, with an uplink."""
    namespace = Namespace(f"fli{os.getpid()}")
    batch(f"netns add {namespace.name}")
    try:
        namespace.ip(
            "link add up0 type veth peer name up1",
            "link set up0 up",
            "link set up1 up",
            "address add 192.0.2.1/24 dev up0",
        )
        with namespace.entered():
            yield namespace
    finally:
        remove([namespace])


def move(host: Namespace, manager: UplinkManager) -> None:
    host.ip("address flush dev up0", "address add 192.0.2.2/24 dev up0")
    assert manager.follow()
    assert manager.uplink.public_ip == ip_address("192.0.2.2")


def test_an_identity_is_decided_once_and_kept_when_the_uplink_moves(host: Namespace) -> None:
    kernel, before = Kernel(), Keyed.decided
    manager = UplinkManager(kernel, CONFIG, CHOICE, Keyed, find_uplink(kernel, CONFIG, CHOICE), None)
    key = f"key {before + 1}"
    assert manager.backend.attributes().backend_data == key
    move(host, manager)
    assert manager.backend.attributes() == LeaseAttrs(IPv4Address("192.0.2.2"), None, "host-gw", key)
    assert Keyed.decided == before + 1


def test_the_backend_says_which_lease_is_its_own_and_by_default_the_public_ip_does(host: Namespace) -> None:
    kernel = Kernel()
    uplink = find_uplink(kernel, CONFIG, CHOICE)
    keyed = UplinkManager(kernel, CONFIG, CHOICE, Keyed, uplink, None)
    ours = keyed.backend.attributes()
    neighbour = LeaseAttrs(ours.public_ip, None, "host-gw", "key of another node")
    moved = LeaseAttrs(IPv4Address("203.0.113.9"), None, "host-gw", ours.backend_data)
    assert [keyed.is_self(theirs, ours) for theirs in (ours, neighbour, moved)] == [True, False, True]
    plain = UplinkManager(kernel, CONFIG, CHOICE, HostGw, uplink, None)
    assert [plain.is_self(theirs, ours) for theirs in (ours, neighbour, moved)] == [True, True, False]
    move(host, keyed)
    assert keyed.is_self(ours, keyed.backend.attributes())


def test_a_vxlan_device_keeps_its_mac_although_another_program_set_one_before_the_uplink_moved(
    host: Namespace,
) -> None:
    kernel = Kernel()
    uplink = find_uplink(kernel, CONFIG, CHOICE)
    manager = UplinkManager(kernel, CONFIG, CHOICE, vxlan.VxlanBackend, uplink, None)
    (made,) = (each for each in manager.backend.local(OWN) if isinstance(each, Vxlan))
    devices.put(made, None)
    host.ip("link set flannel.1 address 02:00:00:00:00:99")
    move(host, manager)
    (wanted,) = (each for each in manager.backend.local(OWN) if isinstance(each, Vxlan))
    assert wanted.mac == made.mac
    assert wanted.mac != "02:00:00:00:00:99"
