"""The CNI configuration that the daemon keeps, with Debian's bridge, host-local and portmap."""

from __future__ import annotations

from typing import Any

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import own_command
from tests.lab.lab import NETWORK
from tests.netns.cni_runtime import Runtime, documented, kept_conf, kept_conf_file, kept_conf_flags
from tests.netns.pair import DUAL_STACK
from tests.netns.test_conditions import service_status

VERSION = "1.0.0"  # has CHECK


def daemon_with_conf(node: Node) -> dict[str, Any]:
    """Restart the daemon with -cni-conf and return what it writes."""
    if node.running:
        node.stop()
    node.start("-ip-masq", *kept_conf_flags(node, VERSION))
    node.wait_ready()
    return kept_conf(node)


def test_pods_of_the_plug_in_live_on_and_end_under_the_daemons_file_and_back(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, flags=["-ip-masq"])
    runtime = Runtime(node, cniVersion=VERSION)
    far = peer.container()
    before = runtime.add(1)
    before.wait_for_reply(far)
    with before.ping(far) as ping:
        runtime.use(daemon_with_conf(node))
        after = runtime.add(2)
        after.wait_for_reply(far)
        after.wait_for_reply(before)
        assert ping.lost() == 0
    assert len(runtime.reserved()) == 2
    runtime.delete(1)
    assert runtime.reserved() == [after.address]

    # Back to flannel's plug-in, which has no record of the second pod.
    runtime.use(documented() | {"cniVersion": VERSION})
    runtime.delete(2)
    assert runtime.reserved() == []


def test_pods_have_addresses_of_both_families(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, **DUAL_STACK, "Backend": {"Type": "vxlan"}})
    node, peer = lab.add_nodes(2)
    peer.start()
    peer.wait_ready()
    runtime = Runtime(node)
    runtime.use(daemon_with_conf(node))
    pod = runtime.add(1)
    for family in (4, 6):
        pod.wait_for_reply(peer.container().addresses[family])


def test_removed_file_is_back_and_gone_after_cleanup(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes(1)
    conf = daemon_with_conf(node)
    kept_conf_file(node).unlink()
    assert kept_conf(node) == conf
    node.stop()
    words = [f"--subnet-file={node.subnet_file}", "--cleanup", *kept_conf_flags(node, VERSION)]
    assert f"removed {kept_conf_file(node)}" in node.run(*own_command(), *words).stdout
    assert not kept_conf_file(node).exists()


def test_start_with_a_bad_template_ends_with_the_reason(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    words = kept_conf_flags(node, VERSION)
    (node.directory / "cni-conf.json").write_text("{}")
    node.start(*words)
    assert node.daemon.wait(20).status == 1
    assert "-cni-template" in node.log()


def test_directory_that_cannot_be_written_is_named_once_and_the_network_works(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    node, peer = lab.add_nodes(2)
    kept_conf_file(node).parent.mkdir()
    read_only = 'mount -t tmpfs -o ro none "$0"; exec "$@"'
    command = ("unshare", "-m", "sh", "-ec", read_only, str(kept_conf_file(node).parent), *own_command())
    node.start(*kept_conf_flags(node, VERSION), command=command)
    peer.start()
    for each in (node, peer):
        each.wait_ready()
    problem = "Read-only file system"
    wait_for(lambda: problem in service_status(node), 30, "STATUS= to tell it")
    node.container().wait_for_reply(peer.container())
    (line,) = (line for line in node.log().splitlines() if problem in line and line.startswith("W"))
    assert f"The contents of {kept_conf_file(node)} are not in place: {problem}" in line
