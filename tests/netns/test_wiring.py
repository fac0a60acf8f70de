"""Orders that the wiring of the daemon keeps, and that show only when something comes in between.

What an operator could see is looked at as such. Where only the order shows, the effects of a daemon are
recorded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from flanneld.subnet.lease_keeper import PROBATION
from tests.lab import Lab, wait_for
from tests.lab.daemon import ROOT
from tests.netns.recorded_daemon import HEALTH_PORT
from tests.netns.test_seeing import answer
from tests.netns.test_udp import HOLD, lonely


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The effects of a daemon from its start until it is ready."""
    path = tmp_path_factory.mktemp("effects") / "effects"
    with Lab() as lab:
        lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
        (node,) = lab.add_nodes()
        node.namespace.sysctl("net/ipv4/ip_forward", 0)
        node.start(
            "--ip-masq",
            f"--healthz-port={HEALTH_PORT}",
            command=[sys.executable, "-m", "tests.netns.recorded_daemon", str(path)],
            environment={"PYTHONPATH": str(ROOT)},
        )
        node.wait_for_log("In sync with ")
        wait_for(node.service_manager.ready, what="a node that is ready")
        yield path.read_text().splitlines()


def place(effects: list[str], start: str) -> int:
    """Return the place of the first effect that begins like this."""
    return next(number for number, line in enumerate(effects) if line.startswith(start))


def test_changes_of_the_kernel_are_listened_to_before_it_is_first_read(effects: list[str]) -> None:
    assert place(effects, "netlink listens") < place(effects, "netlink dump")


def test_lease_is_recorded_for_the_next_run_as_soon_as_it_is_there(effects: list[str]) -> None:
    written = place(effects, "log Allocated lease")
    assert effects[written + 1] == "file flanneld.state"


def test_settings_are_corrected_once_containers_can_start_and_before_they_are_watched(
    effects: list[str],
) -> None:
    (corrected,) = (each for each in effects if "net.ipv4.ip_forward" in each)
    assert "; mended by: " in corrected
    assert place(effects, "file subnet.env") < effects.index(corrected) < place(effects, "thread host")


def test_node_waits_for_peers_before_the_loop_may_know_them(effects: list[str]) -> None:
    assert (
        effects[place(effects, "thread reconciler") - 1]
        == "unready flanneld is not ready yet; the peers are not known yet"
    )


def test_masquerading_precedes_subnet_env_and_its_repairs_follow_it(effects: list[str]) -> None:
    rules, file, thread = (
        place(effects, start) for start in ("log Made our rules", "file subnet.env", "thread firewall")
    )
    assert rules < file < thread


def test_status_socket_answers_before_the_service_manager_is_told(effects: list[str]) -> None:
    assert place(effects, "file flanneld.sock") < place(effects, "manager READY=1")


def test_config_is_told_once_there_is_a_lease(lab: Lab) -> None:
    node = lonely(lab)
    node.start("--iface=absent0", "--iface-wait=600")
    node.wait_for_log("Waiting for an external interface")
    wait_for(lambda: answer(node, "status")["origin"] == "daemon", what="the daemon to answer")
    told = answer(node, "status")
    assert (told["network"], told["lease"]) == (None, None)


def test_lease_is_kept_from_its_first_moment_though_the_kernel_is_waited_for(lab: Lab) -> None:
    node = lonely(lab)
    with (node.directory / "holder").open("wb") as output:
        holder = node.namespace.start("/usr/bin/python3", "-c", HOLD, output=output)
    wait_for(lambda: ":8285" in node.run("ss", "-Hlun").stdout, what="the port to be taken")
    node.start()
    node.wait_for_log("Waiting for the kernel")
    told = answer(node, "status")
    (subnet,) = told["lease"]["subnets"]
    assert told["network"]["backend"] == "udp"
    threading.Event().wait(PROBATION)  # from then on the node is no newcomer
    holder.kill()
    holder.wait()
    node.wait_ready()
    lab.etcd.put_lease(subnet, {"PublicIP": "198.18.0.99", "BackendType": "udp"})
    node.wait_for_log("another node writes itself into our lease")
    wait_for(lambda: lab.etcd.leases()[subnet]["PublicIP"] == node.address, what="our lease")
    assert node.running
