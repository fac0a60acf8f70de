"""dist/cni/flannel: what it delegates, and what it remembers."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cni_node import ANSWER, IPV4, IPV6, PLUGIN, REST, ROOT, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def delegated(**changes: Any) -> dict[str, Any]:
    """What bridge gets for a configuration that says nothing and ``IPV4 + REST``, but for these keys."""
    usual = {
        "cniVersion": "1.0.0",
        "name": "cbr0",
        "type": "bridge",
        "ipMasq": False,
        "mtu": 1472,
        "isGateway": True,
        "ipam": ipam(),
    }
    return {key: value for key, value in {**usual, **changes}.items() if value is not ...}


def ipam(
    subnets: tuple[str, ...] = ("10.1.17.0/24",), networks: tuple[str, ...] = ("10.1.0.0/16",), **more: Any
) -> dict[str, Any]:
    ranges = [[{"subnet": subnet}] for subnet in subnets]
    return {"type": "host-local", "ranges": ranges, "routes": [{"dst": dst} for dst in networks], **more}


SERVICES = {"dst": "10.96.0.0/12"}
VIA = {"dst": "192.168.244.0/24", "gw": "10.1.17.20"}
OWN = {"dst": "10.1.0.0/16"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(IPV4 + REST, delegated(), id="IPv4"),
        pytest.param(IPV6 + REST, delegated(ipam=ipam(("fc00::/64",), ("fc00::/48",))), id="IPv6"),
        pytest.param(
            IPV4 + IPV6 + REST,
            delegated(ipam=ipam(("10.1.17.0/24", "fc00::/64"), ("10.1.0.0/16", "fc00::/48"))),
            id="both",
        ),
        pytest.param(
            IPV6 + REST + IPV4,
            delegated(ipam=ipam(("10.1.17.0/24", "fc00::/64"), ("10.1.0.0/16", "fc00::/48"))),
            id="IPv4-comes-first",
        ),
        pytest.param(
            IPV4.replace("/16", "/16,192.168.0.0/16,10.1.0.0/16") + REST,
            delegated(ipam=ipam(networks=("10.1.0.0/16", "192.168.0.0/16"))),
            id="several-networks",
        ),
        pytest.param(f"\n# by hand\r\n{IPV4}OTHER=x\n{REST}", delegated(), id="other-lines"),
        pytest.param(IPV4 + REST.replace("true", "false"), delegated(ipMasq=True), id="no-ip-masq"),
    ],
)
def test_subnet_env_says_what_is_delegated(node: Node, text: str, expected: dict[str, Any]) -> None:
    node.subnet_file.write_text(text)
    node.call("ADD")
    assert node.told() == expected


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"cniVersion": "0.3.1"}, delegated(cniVersion="0.3.1")),
        ({"cniVersion": ""}, delegated(cniVersion=...)),
        ({"delegate": None}, delegated()),
        ({"delegate": {"hairpinMode": True}}, delegated(hairpinMode=True)),
        ({"delegate": {"isDefaultGateway": True}}, delegated(isDefaultGateway=True)),
        ({"delegate": {"isGateway": False}}, delegated(isGateway=False)),
        ({"delegate": {"bridge": "mynet0", "mtu": 1400}}, delegated(bridge="mynet0", mtu=1400)),
        ({"delegate": {"ipMasq": True}}, delegated(ipMasq=True)),
        ({"delegate": {"mtu": None, "big": 1 << 70}}, delegated(mtu=None, big=1 << 70)),
        ({"delegate": {"mtu": 1400.0, "half": 0.5}}, delegated(mtu=1400, half=0.5)),
        ({"runtimeConfig": {"portMappings": [1]}}, delegated(runtimeConfig={"portMappings": [1]})),
        ({"delegate": {"runtimeConfig": 1}, "runtimeConfig": {}}, delegated(runtimeConfig={})),
        ({"ipam": {"type": "my-ipam", "x": 1}}, delegated(ipam=ipam(type="my-ipam", x=1))),
        ({"ipam": {"ranges": [], "dataDir": "/x"}}, delegated(ipam=ipam(dataDir="/x"))),
        ({"ipam": {"routes": [SERVICES, VIA]}}, delegated(ipam=ipam(routes=[SERVICES, VIA, OWN]))),
        ({"ipam": {"routes": None}}, delegated()),
        ({"prevResult": {"ips": []}, "dns": {}, "capabilities": {"portMappings": True}}, delegated()),
        ({"Delegate": {"mtu": 1400}, "IPAM": {"x": 1}}, delegated(mtu=1400, ipam=ipam(x=1))),
    ],
    ids=str,
)
def test_the_configuration_adds_to_it(node: Node, conf: dict[str, Any], expected: dict[str, Any]) -> None:
    node.call("ADD", **conf)
    assert json.dumps(node.told(), sort_keys=True) == json.dumps(expected, sort_keys=True)  # 1400, not 1400.0


def test_another_delegate_is_no_gateway_unless_told(node: Node) -> None:
    node.call("ADD", delegate={"type": "ipvlan", "master": "eth0"})
    assert node.told("ipvlan") == delegated(type="ipvlan", master="eth0", isGateway=...)
    assert node.commands("bridge") == []


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_the_delegates_answer_is_passed_on_byte_by_byte(node: Node, command: str) -> None:
    node.call("ADD")
    done = node.call(command)
    assert (done.stdout, done.stderr) == (ANSWER, b"noise\n")


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_the_delegates_error_is_passed_on_with_its_status(node: Node, command: str) -> None:
    node.call("ADD")
    node.let_answer(b'{"code": 101,  "msg": "no"}', "exit 3")
    done = node.run(command, node.conf())
    assert (done.returncode, done.stdout) == (3, b'{"code": 101,  "msg": "no"}')


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_the_delegate_gets_the_whole_environment(node: Node, command: str) -> None:
    node.call("ADD")
    node.run(command, node.conf(), CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAME=a", EXTRA="value")
    got = node.environment()
    assert (got["CNI_COMMAND"], got["CNI_CONTAINERID"]) == (command, "some-container")
    assert (got["CNI_NETNS"], got["CNI_IFNAME"]) == ("/run/netns/some", "eth0")
    assert (got["CNI_ARGS"], got["EXTRA"]) == ("IgnoreUnknown=1;K8S_POD_NAME=a", "value")


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_a_broken_pipe_ends_the_delegate_as_usual(node: Node, command: str) -> None:
    """Python ignores SIGPIPE, and what it starts would inherit that."""
    node.call("ADD")
    node.let_answer(ANSWER, 'kill -PIPE $$\necho alive >"$0.alive"')
    node.run(command, node.conf())
    assert not (node.plugins / "bridge.alive").exists()


def test_the_record_is_what_the_delegate_got_and_nobody_else_may_read_it(node: Node) -> None:
    node.call("ADD")
    assert node.record.read_bytes() == (node.plugins / "bridge.stdin").read_bytes()
    assert stat.S_IMODE(node.record.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.data_dir.stat().st_mode) == 0o700
    assert list(node.data_dir.iterdir()) == [node.record]


def test_del_undoes_what_add_did_whatever_has_changed_since(node: Node) -> None:
    node.call("ADD", delegate={"mtu": 1400})
    added = node.told()
    node.subnet_file.unlink()
    node.call("DEL", delegate={"type": "ipvlan"})
    assert node.commands() == ["ADD", "DEL"]
    assert node.told() == added
    assert list(node.data_dir.iterdir()) == []


def test_del_undoes_what_gos_plugin_did(node: Node) -> None:
    node.data_dir.mkdir()
    record = b'{"cniVersion":"1.0.0","name":"cbr0","type":"bridge","x":"<\xc3\xa9>"}\n'
    node.record.write_bytes(record)
    node.call("DEL")
    assert (node.plugins / "bridge.stdin").read_bytes() == record
    assert not node.record.exists()


def test_an_add_that_failed_can_be_undone(node: Node) -> None:
    node.let_answer(b'{"code": 101, "msg": "half done"}', "exit 1")
    assert node.run("ADD", node.conf()).returncode == 1
    node.let_answer(b"")
    node.call("DEL")
    assert node.commands() == ["ADD", "DEL"]


def test_del_without_a_record_asks_the_present_delegate(node: Node) -> None:
    """flanneld's own configuration has the runtime call the delegate itself."""
    node.call("DEL", delegate={"mtu": 1400})
    assert node.commands() == ["DEL"]
    assert node.told()["mtu"] == 1400
    assert not node.data_dir.exists()


