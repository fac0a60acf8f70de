"""Queueing disciplines and filters as the kernel tells them (linux/rtnetlink.h, linux/pkt_sched.h)."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

import pytest

from flanneld.network import host
from flanneld.network.rtnetlink.netlink import attribute
from flanneld.network.rtnetlink.traffic_control import filters, queue_drops

GETQDISC, GETFILTER = 38, 46
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
NAMES = {2: "eth0", 7: "flannel.1"}


class FakeSocket:
    """Stands in for the netlink socket: objects by question, interface and parent."""

    def __init__(self) -> None:
        self.objects: dict[tuple[int, int, int], list[bytes]] = {}
        self.refusal = 0

    def __call__(self) -> FakeSocket:
        return self

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        family, index, handle, parent, info = struct.unpack("=BxxxiIII", body)
        assert (family, handle, info) == (0, 0, 0)
        for each in self.objects.get((kind, index, parent), []):
            yield b"head" + each, 4, 4 + len(each)


@pytest.fixture
def netlink(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    found = FakeSocket()
    monkeypatch.setattr(host, "NetlinkSocket", found)
    return found


def told(index: int, kind: str, *more: bytes, info: int = 0) -> bytes:
    head = struct.pack("=BxxxiIII", 0, index, 0x10000, 0, info)
    return head + attribute(1, kind.encode() + b"\0") + b"".join(more)


def dropped(count: int) -> bytes:
    queue = struct.pack("=IIIII", 1, 1500, count, 3, 4)  # length, backlog, drops, requeues, overlimits
    return attribute(7, attribute(1, bytes(16)) + attribute(3, queue))


def test_drops_are_counted_by_interface_and_discipline(netlink: FakeSocket) -> None:
    netlink.objects[GETQDISC, 0, 0] = [
        told(2, "mq", dropped(5)),
        told(2, "fq_codel", dropped(3)),
        told(2, "fq_codel", dropped(4)),
        told(7, "clsact", dropped(0)),
        told(9, "fq_codel", dropped(8)),
        told(7, "noqueue"),
        told(7, "odd", attribute(7, attribute(3, bytes(11)))),
    ]
    assert queue_drops(NAMES) == {
        ("eth0", "mq"): 5,
        ("eth0", "fq_codel"): 7,
        ("flannel.1", "clsact"): 0,
    }


@pytest.mark.parametrize(("kind", "ways"), [("clsact", 2), ("ingress", 1), ("htb", 0)])
def test_filters_of_disciplines_that_drop_are_named_as_tc_does(
    kind: str, ways: int, netlink: FakeSocket
) -> None:
    netlink.objects[GETFILTER, 2, INGRESS] = [
        told(2, "u32", info=49152 << 16 | 3),
        told(2, "u32", info=49152 << 16 | 3),
        told(2, "bpf", info=1 << 16 | 8),
    ]
    netlink.objects[GETFILTER, 2, EGRESS] = [told(2, "flower", info=2 << 16)]
    expected = [
        ("eth0", "ingress pref 49152 u32"),
        ("eth0", "ingress pref 1 bpf"),
        ("eth0", "egress pref 2 flower"),
    ]
    found = list(filters([("eth0", kind), ("flannel.1", "fq_codel")], NAMES))
    assert found == expected[: {0: 0, 1: 2, 2: 3}[ways]]


def test_kernel_without_traffic_control_has_neither(netlink: FakeSocket) -> None:
    netlink.refusal = errno.EOPNOTSUPP
    assert queue_drops(NAMES) == {}
    assert list(filters([("eth0", "clsact")], NAMES)) == []
