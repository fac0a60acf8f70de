"""The table of our devices: what is read of them, and what it takes to make one right."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from flanneld.network import host
from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.netlink import HEADER, attributes
from flanneld.network.rtnetlink.tables import LinkTable
from flanneld.state.resources import Dummy, Link, WireGuard
from flanneld.state.table import Claim, Put, Scope, Seen
from tests.unit.network.stand_ins import FakeEthtool
from tests.unit.network.test_links import IPIP, IPV6, MAC, WANTED, description

NAME, INDEX = WANTED.name, 7
ADD = f"add {NAME} vxlan mtu 1450 txqlen 0 address {MAC}"


class FakeLinks:
    """Stands in for the netlink sockets: devices as the kernel describes them, what is written, refusals."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.written: list[str] = []
        #: Errors of the next writes, 0 for none.
        self.refusals: list[int] = []
        self.data: list[dict[str, Any]] = []

    def __call__(self) -> FakeLinks:
        return self

    def close(self) -> None:
        pass

    def index_of(self, name: str) -> int:
        if name not in self.held:
            raise OSError(errno.ENODEV, "No such device")
        return INDEX

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        assert kind == rtnl.RTM_GETLINK
        name = attributes(body, 16, len(body))[3].rstrip(b"\0").decode()
        self.index_of(name)
        return self.held[name], HEADER.size, len(self.held[name])

    def dump(self, kind: int, _body: bytes) -> Iterator[tuple[bytes, int, int]]:
        assert kind == rtnl.RTM_GETLINK
        for each in self.held.values():
            yield each, HEADER.size, len(each)

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        for item in batch:
            told = ifinfmsg(item)
            told.decode()
            self.written.append(words(told))
            info = told.get_attr("IFLA_LINKINFO")
            data = info and info.get_attr("IFLA_INFO_DATA")
            self.data += [dict(data["attrs"])] if data else []
            code = self.refusals.pop(0) if self.refusals else 0
            if not code:
                self._change(told)
            yield [(0, code)] if code else []

    def _change(self, told: ifinfmsg) -> None:
        name = told.get_attr("IFLA_IFNAME")
        if told["header"]["type"] == rtnl.RTM_DELLINK:
            self.held.clear()
        elif name:
            self.held = {name: description(name)}


def words(told: Any) -> str:
    if told["header"]["type"] == rtnl.RTM_DELLINK:
        return f"del {told['index']}"
    is_new = told["header"]["flags"] & 0x600 == 0x600
    info = told.get_attr("IFLA_LINKINFO")
    found = {
        "name": None if is_new else told.get_attr("IFLA_IFNAME"),
        "mtu": told.get_attr("IFLA_MTU"),
        "txqlen": told.get_attr("IFLA_TXQLEN"),
        "address": told.get_attr("IFLA_ADDRESS"),
    }
    first = (
        [told.get_attr("IFLA_IFNAME"), info.get_attr("IFLA_INFO_KIND")] if is_new else [str(told["index"])]
    )
    rest = [f"{name} {value}" for name, value in found.items() if value is not None]
    rest += [{0: "down", 1: "up"}[told["flags"]]] if told["change"] else []
    return " ".join(["add" if is_new else "set", *first, *rest])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeLinks:
    found = FakeLinks()
    for user in (host, devices):
        monkeypatch.setattr(user, "NetlinkSocket", found)
    monkeypatch.setattr(socket, "if_nametoindex", found.index_of)
    monkeypatch.setattr(Path, "write_text", lambda path, text: found.written.append(f"{path} is {text}"))
    return found


NO_ROUTERS = f"/proc/sys/net/ipv6/conf/{NAME}/accept_ra is 0"


def scope(*desired: Link) -> Scope:
    return Scope({each.key: each for each in desired})


def test_devices_are_read_by_their_names_and_those_of_earlier_runs_are_left(kernel: FakeLinks) -> None:
    left = replace(WANTED, name="flannel.9")
    table = LinkTable(Kernel(), lambda: [left, WANTED])
    assert list(table.read(scope(WANTED))) == [Seen(left, Claim.LEFT)]
    kernel.held = {NAME: description()}
    first, *others = table.read(scope(WANTED))
    assert (first.resource is WANTED, others) == (True, [Seen(left, Claim.LEFT)])
    kernel.held = {NAME: description(mtu=1400)}
    assert next(table.read(scope(WANTED))) == Seen(replace(WANTED, mtu=1400))
    assert [each.claim for each in table.read(scope())] == [Claim.LEFT, Claim.LEFT]