@pytest.mark.parametrize("missing", ["subnet.env", "bin/bridge"])
def test_del_without_record_and_delegate_succeeds(node: Node, missing: str) -> None:
    (node.directory / missing).unlink()
    for _ in range(2):
        done = node.call("DEL")
        assert done.stdout == b""
        assert b"nothing is undone for some-container" in done.stderr


def test_del_needs_no_network_namespace(node: Node) -> None:
    node.call("ADD")
    assert node.run("DEL", node.conf(), CNI_NETNS=None).returncode == 0
    assert not node.record.exists()


def test_a_del_that_failed_can_be_tried_again(node: Node) -> None:
    node.call("ADD")
    node.let_answer(b"", "exit 1")
    assert node.run("DEL", node.conf()).returncode == 1
    assert node.record.exists()
    node.let_answer(b"")
    node.call("DEL")
    assert node.commands() == ["ADD", "DEL", "DEL"]


def test_a_delegate_that_is_killed_on_del_is_a_failure(node: Node) -> None:
    node.call("ADD")
    node.let_answer(b"", "kill -KILL $$")
    done = node.run("DEL", node.conf())
    assert done.returncode == 1
    assert f"signal {signal.SIGKILL}" in json.loads(done.stdout)["msg"]
    assert node.record.exists()


