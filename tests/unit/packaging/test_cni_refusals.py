"""dist/cni/flannel: what it refuses, and with which words."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cni_node import IPV4, IPV6, PLUGIN, REST, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("command", ["ADD", "GC"])
def test_a_missing_subnet_env_is_told_with_a_remedy(node: Node, command: str) -> None:
    node.subnet_file.unlink()
    error = node.refusal(command, node.conf(cniVersion="1.1.0"))
    assert error["code"] == 11
    assert str(node.subnet_file) in error["msg"]
    assert "flanneld" in error["details"]
    assert not node.data_dir.exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "FLANNEL_NETWORK and FLANNEL_IPV6_NETWORK"),
        ("FLANNEL_NETWORK=10.1.0.0/16\n" + REST, "FLANNEL_SUBNET and FLANNEL_IPV6_SUBNET"),
        (IPV4, "FLANNEL_MTU, FLANNEL_IPMASQ"),
        (IPV4 + REST.replace("1472", "-1"), "FLANNEL_MTU"),
        (IPV4 + REST.replace("1472", "4294967296"), "FLANNEL_MTU"),
        (IPV4 + REST.replace("=1472", ""), "FLANNEL_MTU"),
        (IPV4.replace("/24", "") + REST, "10.1.17.1"),
        (IPV4.replace("/24", "/33") + REST, "10.1.17.1/33"),
        (IPV4.replace("/24", "/255.255.255.0") + REST, "255.255.255.0"),
        (IPV4.replace("/24", "/24,10.1.18.1/24") + REST, "10.1.17.1/24,10.1.18.1/24"),
        (IPV4.replace("/16", "/16,") + REST, "''"),
        (IPV4 + IPV6.replace("::1/", "::1%eth0/") + REST, "fc00::1%eth0/64"),
    ],
)
def test_a_wrong_subnet_env_is_refused_by_name(node: Node, text: str, name: str) -> None:
    node.subnet_file.write_text(text)
    error = node.refusal("ADD")
    assert error["code"] == 6
    assert name in error["msg"]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("ADD", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
        ("CHECK", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
        ("DEL", ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"]),
        ("GC", ["CNI_PATH"]),
        ("STATUS", ["CNI_PATH"]),
    ],
)
def test_missing_cni_variables_are_named(node: Node, command: str, names: list[str]) -> None:
    error = node.refusal(
        command, CNI_CONTAINERID=None, CNI_NETNS="", CNI_IFNAME=None, CNI_PATH="", CNI_ARGS=""
    )
    assert error["code"] == 4
    assert ",".join(names) in error["msg"]


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
@pytest.mark.parametrize(
    "container", ["../evil", ".", "..", ".hidden", "-x", "a/b", "a b", "a\n", "é", "x" * 256]
)
def test_a_container_id_that_is_no_plain_file_name_is_refused(
    node: Node, command: str, container: str
) -> None:
    assert node.refusal(command, CNI_CONTAINERID=container)["code"] == 4
    assert not node.data_dir.exists()


@pytest.mark.parametrize("interface", [".", "..", "a/b", "a:1", "a b", "a\t", "sixteen-letters.", "éééééééé"])
def test_an_interface_name_that_the_kernel_refuses_is_refused(node: Node, interface: str) -> None:
    assert node.refusal("ADD", CNI_IFNAME=interface)["code"] == 4


def test_an_unknown_command_is_refused(node: Node) -> None:
    error = node.refusal("UPDATE")
    assert error["code"] == 4
    assert "UPDATE" in error["msg"]


@pytest.mark.parametrize(
    ("stdin", "code"),
    [
        (b"", 6),
        (b"nonsense", 6),
        (b"[]", 6),
        (b"null", 6),
        (b'{"name": "n", "x": NaN}', 6),
        (b'{"name": "n", "x": 1e999}', 6),
        (b"[" * 100_000, 6),
        (b'{"name":"n","type":' + b"[" * 100_000, 6),
        (b'{"name": 1}', 6),
        (b"{}", 7),
        (b'{"name": "a/b"}', 7),
        (b'{"name": "n", "cniVersion": 1}', 6),
        (b'{"name": "n", "subnetFile": 1}', 6),
        (b'{"name": "n", "subnetFile": "/dev/null/x"}', 5),
        (b'{"name": "n", "subnetFile": "a\\u0000"}', 6),
        (b'{"name": "n", "subnetFile": "\\ud800"}', 6),
    ],
)
def test_a_wrong_configuration_is_refused(node: Node, stdin: bytes, code: int) -> None:
    assert node.refusal("ADD", stdin)["code"] == code


@pytest.mark.parametrize(
    ("conf", "code"),
    [
        ({"delegate": "bridge"}, 6),
        ({"delegate": {"name": "x"}}, 7),
        ({"delegate": {"ipam": {}}}, 7),
        ({"delegate": {"type": 1}}, 7),
        ({"delegate": {"type": None}}, 7),
        ({"delegate": {"type": ""}}, 7),
        ({"delegate": {"type": "../bridge"}}, 7),
        ({"delegate": {"type": "nowhere"}}, 999),
        ({"delegate": {"type": ".."}}, 999),
        ({"ipam": []}, 6),
        ({"ipam": {"routes": {}}}, 7),
        ({"ipam": {"routes": ["10.96.0.0/12"]}}, 7),
        ({"ipam": {"routes": [{"gw": "10.1.17.20"}]}}, 7),
        ({"ipam": {"routes": [{"dst": "10.96.0.0"}]}}, 7),
        ({"runtimeConfig": 1}, 6),
        ({"dataDir": 1}, 6),
        ({"dataDir": "/dev/null"}, 5),
        ({"dataDir": "a\0"}, 5),
    ],
    ids=str,
)
def test_undelegatable_config_is_refused(node: Node, conf: dict[str, Any], code: int) -> None:
    error = node.refusal("ADD", node.conf(**conf))
    assert error["code"] == code
    assert error["cniVersion"] == "1.0.0"
    assert not node.data_dir.exists()


def test_a_delegate_that_cannot_be_started_leaves_no_record(node: Node) -> None:
    (node.plugins / "bridge").chmod(0o644)
    (node.plugins / "ipvlan").write_text("no program")
    for name in ("bridge", "ipvlan"):
        assert node.refusal("ADD", node.conf(delegate={"type": name}))["code"] == 999
        assert list(node.data_dir.iterdir()) == []


@pytest.mark.parametrize("command", ["DEL", "CHECK"])
def test_a_link_in_the_place_of_a_record_is_not_followed(node: Node, command: str) -> None:
    secret = node.directory / "secret"
    secret.write_text('{"type": "bridge"}')
    node.data_dir.mkdir()
    node.record.symlink_to(secret)
    error = node.refusal(command)
    assert error["code"] == 5
    assert str(node.record) in error["msg"]
    assert secret.exists()


def test_add_replaces_a_link_in_the_place_of_its_record(node: Node) -> None:
    other = node.directory / "other"
    other.write_text("as it was")
    node.data_dir.mkdir()
    node.record.symlink_to(other)
    node.call("ADD")
    assert other.read_text() == "as it was"
    assert not node.record.is_symlink()


def test_a_record_that_cannot_be_written_fails_the_add_and_leaves_nothing(node: Node) -> None:
    node.record.mkdir(parents=True)
    assert node.refusal("ADD")["code"] == 5
    assert list(node.data_dir.iterdir()) == [node.record]


def loaded() -> ModuleType:
    """The plug-in as a module, for what needs no process."""
    spec = spec_from_loader("cni_plugin", SourceFileLoader("cni_plugin", str(PLUGIN)))
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plugin = loaded()

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
keys = st.sampled_from(
    [
        "name",
        "cniVersion",
        "delegate",
        "ipam",
        "runtimeConfig",
        "type",
        "routes",
        "subnetFile",
        "dataDir",
        "dst",
    ]
)
confs = st.dictionaries(
    keys, values | st.dictionaries(keys, values | st.dictionaries(keys, values)), max_size=6
)
lines = st.builds(
    "=".join,
    st.tuples(
        st.sampled_from([line.partition("=")[0] for line in (IPV4 + IPV6 + REST).splitlines()]),
        st.sampled_from(["", "true", "10.1.0.0/16", "fc00::/48", "1472", "0/0", ","]) | st.text(max_size=8),
    ),
)


@given(st.binary() | confs.map(lambda conf: json.dumps(conf).encode()), st.lists(lines).map("\n".join))
@example(json.dumps({"name": "n", "cniVersion": "0.3.1"}).encode(), IPV4 + REST)
def test_garbage_is_refused_and_never_a_crash(content: bytes, text: str) -> None:
    try:
        env = plugin.parse_subnet_env(text)
    except ValueError:
        env = plugin.parse_subnet_env(IPV4 + REST)
    with suppress(plugin.Refusal):
        conf = plugin.parse_conf(content)
        plugin.check_version("ADD", plugin.field(conf, "cniVersion", str, "0.1.0"))
        told = json.loads(plugin.encode(plugin.delegate_conf(conf, env)))
        assert told["name"] == conf["name"]


@settings(max_examples=25)
@given(
    st.sampled_from(["ADD", "DEL", "CHECK"]),
    st.binary() | confs.map(lambda conf: json.dumps({"name": "n", **conf}).encode()),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)
def test_the_answer_to_garbage_is_an_error_object(command: str, stdin: bytes, container: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        node = Node(Path(directory))
        # Without a delegate nothing is written, also where a default path is meant.
        done = node.run(command, stdin, CNI_CONTAINERID=container, CNI_PATH=directory)
    assert done.returncode == (0 if not done.stdout else 1)
    # A container whose ADD left no record can be deleted; it is told what is not undone.
    if done.stderr:
        assert (command, done.stdout) == ("DEL", b"")
        assert done.stderr.startswith(b"flannel: nothing is undone")
    if done.stdout:
        assert json.loads(done.stdout)["code"] in {1, 3, 4, 5, 6, 7, 11, 999}
