"""The state file, on a real file system."""

from __future__ import annotations

import json
import logging
import math
import os
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.model import LeaseAttrs, Uplink
from flanneld.network.host import HostKernel
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.reconcile import last_run
from flanneld.reconcile.last_run import (
    Device,
    FileStamp,
    LastRun,
    Machine,
    RunRecord,
    StateFile,
    StoreAddress,
    machine_of,
    stamp_of,
)
from flanneld.runtime import clock
from flanneld.state.resources import ForeignLink

STATE = RunRecord(
    boot_id="b6c0d773-d689-4bc9-9153-a38bd10130ec",
    machine=Machine("02:18:00:00:00:01", "4c4c4544-0042-3510-8051-b7c04f4d3232"),
    store="etcd v3 at http://127.0.0.1:2379 under /coreos.com/network",
    subnets=(IPv4Network("10.5.7.0/24"), IPv6Network("fc00:5:0:7::/64")),
    attributes=LeaseAttrs(
        IPv4Address("10.0.2.15"),
        IPv6Address("fd00::15"),
        "vxlan",
        {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"},
        {"VNI": 1, "VtepMAC": "02:00:00:00:00:02"},
    ),
    devices=(Device(5, "vxlan", "02:00:00:00:00:01", "flannel.1"), Device(6, "tun", "", "flannel0")),
    subnet_file=FileStamp(4711, 1_700_000_000_123_456_789),
    adopts=True,
    adopted=frozenset({IPv4Network("10.5.9.0/24"), IPv6Network("fc00:5:0:9::/64")}),
    store_addresses=(
        StoreAddress(IPv4Address("10.5.77.9"), 472_222, is_outside=True),
        StoreAddress(IPv6Address("fc00:5:0:77::9"), 472_222, is_outside=False),
        StoreAddress(IPv4Address("10.5.78.9"), 472_221),
    ),
    store_tried=1_700_000_000,
    earlier=(LeaseAttrs(IPv4Address("10.0.2.14"), backend_type="host-gw"),),
    path_mtu=(1450, 1350),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flannel" / "flanneld.state"


def save(path: Path, state: RunRecord) -> None:
    StateFile(path).update(**{name: getattr(state, name) for name in RunRecord.__struct_fields__})


def test_state_of_an_earlier_version_without_the_latest_fields_is_read(path: Path) -> None:
    save(path, STATE)
    content = json.loads(path.read_text())
    for name in (latest := ("store_addresses", "store_tried", "earlier", "path_mtu")):
        del content[name]
    path.write_text(json.dumps(content))
    assert StateFile(path).load() == replace(STATE, **{name: getattr(RunRecord(), name) for name in latest})


def test_path_mtu_of_another_machine_is_that_of_the_image_of_a_clone(path: Path) -> None:
    save(path, STATE)
    record = LastRun(path.with_name("subnet.env"), file=StateFile(path))
    assert record.path_mtu(STATE.machine) == (1450, 1350)
    assert record.path_mtu(replace(STATE.machine, hardware_address="02:18:00:00:00:02")) == (0, 0)


@pytest.mark.parametrize(
    "state",
    [
        STATE,
        RunRecord(
            subnets=(None, IPv6Network("fc00::/64")), attributes=LeaseAttrs(None, IPv6Address("fd00::1"))
        ),
        RunRecord(boot_id="without a lease"),
    ],
    ids=["dual stack", "IPv6", "little"],
)
def test_written_state_is_read_back(path: Path, state: RunRecord) -> None:
    save(path, state)
    assert StateFile(path).load() == state
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_file_is_no_record_and_no_complaint(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert StateFile(path).load() is None
    assert caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 60_000,
        b"{}",
        b'{"version": 2}',
        json.dumps({"version": 1, "subnets": 7}).encode(),
        b"x" * 70_000,
    ],
)
def test_garbage_counts_as_none_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = StateFile(path)
    assert file.load() is None
    assert file.load() is None
    (line,) = caplog.messages
    assert line.startswith(f"Ignoring the state file {path}: ")
    file.update(boot_id="new")
    assert StateFile(path).load() == RunRecord(boot_id="new")


def test_infinite_number_counts_as_garbage(path: Path) -> None:
    save(path, STATE)
    path.write_text(json.dumps({**json.loads(path.read_text()), "store_tried": math.inf}))
    assert StateFile(path).load() is None


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda each: st.lists(each), max_leaves=3), st.data()
)
def test_any_value_in_any_place_is_read_or_counts_as_none(value: object, data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "flanneld.state")
        save(path, STATE)
        top = json.loads(path.read_text())
        name = data.draw(st.sampled_from(sorted(top)))
        path.write_text(json.dumps({**top, name: value}))
        StateFile(path).load()