@pytest.mark.parametrize("content", [b"", b'{"type": "bri', b"[]", b"\xff\x00"])
def test_a_record_that_is_no_json_does_not_keep_a_pod_from_ending(node: Node, content: bytes) -> None:
    node.data_dir.mkdir()
    node.record.write_bytes(content)
    done = node.call("DEL")
    assert b"some-container" in done.stderr
    assert b"Traceback" not in done.stderr
    assert node.record.read_bytes() == content


def test_a_record_that_is_a_pipe_is_not_waited_for(node: Node) -> None:
    node.data_dir.mkdir()
    os.mkfifo(node.record)
    node.call("DEL")
    assert node.commands() == []


def test_bytes_that_are_no_text_are_passed_over_as_in_go(node: Node) -> None:
    assert node.run("ADD", node.conf(note="?").replace(b"?", b"\xff")).returncode == 0
    assert node.told() == delegated()


def test_the_documentation_shows_what_is_delegated(node: Node) -> None:
    page = (ROOT / "docs/containers.md").read_text()
    running = (ROOT / "docs/running.md").read_text()
    subnet_env = re.findall(r"^    (FLANNEL_.*\n)", running, re.MULTILINE)
    conflist = re.search(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"`bridge` gets\n\n(.*?)\n\n", page, re.DOTALL)
    assert conflist
    assert shown
    plugin = json.loads(conflist[1])["plugins"][0]
    node.subnet_file.write_text("".join(subnet_env))
    node.call("ADD", cniVersion=json.loads(conflist[1])["cniVersion"], **plugin)
    assert node.told() == json.loads(shown[1])


def test_check_passes_the_previous_result_on(node: Node) -> None:
    node.call("ADD", delegate={"mtu": 1400})
    done = node.call("CHECK", prevResult={"ips": [1]})
    assert node.told() == delegated(mtu=1400, prevResult={"ips": [1]})
    assert done.stdout == ANSWER


def test_check_is_in_the_version_of_the_configuration_also_for_containers_of_an_older_one(node: Node) -> None:
    """The runtime has put the previous result into that form; an older version knows no CHECK."""
    node.call("ADD", cniVersion="0.3.1")
    node.call("CHECK", prevResult={"ips": []})
    assert node.told() == delegated(prevResult={"ips": []})


