"""What is not well with a daemon that works is told everywhere, and no longer when it is over."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.test_seeing import HEALTH_PORT, answer, findings, flannelctl, settled

PATIENCE = 60


def stop_etcd(lab: Lab, _node: Node) -> None:
    lab.etcd.stop()


def start_etcd(lab: Lab, _node: Node) -> None:
    lab.etcd.start()


def take_address(_lab: Lab, node: Node) -> None:
    node.namespace.ip(f"address del {node.address}/24 dev eth0")


def give_address(_lab: Lab, node: Node) -> None:
    node.namespace.ip(f"address add {node.address}/24 dev eth0")


def service_status(node: Node) -> str:
    heard = [message for message in node.service_manager.heard() if message.startswith("STATUS=")]
    return heard[-1] if heard else ""


def ready_page(node: Node) -> str:
    return node.run("curl", "-s", f"http://127.0.0.1:{HEALTH_PORT}/readyz?verbose").stdout


def troubles(node: Node) -> dict[str, str]:
    """By the part that is not well; on a busy machine that may be a daemon that does not answer in time."""
    told = answer(node, "status")
    if "health" not in told:
        return {"daemon": "no answer"}
    return {each["part"]: each["problem"] for each in told["health"]["conditions"]}


@pytest.mark.parametrize(
    ("harm", "mend", "part"),
    [
        pytest.param(stop_etcd, start_etcd, "store", id="a store that is away"),
        pytest.param(take_address, give_address, "uplink", id="an uplink without an address"),
    ],
)
def test_a_trouble_is_told_everywhere_until_it_is_over(
    lab: Lab, harm: Callable[[Lab, Node], None], mend: Callable[[Lab, Node], None], part: str
) -> None:
    node, _ = settled(lab, f"--healthz-port={HEALTH_PORT}", "--iface=eth0")
    assert f"[+]{part} ok" in ready_page(node)
    harm(lab, node)
    wait_for(lambda: f"; {part}: " in service_status(node), PATIENCE, "the service manager to be told")
    assert f"[-]{part}: " in ready_page(node)
    assert ready_page(node).startswith("flanneld is ready\n")
    assert part in troubles(node)
    assert flannelctl(node, "status").returncode == 1
    mend(lab, node)
    wait_for(lambda: f"; {part}: " not in service_status(node), PATIENCE, "the end to be told")
    wait_for(lambda: f"[+]{part} ok" in ready_page(node), PATIENCE, "the end to be seen")
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")


def test_a_repair_tells_command_and_duration_also_after_a_restart(lab: Lab) -> None:
    node, peer = settled(lab)
    command = ["ip", "-n", node.namespace.name, "-batch", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as ip:
        who = re.escape(f"`{' '.join(command)}` (pid {ip.pid})")

        def told() -> re.Match[str] | None:
            """Change it; an audit at that moment may find it before the kernel's notification is read."""
            assert ip.stdin
            seen = node.log().count("Restored route")
            ip.stdin.write(f"route del {peer.subnet()}\n")
            ip.stdin.flush()
            wait_for(lambda: node.log().count("Restored route") > seen, PATIENCE, "the repair")
            line = node.wait_for_log("Restored route")[-1]
            return re.search(rf"Restored route .*, (\d+ ms|\d+\.\d s) after a change by {who}$", line)

        said = wait_for(told, PATIENCE, "the command to be told")
        assert said
    node.kill()
    node.start()
    node.wait_ready()
    assert said[0] in flannelctl(node, "events").stdout


def undo(node: Node, peer: Node) -> None:
    node.run("ip", "route", "del", peer.subnet(), check=False)


def test_a_program_that_does_not_stop_is_told_of(lab: Lab) -> None:
    node, peer = settled(lab)

    def told() -> str:
        undo(node, peer)
        return troubles(node).get("kernel", "")

    wait_for(
        lambda: "another program keeps changing our objects" in told(), PATIENCE, "the fight to be told of"
    )
    assert "fights" in findings(node)


def test_in_kubernetes_a_trouble_is_an_event_of_the_node(lab: Lab) -> None:
    lab.kube.control.put_token("teller", extra=[("create", "events")])
    kubeconfig = lab.kube.kubeconfig(lab.directory / "kubeconfig", "teller")
    node, peer = lab.kube_cluster({"Type": "host-gw"}, flags=(f"--kubeconfig-file={kubeconfig}",))

    def is_told() -> bool:
        undo(node, peer)
        messages = [each["message"] for each in lab.kube.control.events()]
        return any("kernel: another program keeps changing our objects" in message for message in messages)

    wait_for(is_told, PATIENCE, "an event")
