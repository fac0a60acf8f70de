"""``flannelctl bundle`` beside real daemons whose configuration is full of secrets."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab import Lab, Node
from tests.lab.clouds.cluster import cloud_lab
from tests.lab.lab import NETWORK
from tests.netns import kube
from tests.netns.test_file_store import remote, store_flags
from tests.netns.test_seeing import ctl_command

PSK = "Psk-0123456789abcdef"
KEY = "cHJpdmF0ZSBrZXkgb2YgdGhlIHRlc3QgZm9yIGZsYW4="
PASSWORD = "Correct-horse-battery"
TOKEN = "Bearer-4711-staple"

#: A node, the flags of its daemon, and the secrets that it was given.
Given = tuple[Node, list[str], set[str]]


def with_login_and_keys(lab: Lab) -> Iterator[Given]:
    command = {"SubnetAddCommand": f"true # PSK={PSK}", "SubnetRemoveCommand": "true"}
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "extension", **command}})
    lab.etcd.require_login("flannel", PASSWORD)
    (node,) = lab.add_nodes()
    keys = node.directory / "keys"
    keys.mkdir()
    for name in ("wgkey", "backup.key"):
        (keys / name).write_text(f"{KEY}\n")
        (keys / name).chmod(0o400)
    flags = ["--etcd-username=flannel", f"--etcd-password={PASSWORD}", f"--secret-dir={keys}"]
    node.start(*flags)
    yield node, flags, {PASSWORD, PSK, KEY}


def with_kubernetes(lab: Lab) -> Iterator[Given]:
    config = kube.write_net_conf(lab, {"Type": "vxlan", "PSK": PSK})
    lab.kube.control.put_token(TOKEN)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    kubeconfig = lab.kube.kubeconfig(lab.directory / "kubeconfig", TOKEN)
    flags = ["--kube-subnet-mgr", f"--kubeconfig-file={kubeconfig}", f"--net-config-path={config}"]
    node.start(*flags, environment={"NODE_NAME": node.name})
    yield node, flags, {PSK, TOKEN}


def with_server_and_token(lab: Lab) -> Iterator[Given]:
    server, member = lab.add_nodes(2)
    flags = store_flags(server, {"Type": "vxlan", "PSK": PSK}, "--require-token")
    server.start(*flags)
    server.wait_ready()
    command = ctl_command(server, "token", "create", f"--store={server.directory / 'leases.db'}")
    token = server.run(*command).stdout.strip()
    joining = [remote(server), f"--token={token}", f"--state-dir={member.directory}"]
    member.start(*joining)
    yield member, joining, {token, PSK}
    yield server, flags, {token, PSK}


def with_cloud(lab: Lab) -> Iterator[Given]:
    with cloud_lab(lab, "tencent-vpc") as cloud:
        (node,) = cloud.nodes(1)
        name, secret = cloud.ask("key")
        config = json.loads((lab.etcd.get("config") or {})["value"])
        config["Backend"] |= {"AccessKeyID": name, "AccessKeySecret": secret}
        lab.etcd.put_config(config)
        node.start()
        yield node, [], {secret}


def files_of(node: Node, flags: list[str], name: str) -> dict[str, str]:
    """Make a bundle and return its files."""
    path = node.directory / f"{name}.tar.gz"
    node.run(*ctl_command(node, "bundle", str(path)), *flags, check=False)
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in found.items() if file}


@pytest.mark.parametrize("given", [with_login_and_keys, with_kubernetes, with_server_and_token, with_cloud])
def test_bundle_and_log_have_no_secret_of_the_configuration(
    given: Callable[[Lab], Iterator[Given]], lab: Lab
) -> None:
    for node, flags, secrets in given(lab):
        node.wait_ready(60)
        node.wait_for_log("In sync with")
        files = files_of(node, flags, "running")
        status: dict[str, Any] = json.loads(files["running/status.json"])
        assert status["origin"] == "daemon", status
        # The journal of the unit would hold the log.
        files["log"] = node.logs()
        node.stop()
        files |= files_of(node, flags, "stopped")
        files["log of the end"] = node.logs()
        for secret in secrets:
            assert [name for name, text in files.items() if secret in text] == []