def test_check_tells_the_gateways_that_routes_got_on_add(node: Node) -> None:
    """``bridge`` gives a route without a gateway that of the address, and would look for one without."""
    node.call("ADD")
    addresses = [
        {"address": "10.1.17.2/24"},
        {"address": "10.1.17.3/24", "gateway": "10.1.17.1"},
        {"address": "fc00::2/64", "gateway": "fc00::1"},
        {"address": "fc00::3/64", "gateway": "fc00::9"},
    ]
    node.call("CHECK", prevResult={"ips": addresses, "routes": [OWN, VIA, {"dst": "::/0"}], "dns": {}})
    assert node.told()["prevResult"] == {
        "ips": addresses,
        "routes": [{**OWN, "gw": "10.1.17.1"}, VIA, {"dst": "::/0", "gw": "fc00::1"}],
        "dns": {},
    }


@pytest.mark.parametrize(
    "result", [{"ips": {}, "routes": [OWN]}, {"ips": [], "routes": "x"}, {"routes": [1]}]
)
def test_check_leaves_a_result_that_it_does_not_understand_to_the_delegate(
    node: Node, result: dict[str, Any]
) -> None:
    node.call("ADD")
    node.call("CHECK", prevResult=result)
    assert node.told()["prevResult"] == result


def test_check_of_a_container_that_was_not_added_fails(node: Node) -> None:
    assert node.refusal("CHECK")["code"] == 3


@pytest.mark.parametrize(
    ("command", "version"), [("CHECK", "0.3.1"), ("CHECK", ""), ("GC", "1.0.0"), ("STATUS", "1.0.0")]
)
def test_a_command_that_a_version_does_not_know_is_refused(node: Node, command: str, version: str) -> None:
    error = node.refusal(command, node.conf(cniVersion=version))
    assert error["code"] == 1
    assert command in error["msg"]


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
def test_a_version_of_the_future_is_refused(node: Node, command: str) -> None:
    error = node.refusal(command, node.conf(cniVersion="9.9.9"))
    assert (error["code"], error["cniVersion"]) == (1, "9.9.9")


def test_version_says_which_versions_are_supported(node: Node) -> None:
    done = node.run("VERSION", b"", CNI_CONTAINERID=None, CNI_NETNS=None, CNI_IFNAME=None, CNI_PATH=None)
    assert (done.returncode, json.loads(done.stdout)) == (
        0,
        {
            "cniVersion": "1.1.0",
            "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
        },
    )


def test_gc_is_passed_on_with_the_attachments_that_are_valid(node: Node) -> None:
    attachments = {"cni.dev/valid-attachments": [{"containerID": "a", "ifname": "eth0"}]}
    node.call("GC", cniVersion="1.1.0", **attachments)
    assert node.commands() == ["GC"]
    assert node.told() == delegated(cniVersion="1.1.0", **attachments)


def test_status_is_the_delegates(node: Node) -> None:
    done = node.call("STATUS", cniVersion="1.1.0")
    assert (node.commands(), done.stdout) == (["STATUS"], ANSWER)


@pytest.mark.parametrize("path", ["subnet.env", "bin/bridge"])
def test_status_says_that_no_pod_can_be_added(node: Node, path: str) -> None:
    (node.directory / path).unlink()
    error = node.refusal("STATUS", node.conf(cniVersion="1.1.0"))
    assert error["code"] == 50
    assert path.rpartition("/")[2] in error["msg"]


def test_without_a_command_it_says_what_it_is(node: Node) -> None:
    done = node.run("", b"")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"1.1.0" in done.stderr


def test_slow_modules_are_not_imported() -> None:
    done = subprocess.run(
        ["/usr/bin/python3", "-IS", "-X", "importtime", PLUGIN],
        env={"CNI_COMMAND": "VERSION"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"json", "ipaddress"} <= imported
    slow = {
        "site",
        "dataclasses",
        "inspect",
        "pathlib",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "typing",
    }
    assert imported & slow == set()


def test_the_pythons_of_older_hosts_can_read_it() -> None:
    ast.parse(PLUGIN.read_text(), feature_version=(3, 9))
