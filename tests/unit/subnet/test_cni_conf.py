"""The configuration of container runtimes that the daemon keeps itself."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any

import pytest

from flanneld.errors import Fatal
from flanneld.reconcile.reconciler import Reconciler
from flanneld.runtime import clock
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Scope
from flanneld.subnet import subnet_file
from flanneld.subnet.cni_conf import MARK, TABLE, CniConfTable, delegated, is_flannelds, read_template
from flanneld.subnet.subnet_file import SubnetEnv, render
from tests.kubernetes_objects import ROOT, files_of, manifest

V4 = (IPv4Network("10.5.0.0/16"), IPv4Network("10.5.72.0/24"))
V6 = (IPv6Network("fd00:5::/32"), IPv6Network("fd00:5:48::/64"))
ENVS = [
    SubnetEnv((V4[0],), (V4[1],), 1450, ip_masq=True),
    SubnetEnv((V6[0],), (V6[1],), 1430, ip_masq=False),
    SubnetEnv((V6[0], V4[0]), (V6[1], V4[1]), 1430, ip_masq=True),
]
BRIDGE = ["bridge", "host-local", "portmap"]


def load_plugin() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("cni_plugin", str(ROOT / "dist/cni/flannel"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


PLUGIN = load_plugin()
TEMPLATE: dict[str, Any] = files_of(manifest())["cni-conf.json"]


class Host:
    """A host with the table in a reconciler, on a clock of its own."""

    def __init__(self, root: Path, template: dict[str, Any] = TEMPLATE) -> None:
        self.path, self.programs = root / "net.d/10-flannel.conflist", root / "bin"
        self.programs.mkdir(exist_ok=True)
        self._desired: dict[Key, Resource] = {}
        self._now = 1000.0
        with self._clock():
            self._table = CniConfTable(self.path, template, self.programs)
            # subnet.env is there, as far as this table needs it.
            self._reconciler = Reconciler(
                [self._table], {TABLE: self._desired}, lambda: False, converged={subnet_file.TABLE}
            )

    def install(self, *names: str) -> None:
        for name in names:
            (self.programs / name).touch()

    def want(self, env: SubnetEnv = ENVS[0]) -> None:
        wanted = self._table.desired(env)
        self._desired[wanted.key] = wanted
        with self._clock():
            self._reconciler.converge(self._now)

    def look(self, seconds: float = 60.0) -> None:
        with self._clock():
            end = self._now + seconds
            while self._now < end:
                self._now = min(end, max(self._now + 0.01, self._reconciler.step(self._now)))

    @property
    def trouble(self) -> str:
        with self._clock():
            return self._reconciler.states()[0].trouble

    @property
    def conf(self) -> dict[str, Any]:
        conf: dict[str, Any] = json.loads(self.path.read_text())
        return conf

    @property
    def kinds(self) -> list[str]:
        return [plugin["type"] for plugin in self.conf["plugins"]]

    def replace(self, conf: object) -> None:
        """Write the file as another program does."""
        self.path.write_text(json.dumps(conf))

    @contextmanager
    def _clock(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now", lambda: self._now)
            patch.setattr(clock, "cpu_time", lambda: 0.0)
            yield


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.install(*BRIDGE)
    return host


@pytest.mark.parametrize(
    "flannel",
    [
        {},
        {"delegate": {"hairpinMode": True, "isDefaultGateway": True}},
        {"delegate": {"type": "ipvlan", "mtu": 1300, "ipMasq": True}},
        {"ipam": {"type": "other", "dataDir": "/x", "routes": [{"dst": "10.96.0.0/12"}], "ranges": []}},
    ],
)
@pytest.mark.parametrize("env", ENVS)
def test_delegate_is_the_one_of_flannels_plug_in(env: SubnetEnv, flannel: dict[str, Any]) -> None:
    conf = delegated({"name": "cbr0", "plugins": [{"type": "flannel", **flannel}]}, env)
    given = PLUGIN.parse_conf(json.dumps({"name": "cbr0", **flannel}).encode())
    theirs = PLUGIN.delegate_conf(given, PLUGIN.parse_subnet_env(render(env)))
    assert {"name": conf["name"], **conf["plugins"][0]} == theirs


def test_file_has_template_with_delegate(host: Host) -> None:
    host.want(ENVS[2])
    rest = {"name": "cbr0", "cniVersion": "0.3.1", "disableCheck": True, MARK: 2}
    assert {**host.conf, "plugins": None} == {**rest, "plugins": None}
    assert host.kinds == ["bridge", "portmap"]
    assert host.conf["plugins"][0]["ipam"]["ranges"] == [[{"subnet": str(V4[1])}], [{"subnet": str(V6[1])}]]


def test_capabilities_of_flannels_entry_reach_the_delegate() -> None:
    flannel = {"type": "flannel", "capabilities": {"mac": True}}
    (bridge,) = delegated({"name": "cbr0", "plugins": [flannel]}, ENVS[0])["plugins"]
    assert bridge["capabilities"] == {"mac": True}


def test_file_waits_for_its_plug_ins(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.install("bridge", "portmap")
    host.want()
    assert not host.path.exists()
    assert f"the plug-in {host.programs / 'host-local'} is missing" in host.trouble
    host.install("host-local")
    host.look(5)
    assert host.kinds == ["bridge", "portmap"]
    assert host.trouble == ""


def test_equal_file_of_an_earlier_run_is_not_written_again(host: Host, tmp_path: Path) -> None:
    host.want()
    before = host.path.stat()
    again = Host(tmp_path)
    again.want()
    assert host.path.stat() == before


def test_new_subnet_changes_the_file(host: Host) -> None:
    host.want(ENVS[0])
    for env in (ENVS[2], *ENVS):  # our own changes are no repairs
        host.want(env)
        assert len(host.conf["plugins"][0]["ipam"]["ranges"]) == len(env.subnets)
    assert host.trouble == ""


def test_plug_in_that_another_program_appends_stays(host: Host) -> None:
    host.want()
    added = {"type": "istio-cni", "log_level": "info"}
    host.replace({**host.conf, "plugins": [*host.conf["plugins"], added]})
    host.look()
    assert host.kinds == ["bridge", "portmap", "istio-cni"]
    host.want(ENVS[2])
    assert host.kinds == ["bridge", "portmap", "istio-cni"]
    assert host.conf["plugins"][2] == added


def test_file_for_flannels_plug_in_is_taken_over_with_what_others_appended(host: Host) -> None:
    host.path.parent.mkdir()
    host.replace({**TEMPLATE, "plugins": [*TEMPLATE["plugins"], {"type": "linkerd-cni"}]})
    host.want()
    assert host.kinds == ["bridge", "portmap", "linkerd-cni"]


def test_plug_in_that_left_the_template_leaves_the_file(host: Host, tmp_path: Path) -> None:
    host.install("bandwidth")
    wide = {**TEMPLATE, "plugins": [*TEMPLATE["plugins"], {"type": "bandwidth"}]}
    Host(tmp_path, wide).want()
    assert host.kinds == ["bridge", "portmap", "bandwidth"]
    host.want()
    assert host.kinds == ["bridge", "portmap"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"plugins": 1}', '{"flanneld": "x"}', "\x00", '{"name": "cni"}']
)
def test_garbage_in_place_of_the_file_is_replaced(host: Host, content: str) -> None:
    host.want()
    host.path.write_text(content)
    host.look()
    assert host.kinds == ["bridge", "portmap"]


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(lambda path: path.symlink_to("elsewhere"), id="link to a copy"),
        pytest.param(lambda path: path.symlink_to(path), id="link to itself"),
        pytest.param(os.mkfifo, id="FIFO"),
        pytest.param(lambda path: path.write_bytes(b"[" * 10_000_000), id="10 MB"),
    ],
)
def test_what_is_no_regular_file_or_too_large_is_replaced_and_never_followed(
    host: Host, put: Callable[[Path], object]
) -> None:
    host.want()
    written = host.path.read_bytes()
    elsewhere = host.path.rename(host.path.with_name("elsewhere"))
    put(host.path)
    host.look()
    assert not host.path.is_symlink()
    assert host.path.read_bytes() == elsewhere.read_bytes() == written


def test_directory_that_is_none_is_named_and_the_file_written_once_it_is_one(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.path.parent.touch()
    host.want()
    host.look(600)
    assert "File exists" in host.trouble
    assert len([each for each in caplog.records if "10-flannel.conflist" in each.message]) == 1
    host.path.parent.unlink()
    host.look()
    assert host.kinds == ["bridge", "portmap"]
    assert host.trouble == ""


def test_two_daemons_that_want_one_file_give_way(host: Host, tmp_path: Path) -> None:
    other = Host(tmp_path)
    for _ in range(20):
        host.want(ENVS[0])
        other.want(ENVS[1])
        host.look(5)
        other.look(5)
    before = host.path.stat()
    host.look()
    other.look()
    assert host.path.stat() == before
    assert "another program changed or removed it" in host.trouble + other.trouble


def test_template_that_changes_counts_from_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "cni-conf.json"
    path.write_text(json.dumps(TEMPLATE))
    host = Host(tmp_path, read_template(path))
    host.install(*BRIDGE)
    host.want()
    path.write_text("{}")
    host.look()
    host.want(ENVS[2])
    assert host.kinds == ["bridge", "portmap"]
    assert host.trouble == ""


def test_plug_in_stays_that_a_program_appends_while_the_file_changes(host: Host) -> None:
    """As istio-cni does it: it watches the file, and has its entry in a copy that it renames."""
    added, ended = {"type": "istio-cni"}, Event()

    def append() -> None:
        with suppress(FileNotFoundError):
            conf = host.conf
            if added not in conf["plugins"]:
                copy = host.path.with_name("istio")
                copy.write_text(json.dumps({**conf, "plugins": [*conf["plugins"], added]}))
                copy.rename(host.path)

    def keep_appending() -> None:
        while not ended.is_set():
            append()

    host.want()
    thread = Thread(target=keep_appending)
    thread.start()
    try:
        for number in range(200):
            host.want(ENVS[number % 3])
            host.look(1)
    finally:
        ended.set()
        thread.join()
    append()
    host.look()
    assert host.trouble == ""
    assert host.kinds == ["bridge", "portmap", "istio-cni"]
    assert len(host.conf["plugins"][0]["ipam"]["ranges"]) == len(ENVS[199 % 3].subnets)


def test_program_that_keeps_replacing_the_file_is_given_way_and_named(host: Host) -> None:
    host.want()
    theirs = {"name": "other", "plugins": [{"type": "other-cni"}]}
    for _ in range(2):
        host.replace(theirs)
        host.look()
        assert host.kinds == ["bridge", "portmap"]
    host.replace(theirs)
    host.look()
    assert host.conf == theirs
    assert "another program changed or removed it more than 2 times" in host.trouble


def test_file_of_ours_is_known_by_its_mark(host: Host, tmp_path: Path) -> None:
    host.want()
    assert is_flannelds(host.path)
    (tmp_path / "other").write_text(json.dumps(TEMPLATE))
    assert not is_flannelds(tmp_path / "other")
    assert not is_flannelds(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("x", "JSON is malformed"),
        ("{}", "missing required field `name`"),
        ('{"name": "cbr0", "plugins": []}', "length >= 1"),
        ('{"name": "cbr0", "plugins": [{"type": "bridge"}]}', "Invalid enum value"),
        (
            '{"name": "cbr0", "plugins": [{"type": "flannel", "delegate": {"ipam": {}}}]}',
            "has a name or ipam",
        ),
        ('{"name": "cbr0", "plugins": [{"type": "flannel", "delegate": {"type": 7}}]}', "Expected `str`"),
        ('{"name": "cbr0", "plugins": [{"type": "flannel", "ipam": {"routes": 5}}]}', "Expected `array"),
        ('{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": 5}]}', "Expected `str`"),
        (
            '{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "x", "ipam": "y"}]}',
            "Expected `object",
        ),
        ('{"a":' * 20_000, "recursion"),
    ],
)
def test_template_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "cni-conf.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Fatal, match="-cni-template") as caught:
        read_template(path)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 20_000,
        '{"name": "cbr0", "plugins": [{"type": {}}]}',
        '{"flanneld": -1, "plugins": [{"type": []}]}',
    ],
)
def test_file_that_is_no_configuration_is_replaced(host: Host, text: str) -> None:
    host.install(*BRIDGE)
    host.path.parent.mkdir()
    host.path.write_text(text)
    host.want()
    assert is_flannelds(host.path)


def test_plan_has_the_command_that_writes_the_file(host: Host, tmp_path: Path) -> None:
    table = CniConfTable(host.path, TEMPLATE, host.programs)
    want = table.desired(ENVS[0])
    (command,) = table.script(Scope({want.key: want}))
    host.path.parent.mkdir()
    subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path)
    assert list(table.script(Scope({want.key: want}))) == []
