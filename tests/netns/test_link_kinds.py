"""A kind of device that only a package outside flanneld knows, in the kernel and wherever kinds differ."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from flanneld.findings import Command, command
from flanneld.network import iproute2_commands, resource_json
from flanneld.network.host import HostView
from flanneld.network.rtnetlink import devices, links
from flanneld.network.rtnetlink.links import Attribute, LinkCodec, LinkStep, SeenLink, link_info, number
from flanneld.state.resources import ForeignLink, Link
from tests.lab import Lab, wait_for
from tests.lab.forks import FORKS
from tests.lab.namespace import Namespace, batch, remove
from tests.netns.test_cleanup import cleanup
from tests.netns.test_seeing import answer, findings

_AGEING_TIME = 4


class Bridge(Link, frozen=True, gc=False):
    """A bridge that forgets a MAC address after ``ageing`` hundredths of a second."""

    make: ClassVar[str] = "bridge"
    name: str
    mtu: int
    ageing: int
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} bridge ageing {self.ageing}"


class BridgeCodec(LinkCodec[Bridge]):
    resource = Bridge
    names = re.compile(r"flannel-br")
    settable = ("mtu", "up", "ageing")

    def parse(self, seen: SeenLink, data: dict[int, bytes]) -> Bridge:
        return Bridge(seen.name, seen.mtu, number(data.get(_AGEING_TIME)), seen.up)

    def data(self, wanted: Bridge) -> Iterator[Attribute]:
        yield "IFLA_BR_AGEING_TIME", wanted.ageing

    def changes(self, wanted: Bridge, actual: Bridge) -> Iterator[Attribute]:
        if wanted.ageing != actual.ageing:
            yield link_info("bridge", *self.data(wanted))

    def make_commands(self, wanted: Bridge, parent: str) -> Iterator[Command]:
        for plain in super().make_commands(wanted, parent):
            yield command(*plain, "ageing_time", wanted.ageing)

    def change_commands(self, wanted: Bridge, actual: Bridge) -> Iterator[Command]:
        if wanted.ageing != actual.ageing:
            yield command("ip", "link", "set", wanted.name, "type", "bridge", "ageing_time", wanted.ageing)


WANTED = Bridge("flannel-br", 1400, 12300)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A namespace in which the test runs, in a process to which the kind is known."""
    monkeypatch.setitem(links._codecs, "bridge", BridgeCodec())
    links.register(BridgeCodec())
    for cached in (resource_json._types, resource_json._shape):
        cached.cache_clear()  # which was filled before this file was read
    namespace = Namespace(f"flb{os.getpid()}")
    batch(f"netns add {namespace.name}")
    try:
        with namespace.entered():
            yield namespace
    finally:
        remove([namespace])


def described(host: Namespace) -> dict[str, Any]:
    """The device as iproute2 tells it."""
    (found,) = host.json("ip", "-d", "-j", "link", "show", "dev", WANTED.name)
    return {
        "index": found["ifindex"],
        "mtu": found["mtu"],
        "up": "UP" in found["flags"],
        "ageing": found["linkinfo"]["info_data"]["ageing_time"],
    }


def seen() -> SeenLink:
    found = HostView().link(WANTED.name)
    assert found is not None
    return found


def test_a_device_of_a_registered_kind_is_made_read_back_and_repaired_in_place(host: Namespace) -> None:
    devices.put(WANTED, None)
    there = described(host)
    assert there == {"index": there["index"], "mtu": 1400, "up": True, "ageing": 12300}
    assert seen().make == WANTED
    host.ip("link set flannel-br type bridge ageing_time 30000")
    drifted = seen().make
    assert drifted == replace(WANTED, ageing=30000)
    assert links.step(WANTED, drifted) is LinkStep.SET
    assert links.differences(WANTED, drifted) == "has ageing 30000, wanted 12300"
    devices.put(WANTED, drifted)
    assert described(host) == there


def test_the_commands_of_a_plan_make_and_repair_a_device_of_a_registered_kind(host: Namespace) -> None:
    def run(actual: Link | ForeignLink | None) -> None:
        for each in iproute2_commands.link(WANTED, actual, parent=""):
            subprocess.run(each, check=True)

    run(None)
    assert seen().make == WANTED
    host.ip("link set flannel-br mtu 1300 type bridge ageing_time 30000")
    index = described(host)["index"]
    run(seen().make)
    assert (seen().make, seen().index) == (WANTED, index)


def test_a_registered_kind_is_known_by_its_names_and_as_json(host: Namespace) -> None:
    del host
    found = SeenLink(5, WANTED.name, "", WANTED.mtu, True, WANTED)
    assert links.is_flannels(found)
    assert not links.is_flannels(replace(found, name="br0"))
    assert resource_json.decode(resource_json.encode(WANTED) or {}) == WANTED


#: A backend with a kind of its own. Its annotations are classes, not texts.
PACKAGE = """
import re

from flanneld.backends.host_gw import HostGw
from flanneld.model import IPAddress
from flanneld.network.rtnetlink.links import LinkCodec, register
from flanneld.state.resources import Link


class Pier(Link, frozen=True, gc=False):
    make = "bridge"
    name: str
    mtu: int
    up: bool = True
    owner: IPAddress | None = None

    def __str__(self):
        return self.name


class PierCodec(LinkCodec[Pier]):
    resource = Pier
    names = re.compile("pier0")


register(PierCodec())


class Backend(HostGw):
    def local(self, own):
        yield Pier("pier0", self.mtu)
"""


def test_device_of_a_packages_kind_is_shown_and_cleaned_up(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "pier-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pier\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[flanneld.backends]\npier = pier:Backend\n")
    (tmp_path / "pier.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(FORKS, "0")  # what forks programs has looked for packages before
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "pier"}})
    (node,) = lab.add_nodes()
    node.start()
    node.wait_ready()
    assert node.link("pier0")
    (shown,) = answer(node, "routes")["objects"]
    assert (shown["text"], shown["state"]) == ("pier0", "ok")
    wait_for(lambda: findings(node) == {}, what="a doctor who finds nothing")
    node.stop()
    assert "removed link pier0" in cleanup(node)
    assert not node.link("pier0")