def test_an_unchanged_record_is_not_written_again(path: Path) -> None:
    save(path, STATE)
    before = stamp_of(path)
    file = StateFile(path)
    file.load()
    file.update(adopts=True, store=STATE.store)
    assert stamp_of(path) == before
    file.update(adopts=False)
    after = stamp_of(path)
    assert after != before
    file.update(adopts=False)
    assert stamp_of(path) == after


def test_a_record_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    file = StateFile(blocked / "flanneld.state")
    assert not file.is_writable()
    file.update(boot_id="new")
    (line,) = caplog.messages
    assert "Cannot write the state file" in line
    assert "make its directory writable" in line
    blocked.unlink()
    file.try_again()
    assert StateFile(blocked / "flanneld.state").load() == RunRecord(boot_id="new")
    assert file.is_writable()
    (blocked / "flanneld.state").unlink()
    blocked.rmdir()
    blocked.touch()
    file.update(boot_id="newer")
    assert len(caplog.messages) == 2


def test_dry_run_writes_no_record(path: Path) -> None:
    file = StateFile(path, is_dry_run=True)
    assert file.is_writable()
    file.update(boot_id="new")
    assert not path.exists()


def test_a_fifo_in_its_place_does_not_block(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    with caplog.at_level(logging.WARNING):
        assert StateFile(path).load() is None
    assert len(caplog.messages) == 1


def test_each_writing_of_a_file_has_its_own_stamp(tmp_path: Path) -> None:
    path = tmp_path / "subnet.env"
    assert stamp_of(path) is None
    path.write_text("a")
    first = stamp_of(path)
    assert first == stamp_of(path)
    new = tmp_path / "new"
    new.write_text("a")
    new.replace(path)
    assert stamp_of(path) != first


def test_this_boot_has_an_identity() -> None:
    assert len(clock.boot_id()) == 36


class Interfaces:
    """A kernel whose interfaces are these, or cannot be read."""

    def __init__(self, *links: SeenLink, unreadable: bool = False) -> None:
        self._links = {each.name: each for each in links}
        self._is_unreadable = unreadable

    def link(self, name: str) -> SeenLink | None:
        if self._is_unreadable:
            raise OSError
        return self._links.get(name)


ETH0, ETH1 = (
    SeenLink(index, name, mac, 1500, True, ForeignLink(name, "a plain interface"))
    for index, name, mac in ((2, "eth0", "02:18:00:00:00:01"), (3, "eth1", "02:18:00:00:00:02"))
)


@pytest.mark.parametrize(
    ("kernel", "firmware", "expected"),
    [
        (Interfaces(ETH0, ETH1), " 4C4C4544\n", Machine("02:18:00:00:00:02", "4c4c4544")),
        (Interfaces(ETH0), "4c4c4544", Machine("", "4c4c4544")),
        (Interfaces(unreadable=True), "4c4c4544", Machine("", "4c4c4544")),
        (Interfaces(ETH1), None, Machine("02:18:00:00:00:02", "")),
    ],
    ids=["known", "without the uplink", "unreadable interfaces", "unreadable firmware"],
)
def test_machine_is_known_by_its_uplinks_mac_and_its_firmware(
    kernel: Interfaces,
    firmware: str | None,
    expected: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_run, "PRODUCT_UUID", uuid := tmp_path / "product_uuid")
    if firmware is not None:
        uuid.write_text(firmware)
    address = IPv4Address("192.0.2.5")
    uplink = Uplink("eth1", 3, 1500, address, address)
    assert machine_of(cast("HostKernel", kernel), uplink) == expected
