"""The uplink and its backend: whose lease is ours, asked for each lease of a cluster."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import cast

from flanneld import config
from flanneld.backends.contract import Backend
from flanneld.model import LeaseAttrs, Uplink
from flanneld.network.host_kernel import HostKernel
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.host.uplink_manager import UplinkManager

OURS = LeaseAttrs(public_ip=IPv4Address("198.18.0.1"), backend_type="host-gw")
THEIRS = LeaseAttrs(public_ip=IPv4Address("198.18.0.2"), backend_type="host-gw")
UPLINK = Uplink("eth0", 2, 1500, IPv4Address("198.18.0.1"), IPv4Address("198.18.0.1"))


class Recognizing:
    """A backend that recognizes a lease by its backend type."""

    def is_self(self, attrs: LeaseAttrs) -> bool:
        return attrs.backend_type == "host-gw"


class Plain:
    """A backend that does not, and counts how often it is asked for what it does not have."""

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        self.asked += 1
        raise AttributeError(name)


def manager(backend: object) -> UplinkManager:
    parsed = config.parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}')
    kernel = cast("HostKernel", object())  # the backend asks nothing of the host
    return UplinkManager(
        kernel, parsed, InterfaceChoice(), lambda _config, _host: cast("Backend", backend), UPLINK, None
    )


def test_backend_that_recognizes_itself_decides() -> None:
    assert manager(Recognizing()).is_self(THEIRS, OURS)


def test_lease_is_ours_by_its_public_ip_without_a_look_at_the_backend_for_each_lease() -> None:
    backend = Plain()
    uplink_manager = manager(backend)
    before = backend.asked
    assert uplink_manager.is_self(OURS, OURS)
    assert not uplink_manager.is_self(THEIRS, OURS)
    assert backend.asked == before
