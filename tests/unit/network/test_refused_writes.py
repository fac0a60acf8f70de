"""Writes that the kernel refuses on any host, and what is reported of them. None of them changes anything."""

from __future__ import annotations

import errno
from ipaddress import ip_address, ip_network

import pytest

from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.state.resources import Address, FdbEntry, Neighbor, Resource, Route

GONE, MAC = "flannel.gone", "02:00:00:00:00:07"


@pytest.mark.parametrize("drop", [False, True])
def test_object_on_a_device_that_is_gone_is_reported_as_refused(drop: bool) -> None:
    resources: list[Resource] = [
        Address(GONE, ip_address("10.1.5.0")),
        Neighbor(GONE, ip_address("fd00:0:0:7::"), MAC),
        FdbEntry(GONE, MAC, ip_address("192.0.2.7")),
        Route(ip_network("10.1.7.0/24"), GONE, ip_address("10.1.7.0"), onlink=True),
    ]
    refused = Kernel().write(resources, drop=drop)
    assert refused == dict.fromkeys(range(len(resources)), errno.ENODEV)


def test_removal_of_a_device_that_is_gone_is_no_error() -> None:
    devices.drop(GONE)


def test_removal_that_the_kernel_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match="link del: ") as refusal:
        devices.drop("lo")
    assert refusal.value.errno in (errno.EOPNOTSUPP, errno.EPERM)
