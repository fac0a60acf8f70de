"""The netlink socket against a real kernel, when reading its answers fails."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink import traffic_control
from flanneld.network.rtnetlink.netlink import NetlinkSocket, messages
from flanneld.state.resources import Address
from tests.lab import Lab
from tests.lab.namespace import Namespace, batch, remove
from tests.netns.test_kernel import _numbers

#: More refusals than fit into the smallest receive buffer.
MANY = 400


@pytest.fixture
def empty() -> Iterator[Namespace]:
    namespace = Namespace(f"fln{os.getpid()}.{next(_numbers)}")
    batch(f"netns add {namespace.name}")
    try:
        with namespace.entered():
            yield namespace
    finally:
        remove([namespace])


def writes(*numbers: int, drop: bool = False) -> Iterator[bytes]:
    for place, number in enumerate(numbers):
        address = Address("lo", IPv4Address(0x0A000000 + number))
        yield rtnl.encode(address, lambda _: 1, 3, place, drop=drop)


def bodies(data: bytes) -> list[tuple[bytes, int, int]]:
    return [(data, offset, end) for *_, offset, end in messages(data)]


def test_refusals_are_told_by_their_place(empty: Namespace) -> None:
    del empty
    kernel = NetlinkSocket()
    for _ in range(2):
        assert [code for answer in kernel.write(writes(1, 2)) for code in answer] == []
        # Removing what is not there is refused, save for the one in the middle.
        refused = [found for answer in kernel.write(writes(7, 1, 8, drop=True)) for found in answer]
        assert refused == [(0, errno.EADDRNOTAVAIL), (2, errno.EADDRNOTAVAIL)]
    kernel.close()


def test_answers_left_after_failed_read_are_not_credited_to_a_later_batch(empty: Namespace) -> None:
    """The first refusal of the batch that fails has the same place as the write after it."""
    del empty
    kernel = NetlinkSocket(receive_buffer=1)
    with pytest.raises(OSError, match="buffer") as caught:
        list(kernel.write(writes(*range(MANY), drop=True)))
    assert caught.value.errno == errno.ENOBUFS
    assert list(kernel.write(writes(1))) == [[]]
    assert list(kernel.write(writes(MANY, drop=True))) == [[(0, errno.EADDRNOTAVAIL)]]
    kernel.close()


def test_an_interface_is_found_by_its_name(empty: Namespace) -> None:
    del empty
    no_text = os.fsdecode(b"\xff")
    for name in ("fifteen-letters", no_text):
        subprocess.run(["ip", "link", "add", name, "type", "veth"], check=True)
    kernel = NetlinkSocket()
    assert kernel.index_of("lo") == 1
    for name in ("fifteen-letters", no_text):
        assert kernel.index_of(name) == socket.if_nametoindex(name)
    for missing in ("nothing", "fifteen-letters-and-more", ""):
        with pytest.raises(OSError, match="No such device"):
            kernel.index_of(missing)
    kernel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.index_of("lo")


@pytest.mark.parametrize("discipline", ["clsact", "ingress"])
def test_filter_of_traffic_control_is_named_once(empty: Namespace, discipline: str) -> None:
    empty.run("tc", "qdisc", "add", "dev", "lo", discipline)
    drop = ["bpf", "direct-action", "bytecode"]
    empty.run("tc", "filter", "add", "dev", "lo", "ingress", "pref", "7", *drop, "1,6 0 0 2,")
    found = traffic_control.filters([("lo", discipline)], {1: "lo"})
    assert list(found) == [("lo", "ingress pref 7 bpf")]


def test_the_kernel_sends_no_notification_of_what_an_ignored_socket_does(empty: Namespace) -> None:
    empty.ip("link set lo up")
    ours, others = NetlinkSocket(), NetlinkSocket()
    news = NetlinkSocket([rtnl.GROUP_IPV4_ADDRESS])
    news.ignore(ours.port)
    assert list(ours.write(writes(1))) == [[]]
    with pytest.raises(BlockingIOError):
        news.receive()
    assert list(others.write(writes(2))) == [[]]
    (told,) = bodies(news.receive())
    seen = rtnl.decode_address(*told)
    assert seen is not None
    assert seen.address == IPv4Address("10.0.0.2")
    with pytest.raises(BlockingIOError):
        news.receive()
    for each in (ours, others, news):
        each.close()


#: A backend of another package, for which the kernel's tables do not hold still at first.
PACKAGE = """
from flanneld.backends.host_gw import HostGw
from flanneld.network.rtnetlink.netlink import DumpInterrupted

attempts = []

def build(config, host):
    attempts.append(host)
    if len(attempts) < 3:
        raise DumpInterrupted(4, "the table changed during the dump")
    return HostGw(config, host)
"""


def test_interrupted_dump_while_the_node_joins_is_tried_again(lab: Lab, tmp_path: Path) -> None:
    info = tmp_path / "restless-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: restless\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[flanneld.backends]\nrestless = restless:build\n")
    (tmp_path / "restless.py").write_text(PACKAGE)
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "restless"}})
    (node,) = lab.add_nodes()
    node.start(environment={"PYTHONPATH": str(tmp_path)})
    node.wait_ready()
    (line,) = node.wait_for_log("Waiting for this host's devices")
    assert line.endswith("the table changed during the dump")
    assert "Got this host's devices" in node.log()
    assert "Traceback" not in node.log()