@pytest.mark.parametrize(
    ("found", "written"),
    [
        (None, [ADD, NO_ROUTERS, f"set {INDEX} up"]),
        (description(mtu=1400), [f"set {INDEX} mtu 1450"]),
        (description(mac="02:00:00:00:00:02"), [f"set {INDEX} address {MAC}"]),
        (description(up=False), [f"set {INDEX} up"]),
        (description(IFLA_VXLAN_ID=9), [f"del {INDEX}", ADD, NO_ROUTERS, f"set {INDEX} up"]),
        (description(kind="bridge"), [f"del {INDEX}", ADD, NO_ROUTERS, f"set {INDEX} up"]),
    ],
)
def test_device_is_made_right_with_what_it_takes(
    found: bytes | None, written: list[str], kernel: FakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.held = {NAME: found} if found else {}
    assert LinkTable(Kernel()).put([Put(WANTED)]).made == [WANTED]
    assert kernel.written == written
    assert len(caplog.records) == (found is not None)


def test_checksums_of_a_device_are_computed_by_the_cpu_if_that_is_wanted(
    kernel: FakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ethtool = FakeEthtool()
    ethtool.device = NAME
    monkeypatch.setattr(fcntl, "ioctl", ethtool)
    wanted, table = replace(WANTED, cpu_checksums=True), LinkTable(Kernel())
    for held in ({}, {NAME: description()}):
        kernel.held, ethtool.checksums = held, 1
        assert table.put([Put(wanted)]).made == [wanted]
        assert ethtool.checksums == 0
        assert not table.put([Put(wanted)]).made
    ethtool.checksums = 1
    assert next(table.read(scope(wanted))) == Seen(WANTED)
    assert not table.put([Put(WANTED)]).made


VXLAN_DATA = {
    "IFLA_VXLAN_ID": 1,
    "IFLA_VXLAN_LINK": 3,
    "IFLA_VXLAN_PORT": 8472,
    "IFLA_VXLAN_LEARNING": 0,
    "IFLA_VXLAN_LOCAL": "192.168.0.1",
}
PLAIN = {"IFLA_IPIP_TTL": 0, "IFLA_IPIP_TOS": 0, "IFLA_IPIP_PMTUDISC": 0}


@pytest.mark.parametrize(
    ("wanted", "data"),
    [
        (WANTED, [VXLAN_DATA]),
        (replace(WANTED, learning=True), [{**VXLAN_DATA, "IFLA_VXLAN_LEARNING": 1}]),
        (replace(WANTED, gbp=True), [{**VXLAN_DATA, "IFLA_VXLAN_GBP": True}]),
        (IPIP, [{"IFLA_IPIP_LOCAL": "192.168.0.1", **PLAIN}]),
        (replace(IPIP, local=None, remote=IPIP.local), [{"IFLA_IPIP_REMOTE": "192.168.0.1", **PLAIN}]),
        (WireGuard("flannel-wg", 1420), []),
        (Dummy("flannel-ipsec", 1400), []),
    ],
)
def test_device_is_made_with_the_properties_of_its_kind(
    wanted: Link, data: list[dict[str, Any]], kernel: FakeLinks
) -> None:
    assert LinkTable(Kernel()).put([Put(wanted)]).made == [wanted]
    assert kernel.data == data
    assert kernel.written[0].startswith(f"add {wanted.name} {wanted.make} mtu ")


def test_vxlan_over_ipv6_is_made_with_its_end(kernel: FakeLinks) -> None:
    LinkTable(Kernel()).put([Put(IPV6)])
    (data,) = kernel.data
    assert data["IFLA_VXLAN_LOCAL6"] == "fd77::1"
    assert "IFLA_VXLAN_LOCAL" not in data


def test_device_that_is_right_is_not_touched(kernel: FakeLinks, caplog: pytest.LogCaptureFixture) -> None:
    kernel.held = {NAME: description()}
    report = LinkTable(Kernel()).put([Put(WANTED)])
    assert (report.made, report.failed, kernel.written, caplog.text) == ([], [], [], "")


@pytest.mark.parametrize(("claim", "is_told"), [(None, False), (Claim.OURS, True)])
def test_change_of_what_was_desired_is_not_worth_a_warning(
    claim: Claim | None, is_told: bool, kernel: FakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.held = {NAME: description(mtu=1400)}
    LinkTable(Kernel()).put([Put(WANTED, replace(WANTED, mtu=1400), claim)])
    assert ("has mtu 1400, wanted 1450" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("busy", "steps"),
    [
        (False, [f"set {INDEX} name {NAME}"]),
        (
            True,
            [
                f"set {INDEX} name {NAME}",
                f"set {INDEX} down",
                f"set {INDEX} name {NAME}",
                f"set {INDEX} up",
            ],
        ),
    ],
)
def test_device_that_was_renamed_gets_its_name_back(
    busy: bool, steps: list[str], kernel: FakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.held = {"other": description("other")}
    kernel.refusals = [errno.EBUSY] if busy else []
    assert LinkTable(Kernel()).put([Put(WANTED)]).made == [WANTED]
    assert kernel.written == steps
    assert f"Device {NAME} was renamed to other: renaming it back" in caplog.text


def test_name_that_the_kernel_refuses_is_an_error(kernel: FakeLinks) -> None:
    kernel.refusals = [errno.EPERM]
    with pytest.raises(PermissionError, match="link set: "):
        devices.rename(INDEX, NAME)
    assert len(kernel.written) == 1


@pytest.mark.parametrize(
    ("code", "others", "reason", "remedy"),
    [
        (errno.EEXIST, {}, "", "find it with: ip -d link show type vxlan"),
        (
            errno.EEXIST,
            {"vx9": description("vx9", mac="02:00:00:00:00:02")},
            ": vx9 serves the same ends",
            "vx9",
        ),
        (errno.EEXIST, {"vx9": description("vx9", IFLA_VXLAN_ID=9, mac="02:00:00:00:00:02")}, "", "find it"),
        (
            errno.EADDRINUSE,
            {"vx9": description("vx9", mac="02:00:00:00:00:02", IFLA_VXLAN_GBP=True)},
            ": the device vx9 has its UDP port",
            "set another Backend.Port",
        ),
        (errno.EOPNOTSUPP, {}, "", "modprobe vxlan"),
    ],
)
def test_refused_device_is_told_with_what_has_its_place(
    code: int, others: dict[str, bytes], reason: str, remedy: str, kernel: FakeLinks
) -> None:
    kernel.held = dict(others)
    kernel.refusals = [code]
    wireguard = WireGuard("flannel-wg", 1420)
    report = LinkTable(Kernel()).put([Put(WANTED), Put(wireguard)])
    assert report.made == [wireguard]
    (failure,) = report.failed
    assert failure.reason == f"link add: {os.strerror(code)}{reason}"
    assert remedy in failure.remedy


def test_devices_are_removed_and_missing_ones_are_gone(kernel: FakeLinks) -> None:
    kernel.held = {NAME: description()}
    gone = replace(WANTED, name="flannel.9")
    assert LinkTable(Kernel()).drop([gone, WANTED]).removed == [gone, WANTED]
    assert kernel.written == [f"del {INDEX}"]
    kernel.held, kernel.refusals = {NAME: description()}, [errno.EPERM]
    report = LinkTable(Kernel()).drop([WANTED])
    assert [each.reason for each in report.failed] == ["link del: Operation not permitted"]


@pytest.mark.parametrize(
    ("code", "lacks"), [(errno.EOPNOTSUPP, True), (errno.EPERM, False), (errno.EINVAL, False), (0, False)]
)
def test_kernel_lacks_a_kind_that_it_does_not_know(code: int, lacks: bool, kernel: FakeLinks) -> None:
    kernel.refusals = [code]
    assert devices.lacks("wireguard") is lacks
    assert kernel.written == ["add / wireguard"]


def test_link_that_is_asked_for_may_be_refused(kernel: FakeLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kernel().link("flannel.9") is None

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kernel, "ask", refuse)
    with pytest.raises(PermissionError):
        Kernel().link("flannel.9")
