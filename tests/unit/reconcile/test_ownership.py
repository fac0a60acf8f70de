"""What counts as proof that something is left from our own last run."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.model import Lease, LeaseAttrs, LeaseKey
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.reconcile.last_run import (
    Device,
    FileStamp,
    LastRun,
    Machine,
    RunRecord,
    adopts_unmarked,
    devices_of_this_boot,
    proven_lease,
    stale,
)
from flanneld.state.resources import ForeignLink, Ipip, Tun, Vxlan, WireGuard
from flanneld.subnet.store import LocalFacts

MACHINE = Machine("02:18:00:00:00:01", "4c4c4544-0042-3510-8051-b7c04f4d3232")
ATTRS = LeaseAttrs(IPv4Address("10.0.2.15"), None, "vxlan", {"VtepMAC": "02:00:00:00:00:01"})
KEY = (IPv4Network("10.5.7.0/24"), None)
STAMP = FileStamp(7, 1_700_000_000_000_000_000)
STATE = RunRecord("boot", MACHINE, "etcd", KEY, ATTRS, (), STAMP)


@pytest.mark.parametrize("previous", [KEY, (None, None)], ids=["subnet.env agrees", "no subnet.env"])
def test_the_same_machine_proves_its_lease(previous: Any) -> None:
    assert proven_lease(STATE, MACHINE, "etcd", previous) == Lease(ATTRS, *KEY)


@pytest.mark.parametrize(
    ("state", "machine"),
    [
        pytest.param(None, MACHINE, id="no record"),
        pytest.param(STATE, replace(MACHINE, product_uuid="another"), id="clone with the same MAC"),
        pytest.param(
            STATE, replace(MACHINE, hardware_address="02:18:00:00:00:02"), id="same UUID, other MAC"
        ),
        pytest.param(
            replace(STATE, machine=replace(MACHINE, product_uuid="")),
            replace(MACHINE, product_uuid=""),
            id="no UUID can be read",
        ),
        pytest.param(
            replace(STATE, machine=replace(MACHINE, hardware_address="")),
            replace(MACHINE, hardware_address=""),
            id="the uplink has no MAC",
        ),
        pytest.param(
            replace(STATE, machine=replace(MACHINE, product_uuid="03000200-0400-0500-0006-000700080009")),
            replace(MACHINE, product_uuid="03000200-0400-0500-0006-000700080009"),
            id="a UUID that many boards have",
        ),
        pytest.param(replace(STATE, store="another etcd"), MACHINE, id="another store"),
        pytest.param(replace(STATE, attributes=None), MACHINE, id="the lease was lost"),
        pytest.param(replace(STATE, subnets=(None, None)), MACHINE, id="no subnet"),
    ],
)
def test_nothing_less_is_a_proof(state: RunRecord | None, machine: Machine) -> None:
    assert proven_lease(state, machine, "etcd", KEY) is None


def attrs(number: int, backend: str = "host-gw") -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None, backend)


def test_earlier_attributes_of_the_lease_outlive_restarts_until_it_is_another(tmp_path: Path) -> None:
    def run(machine: Machine, key: LeaseKey, *numbers: int) -> LastRun:
        last = LastRun(tmp_path / "subnet.env")
        last.joined(machine, "etcd", Lease(attrs(numbers[0]), *key))
        for number in numbers[1:]:
            last.lease_written(Lease(attrs(number), *key))
        return LastRun(tmp_path / "subnet.env")

    assert run(MACHINE, KEY, 1, 2, 2, 3).earlier == (attrs(2), attrs(1))
    again = run(MACHINE, KEY, 4, 2)
    assert again.earlier == (attrs(4), attrs(3), attrs(1))
    assert again.claim(MACHINE, "etcd", KEY) == Lease(attrs(2), *KEY)
    assert run(MACHINE, KEY, *range(10, 30)).earlier == tuple(map(attrs, range(28, 20, -1)))
    assert run(replace(MACHINE, product_uuid="another"), KEY, 5).earlier == ()
    last = run(MACHINE, (IPv4Network("10.5.9.0/24"), None), 5, 6)
    assert last.earlier == (attrs(5),)
    last.lease_lost()
    assert LastRun(tmp_path / "subnet.env").earlier == ()


def test_host_without_a_record_has_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    last = LastRun(tmp_path / "subnet.env")
    assert (last.devices, last.adopts, last.adopted) == ((), False, frozenset())
    assert (last.store_addresses, last.store_tried, last.earlier, last.former) == ((), 0, (), ())
    assert last.claim(MACHINE, "etcd", KEY) is None
    assert last.path_mtu(MACHINE) == (0, 0)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (Lease(attrs(2), *KEY), True),
        (Lease(attrs(1), *KEY), True),
        (Lease(attrs(3), *KEY), False),
        (Lease(attrs(1, "ipip"), *KEY), False),
        (Lease(attrs(1), IPv4Network("10.5.8.0/24")), False),
    ],
    ids=["last", "earlier", "another node's", "another backend", "another subnet"],
)
def test_lease_in_a_backup_is_ours_by_what_we_once_wrote(theirs: Lease, expected: bool) -> None:
    assert LocalFacts(Lease(attrs(2), *KEY), earlier=(attrs(1),)).wrote(theirs) is expected
    assert not LocalFacts(earlier=(attrs(1),)).wrote(theirs)


def test_another_subnet_in_subnet_env_is_no_proof() -> None:
    assert proven_lease(STATE, MACHINE, "etcd", (IPv4Network("10.5.8.0/24"), None)) is None


@pytest.mark.parametrize(
    ("state", "stamp", "expected"),
    [
        (None, None, False),
        (None, STAMP, True),
        (STATE, None, False),
        (STATE, STAMP, False),
        (STATE, FileStamp(8, STAMP.mtime_ns), True),
        (STATE, FileStamp(STAMP.inode, STAMP.mtime_ns + 1), True),
        (replace(STATE, adopts=True), STAMP, True),
        (replace(STATE, subnet_file=None), STAMP, True),
    ],
)
def test_unmarked_routes_are_adopted_after_another_flanneld(
    state: RunRecord | None, stamp: FileStamp | None, expected: bool
) -> None:
    assert adopts_unmarked(state, stamp) is expected


VXLAN = Vxlan("flannel.1", 1, 2, IPv4Address("198.18.0.1"), 8472, "02:00:00:00:00:01", 1450)
DEVICE = Device(5, "vxlan", "02:00:00:00:00:01", "flannel.1")
COMING = replace(DEVICE, index=0)


def link(make: Any = VXLAN, index: int = 5, mac: str = "02:00:00:00:00:01", name: str = "") -> SeenLink:
    return SeenLink(index, name or make.name, mac, 1450, True, make)


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        pytest.param(DEVICE, link(), True, id="the same"),
        pytest.param(DEVICE, link(name="renamed"), True, id="renamed"),
        pytest.param(DEVICE, link(index=6), False, id="made anew"),
        pytest.param(DEVICE, link(mac="02:00:00:00:00:09"), False, id="another MAC"),
        pytest.param(DEVICE, link(ForeignLink("flannel.1", "a device of kind bridge")), False, id="bridge"),
        pytest.param(Device(5, "tun", "", "flannel0"), link(Tun("flannel0", 1472), mac=""), True, id="tun"),
        pytest.param(
            Device(5, "tun", "", "flannel0"), link(Tun("tun9", 1472), mac=""), False, id="tun, renamed"
        ),
        pytest.param(
            Device(5, "tun", "", "flannel.ipip"),
            link(Ipip("flannel.ipip", None, 1480), mac=""),
            False,
            id="another kind",
        ),
        pytest.param(COMING, link(index=9), True, id="about to be made"),
        pytest.param(
            COMING, link(replace(VXLAN, name="flannel.0")), False, id="about to be made, lower name"
        ),
        pytest.param(
            COMING, link(replace(VXLAN, name="flannel.2")), False, id="about to be made, higher name"
        ),
        pytest.param(COMING, link(mac="02:00:00:00:00:09"), False, id="about to be made, another MAC"),
        pytest.param(replace(COMING, mac=""), link(), True, id="about to be made, MAC not chosen"),
        pytest.param(replace(COMING, kind="tun"), link(), False, id="about to be made as a tun"),
        pytest.param(replace(COMING, kind="wireguard"), link(), False, id="about to be made as a wireguard"),
        pytest.param(
            COMING,
            link(ForeignLink("flannel.1", "a device of kind bridge")),
            False,
            id="about to be made, and a bridge is there",
        ),
    ],
)
def test_a_device_is_recognised_by_all_that_is_recorded(
    device: Device, seen: SeenLink, expected: bool
) -> None:
    assert (stale([device], [seen], desired=[]) == [seen]) is expected
    assert stale([device], [seen], desired=[seen.name]) == []


@pytest.mark.parametrize(("boot_id", "expected"), [("boot", (DEVICE,)), ("another", ()), ("", ())])
def test_devices_are_of_one_boot(boot_id: str, expected: tuple[Device, ...]) -> None:
    assert devices_of_this_boot(replace(STATE, boot_id=boot_id and "boot", devices=(DEVICE,)), boot_id) == (
        expected
    )
    assert devices_of_this_boot(None, boot_id) == ()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (link(), True),
        (link(name="vxlan.calico"), False),
        (link(WireGuard("flannel-wg", 1420), name="flannel-wg"), True),
        (link(ForeignLink("flannel0", "a plain interface")), False),
    ],
)
def test_devices_of_flannel_are_known_by_name_and_kind(seen: SeenLink, expected: bool) -> None:
    assert is_flannels(seen) is expected
