"""Clusters without etcd: one node keeps the leases in a file and serves them to the others."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.lab.namespace import run
from tests.netns.test_remote import PORT, backends, connect


def store_flags(node: Node, kind: dict[str, Any], *more: str) -> list[str]:
    """Flags of the node that keeps the leases."""
    config = json.dumps({"Network": NETWORK, "Backend": kind})
    return [f"--listen={node.address}:{PORT}", f"--store={_file(node)}", f"--network={config}", *more]


def remote(node: Node) -> str:
    return f"--remote={node.address}:{PORT}"


def fleet(lab: Lab, kind: dict[str, Any], nodes: int, *more: str) -> list[Node]:
    """Start a node that serves its file, and others that know nothing but its address."""
    first, *others = started = lab.add_nodes(nodes)
    first.start(*store_flags(first, kind), *more)
    for node in others:
        node.start(remote(first))
    for node in started:
        node.wait_ready()
    return started


@backends
def test_fleet_keeps_its_packets_while_the_node_with_the_file_is_killed(kind: dict[str, Any]) -> None:
    with Lab() as lab:
        first, *others = fleet(lab, kind, 3)
        connect([first, *others])
        with (
            others[0].container().ping(others[1].container()) as ping,
            first.container().ping(others[0].container()) as own,
        ):
            ping.wait_for_replies()
            first.kill()
            others[0].wait_for_log("no flannel server answers")
            first.start(*store_flags(first, kind))
            first.wait_ready()
            late = lab.add_nodes(1)[0]
            late.start(remote(first))
            late.wait_ready()
            connect([late, first, others[0]])
            for each in (ping, own):
                each.wait_for_replies()
                assert each.lost() == 0
        assert all("another node" not in node.log() for node in (first, late, *others))
        assert first.daemon.end(signal.SIGTERM, 10).status == 0


def test_fleet_goes_on_with_a_restored_backup() -> None:
    with Lab() as lab:
        first, other = fleet(lab, {"Type": "host-gw"}, 2, "--healthz-port=10300")
        connect([first, other])
        metrics = first.run("curl", "-sf", "http://127.0.0.1:10300/metrics").stdout
        assert 'flannel_server_requests_total{method="POST",status="200"} 1' in metrics
        assert "flannel_peers" in metrics
        backup = first.directory / "backup.db"
        ctl = [str(Path(own_command()[0]).with_name("flannelctl"))]
        first.run(*ctl, "store", "backup", str(backup), f"-store={_file(first)}")
        subnets = [first.subnet(), other.subnet()]
        late = lab.add_nodes(1)[0]
        late.start(remote(first))
        late.wait_ready()
        with first.container().ping(other.container()) as ping:
            ping.wait_for_replies()
            first.kill()
            for name in _file(first).parent.glob(f"{_file(first).name}*"):
                name.unlink()
            first.run(*ctl, "store", "restore", str(backup), f"-store={_file(first)}")
            first.start(*store_flags(first, {"Type": "host-gw"}))
            first.wait_ready()
            # A node whose lease the backup does not know ends, and gets another when it is started again.
            late.wait_for_log("Lease has been revoked. Shutting down daemon.")
            ping.wait_for_replies()
            assert ping.lost() == 0
        assert [first.subnet(), other.subnet()] == subnets


def test_damaged_file_ends_the_daemon_and_is_left_as_it_is() -> None:
    with Lab() as lab:
        node = lab.add_nodes(1)[0]
        _file(node).write_bytes(b"SQLite format 3\0" + os.urandom(5000))
        content = _file(node).read_bytes()
        assert node.start(*store_flags(node, {"Type": "vxlan"})).wait(20).status == 1
        assert "flannelctl store restore" in node.log()
        assert _file(node).read_bytes() == content


def _file(node: Node) -> Path:
    return node.directory / "leases.db"


def test_fleet_with_tokens_lets_nobody_else_in() -> None:
    with Lab() as lab:
        first, good, stranger = lab.add_nodes(3)
        first.start(*store_flags(first, {"Type": "host-gw"}, "--require-token"))
        first.wait_ready()
        token = first.directory / "token"
        ctl = str(Path(own_command()[0]).with_name("flannelctl"))
        token.touch(0o600)
        token.write_text(first.run(ctl, "token", "create", f"-store={_file(first)}").stdout)
        stranger.start(remote(first))
        good.start(remote(first), f"--token-file={token}", f"--state-dir={good.directory}")
        good.wait_ready()
        connect([first, good])
        stranger.wait_for_log("no flannel server answers")
        assert not stranger.subnet_file.exists()
        assert token.read_text().strip() not in f"{first.log()}{good.log()}"
        # Expired: a node with a lease starts again, and another one gets none.
        late = first.run(ctl, "token", "create", "--lasts=1s", f"-store={_file(first)}").stdout
        token.write_text(late)
        wait_for(lambda: "expired" in first.run(ctl, "token", "list", f"-store={_file(first)}").stdout)
        stranger.stop()
        stranger.start(remote(first), f"--token-file={token}", f"--state-dir={stranger.directory}")
        stranger.wait_for_log(f"the token has ended, and node {stranger.address} has no lease here")
        subnet = good.subnet()
        good.kill()
        good.start(remote(first), f"--token-file={token}", f"--state-dir={good.directory}")
        good.wait_ready()
        assert good.subnet() == subnet
        first.run(ctl, "token", "revoke", late.split("-")[1], f"-store={_file(first)}")
        good.kill()
        good.start(remote(first), f"--token-file={token}", f"--state-dir={good.directory}")
        good.wait_for_log("was revoked; make another: flannelctl token create")


#: Write a value of some bytes into a store, which is made if need be.
WRITE = """
import sys
from pathlib import Path
from flanneld.errors import FlannelError
from flanneld.subnet.embedded.database import Database
try:
    with Database(Path(sys.argv[1]), create=True).writing() as connection:
        connection.execute("INSERT OR REPLACE INTO facts VALUES ('test', ?)", ("x" * int(sys.argv[2]),))
except FlannelError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("harm", "size", "complaint"),
    [
        ("mount -o remount,ro $disk", 1, "Read-only file system; see its owner, mode and file system"),
        ("true", 1 << 20, "is full; free space"),
    ],
    ids=["read-only", "full"],
)
def test_disk_that_takes_no_write_is_named_and_the_store_stays(
    tmp_path: Path, harm: str, size: int, complaint: str
) -> None:
    script = f"""
        disk=$1 python=$2 program=$3
        mount -t tmpfs -o size=256k tmpfs $disk
        write() {{ "$python" -c "$program" $disk/leases.db $1; }}
        write 10
        {harm}
        if write {size}; then exit 9; fi
        mount -o remount,rw $disk
        write 20
    """
    done = run("unshare", "--mount", "sh", "-ec", script, "sh", str(tmp_path), sys.executable, WRITE)
    assert complaint in done.stderr
