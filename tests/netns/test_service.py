"""flanneld.service under a real systemd, with a docker.service after it."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, Node
from tests.lab.lab import NETWORK
from tests.lab.namespace import suspend
from tests.netns.booted import BootedNode


@pytest.fixture
def booted(lab: Lab) -> Iterator[BootedNode]:
    """A node with systemd on which nothing is started yet."""
    (node,) = lab.add_nodes(1)
    with BootedNode(node, lab.etcd.endpoint) as booted:
        yield booted


@pytest.fixture
def peer(lab: Lab) -> Node:
    """A node whose daemon runs, in a network with the vxlan backend."""
    (peer,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    return peer


def process_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def wait_for_restart(booted: BootedNode) -> None:
    def restarted() -> bool:
        return (
            booted.show("flanneld", "NRestarts") != "0"
            and booted.systemctl("is-active", "flanneld", check=False) == "active"
        )

    booted.wait_for(restarted, "systemd to start flanneld again")


def test_the_service_joins_the_network(booted: BootedNode, peer: Node) -> None:
    booted.systemctl("start", "flanneld")
    assert booted.node.env()["FLANNEL_NETWORK"] == NETWORK
    booted.node.container().wait_for_reply(peer.container())
    booted.wait_for(lambda: "Answering queries of other nodes" in booted.log(), "the package's default port")
    assert not [line for line in booted.log().splitlines() if line[0] != "I"]


@pytest.mark.usefixtures("peer")
def test_the_service_has_no_more_rights_than_it_needs(booted: BootedNode) -> None:
    booted.systemctl("start", "flanneld")
    found = process_status(booted.pid("flanneld"))
    assert "0" not in found["Uid"].split()
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    # linux/capability.h: CAP_NET_ADMIN is 12, CAP_NET_RAW is 13
    assert {found[kind] for kind in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {f"{0b11 << 12:016x}"}


@pytest.mark.usefixtures("peer")
def test_the_service_may_take_the_lock_of_iptables(booted: BootedNode) -> None:
    booted.systemctl("start", "flanneld")
    lock = booted.path("run/xtables.lock").stat()
    assert lock.st_gid == int(process_status(booted.pid("flanneld"))["Gid"].split()[0])
    assert stat.filemode(lock.st_mode) == "-rw-r-----"


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_the_sandbox_lets_the_service_masquerade(booted: BootedNode, flavour: str) -> None:
    with booted.path("etc/default/flanneld").open("a") as variables:
        variables.write(f"FLANNELD_IP_MASQ=true\nFLANNELD_IPTABLES_FLAVOUR={flavour}\n")
    booted.systemctl("start", "flanneld")
    rules = booted.run(f"iptables-{flavour}", "-w", "-t", "nat", "-S", "FLANNEL-POSTRTG")
    assert f"-s {NETWORK} ! -d 224.0.0.0/4" in rules


def test_the_sandbox_lets_the_service_masquerade_through_nftables(lab: Lab, booted: BootedNode) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}, "EnableNFTables": True})
    with booted.path("etc/default/flanneld").open("a") as variables:
        variables.write("FLANNELD_IP_MASQ=true\n")
    booted.systemctl("start", "flanneld")
    assert "224.0.0.0/4" in booted.run("nft", "list", "chain", "ip", "flannel-ipv4", "postrtg")


def test_the_sandbox_lets_the_service_heal_its_device(booted: BootedNode, peer: Node) -> None:
    booted.systemctl("start", "flanneld")
    booted.node.container().wait_for_reply(peer.container())
    booted.node.namespace.ip("link del flannel.1")
    booted.node.container().wait_for_reply(peer.container())


@pytest.mark.usefixtures("peer")
def test_docker_gets_the_subnet_that_flannel_has_leased(booted: BootedNode) -> None:
    booted.systemctl("start", "docker")
    subnet = booted.node.env()["FLANNEL_SUBNET"]
    booted.wait_for(booted.path("run/dockerd").exists, "docker to start")
    assert booted.path("run/dockerd").read_text().split() == [
        f"--bip={subnet}",
        "--ip-masq=true",
        "--mtu=1450",
    ]


def test_docker_waits_as_long_as_flannel_waits_for_etcd(lab: Lab, booted: BootedNode) -> None:
    lab.etcd.stop()
    booted.systemctl("start", "--no-block", "docker")
    booted.wait_for(lambda: "Couldn't fetch network config" in booted.log(), "flanneld to wait")
    assert booted.systemctl("is-active", "docker", "flanneld", check=False).split() == [
        "inactive",
        "activating",
    ]
    reason = "waiting for the network config"
    booted.wait_for(lambda: reason in booted.show("flanneld", "StatusText"), "systemd to know the reason")
    lab.etcd.start()
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    booted.wait_for(booted.path("run/dockerd").exists, "docker to start")


@pytest.mark.usefixtures("peer")
def test_docker_does_not_start_with_a_subnet_of_its_own(booted: BootedNode) -> None:
    booted.path("etc/default/flanneld").write_text("FLANNELD_ETCD_ENDPOINTS=nonsense\n")
    booted.systemctl("start", "docker", check=False)
    booted.wait_for(lambda: int(booted.show("docker", "NRestarts")) > 5, "docker to be tried again")
    assert not booted.path("run/dockerd").exists()


@pytest.mark.usefixtures("peer")
def test_the_subnet_file_outlives_the_service(booted: BootedNode) -> None:
    booted.systemctl("start", "flanneld")
    before = booted.node.env()
    booted.systemctl("stop", "flanneld")
    assert booted.node.env() == before != {}


def test_the_subnet_of_a_daemon_that_ran_as_root_is_kept(booted: BootedNode, peer: Node) -> None:
    directory = booted.path("run/flannel")
    kept = next(
        net for net in ("10.5.177.1/24", "10.5.178.1/24") if peer.subnet() != net.replace(".1/", ".0/")
    )
    (directory / "subnet.env").write_text(f"FLANNEL_SUBNET={kept}\n")
    (directory / "subnet.env").chmod(0o600)
    os.chown(directory, 0, 0)
    booted.systemctl("start", "flanneld")
    assert booted.node.env()["FLANNEL_SUBNET"] == kept


def test_a_revoked_lease_leads_to_a_new_one(lab: Lab, booted: BootedNode, peer: Node) -> None:
    booted.systemctl("start", "flanneld")
    lab.etcd.delete_lease(booted.node.subnet())
    wait_for_restart(booted)
    assert booted.node.subnet() in lab.etcd.leases()
    booted.node.container().wait_for_reply(peer.container())


@pytest.mark.usefixtures("peer")
def test_a_killed_daemon_is_started_again(booted: BootedNode) -> None:
    booted.systemctl("start", "flanneld")
    before = booted.node.env()
    os.kill(booted.pid("flanneld"), signal.SIGKILL)
    wait_for_restart(booted)
    assert booted.node.env() == before


@pytest.mark.usefixtures("peer")
def test_a_daemon_that_hangs_is_replaced(booted: BootedNode) -> None:
    booted.set_watchdog("flanneld", 5)
    booted.systemctl("start", "flanneld")
    hanging = booted.pid("flanneld")
    suspend(hanging)
    wait_for_restart(booted)
    assert booted.pid("flanneld") != hanging


def test_a_wrong_flag_is_not_tried_again(booted: BootedNode) -> None:
    booted.path("etc/default/flanneld").write_text("FLANNELD_V=loud\n")
    booted.systemctl("start", "flanneld", check=False)
    booted.wait_for(
        lambda: booted.systemctl("is-active", "flanneld", check=False) == "failed", "the service to fail"
    )
    assert booted.show("flanneld", "ExecMainStatus") == "2"
    assert booted.show("flanneld", "NRestarts") == "0"


def maintain(booted: BootedNode, script: str, *words: str) -> None:
    """Run a script of the Debian package, as dpkg does."""
    booted.path("usr/lib/flanneld").mkdir(exist_ok=True)
    booted.run("sh", f"/mnt/source/dist/debian/{script}", *words)


def test_upgrade_of_package_restarts_the_service_without_loss_and_starts_none(
    booted: BootedNode, peer: Node
) -> None:
    maintain(booted, "postinst", "configure", "1")
    assert booted.systemctl("is-active", "flanneld", check=False) == "inactive"

    booted.systemctl("start", "flanneld")
    old, container = booted.pid("flanneld"), booted.node.container()
    container.wait_for_reply(peer.container())
    with container.ping(peer.container()) as ping:
        ping.wait_for_replies()
        maintain(booted, "prerm", "upgrade", "2")
        assert booted.pid("flanneld") == old
        maintain(booted, "postinst", "configure", "1")
        assert booted.pid("flanneld") != old
        ping.wait_for_replies()
        assert ping.lost() == 0


@pytest.mark.usefixtures("peer")
def test_removal_of_package_stops_the_service_and_purge_leaves_only_the_user(booted: BootedNode) -> None:
    booted.systemctl("enable", "--now", "flanneld")
    assert booted.node.link("flannel.1")
    maintain(booted, "prerm", "remove")
    assert booted.systemctl("is-active", "flanneld", check=False) == "inactive"
    assert booted.systemctl("is-enabled", "flanneld", check=False) == "disabled"
    assert booted.node.link("flannel.1") is None
    maintain(booted, "postrm", "purge")
    assert not booted.path("run/flannel").exists()
    assert not booted.path("var/lib/flannel").exists()
    assert booted.run("getent", "passwd", "flannel")


PUMP = "flanneld.backends.udp.proxy"


def test_a_restart_of_the_service_leaves_the_packet_pump_alone(lab: Lab, booted: BootedNode) -> None:
    (peer,) = lab.cluster({"Type": "udp"}, nodes=1)
    booted.systemctl("start", "flanneld")
    container = booted.node.container()
    container.wait_for_reply(peer.container())
    (pump,) = booted.processes(PUMP)
    with container.ping(peer.container()) as ping:
        ping.wait_for_replies()
        booted.systemctl("restart", "flanneld")
        os.kill(booted.pid("flanneld"), signal.SIGKILL)
        wait_for_restart(booted)
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert booted.processes(PUMP) == [pump]


def test_cleanup_ends_the_udp_proxy_that_the_service_left(lab: Lab, booted: BootedNode) -> None:
    lab.cluster({"Type": "udp"}, nodes=1)
    booted.systemctl("start", "flanneld")
    (pump,) = booted.processes(PUMP)
    booted.systemctl("stop", "flanneld")
    assert booted.processes(PUMP) == [pump]
    assert "removed udp proxy of flannel0" in booted.run("flanneld", "--cleanup")
    booted.wait_for(lambda: not booted.processes(PUMP), "the pump to end")
    assert booted.node.link("flannel0") is None
