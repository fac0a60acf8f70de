"""What nobody may read: passwords and tokens, in what the daemon says and where it writes."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from flanneld.diagnostics.describe import describe
from flanneld.diagnostics.serving import StatusSocket
from flanneld.diagnostics.status import encoded, known
from flanneld.errors import Retryable, printable
from flanneld.options import read
from flanneld.reconcile.counters import counted
from flanneld.subnet.kube.node_table import NodeCache
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.store import NodeStore
from tests.lab.credentials import write_kubeconfig
from tests.unit.diagnostics.stores import idle_node

SECRET = "s3cr3t-0123456789"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_neither_a_token_nor_a_password_of_the_api_server_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://me:{SECRET}@127.0.0.1:{free_port()}"
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1", SECRET, None)
    (tmp_path / "net-conf.json").write_text('{"Network": "10.5.0.0/16"}')
    words = ["-kube-subnet-mgr", f"-kube-api-url={url}", f"-kubeconfig-file={tmp_path / 'config'}"]
    options = read(words, {})
    kube_options = KubeOptions(
        url, str(tmp_path / "config"), "flannel.alpha.coreos.com", str(tmp_path / "net-conf.json"), ""
    )
    manager = counted(KubeStore(kube_options, {"NODE_NAME": "n1"}))
    assert isinstance(manager, NodeStore)
    node = idle_node(options, manager)
    with caplog.at_level(logging.DEBUG), pytest.raises(Retryable) as failure:
        manager.public_ips()
    manager.close()
    told = [str(failure.value), caplog.text, options.described(), encoded(describe(node)).decode()]
    assert [each for each in told if SECRET in each] == []
    assert all(told[:1] + told[2:])


def test_a_password_of_etcd_is_in_no_status() -> None:
    words = [
        "-etcd-username=me",
        f"-etcd-password={SECRET}",
        f"-etcd-endpoints=http://me:{SECRET}@192.0.2.1:2379",
    ]
    node = idle_node(read(words, {}))
    told = describe(node)
    assert "etcd-password=***" in (known(told.flags) or "")
    assert SECRET not in encoded(told).decode()


def test_the_status_socket_is_never_open_to_others_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        server = StatusSocket.open(path, list)
        assert server
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    server.close()


def test_a_fifo_in_the_place_of_the_saved_nodes_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = NodeCache(str(tmp_path))
    os.mkfifo(state.path)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(state.load()), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [None]
    assert "not a regular file" in caplog.text


def test_what_a_plan_says_of_others_cannot_become_a_command() -> None:
    name = "peer of a plug-in\nrm -rf /\r\x1b[2J"
    assert printable(f"# new: {name}") == "# new: peer of a plug-in\\nrm -rf /\\r\\x1b[2J"
    assert printable(f"# new: {IPv4Network('10.5.2.0/24')}") == "# new: 10.5.2.0/24"
