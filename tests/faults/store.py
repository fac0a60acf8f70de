"""Faults of the store and of the network config."""

from __future__ import annotations

import signal

from flanneld.errors import LEASES_END
from tests.faults.fault import NO_LEASE, Fault, configured, ready, restart, start, start_in_vain, stop
from tests.faults.world import FULL, VXLAN_V3, Step, World


def etcd_stopped(world: World) -> None:
    world.lab.etcd.stop()
    world.wait_for_trouble("store")


def etcd_started(world: World) -> None:
    world.lab.etcd.start()


def config_deleted(world: World) -> None:
    world.lab.etcd.delete("config")


def config_garbled(world: World) -> None:
    world.lab.etcd.set("config", '{"Network": "10.5.0.0/16", "Backend": {')


def config_written(world: World) -> None:
    world.put_config()


def full(world: World) -> None:
    """Give this node's subnet to another one while its daemon is stopped."""
    world.node.stop()
    subnet = world.node.subnet()
    world.lab.etcd.delete_lease(subnet)
    attributes = {
        "PublicIP": "198.18.0.203",
        "BackendType": "vxlan",
        "BackendData": {"VtepMAC": "02:00:00:00:00:99"},
    }
    world.lab.etcd.put_lease(subnet, attributes)
    restart()(world)


def not_full(world: World) -> None:
    world.lab.etcd.delete_lease(world.words["own"])


def alarm(action: str) -> Step:
    """Return the step that sets or lifts the alarm of a store whose space is used up."""

    def act(world: World) -> None:
        order = {"action": action, "memberID": 0, "alarm": "NOSPACE"}
        world.lab.etcd.request("POST", "/v3/maintenance/alarm", order, as_json=True)

    return act


def without_lease(world: World) -> None:
    world.node.stop()
    world.lab.etcd.delete_lease(world.node.subnet())


def without_quorum(world: World) -> None:
    """Add a member that never runs, and so leave the store without a majority."""
    peer = {"peerURLs": ["http://127.0.0.1:1"]}
    world.lab.etcd.request("POST", "/v3/cluster/member/add", peer, as_json=True)


def with_quorum(world: World) -> None:
    world.lab.etcd.stop()
    world.lab.etcd.start("--force-new-cluster")


FAULTS = {
    "etcd without space, v3": Fault(
        "store",
        "database space exceeded",
        (without_lease, alarm("ACTIVATE"), restart()),
        VXLAN_V3,
        heal=(alarm("DEACTIVATE"), ready),
        advice="etcdctl compact REVISION && etcdctl defrag --cluster && etcdctl alarm disarm",
        peer_blind=NO_LEASE,
    ),
    "etcd without quorum, v3": Fault(
        "store",
        "etcd",
        (without_quorum, restart()),
        VXLAN_V3,
        cuts=False,
        heal=(with_quorum,),
        advice="it has no quorum",
        is_long=True,
    ),
    "name of etcd that does not resolve": Fault(
        "store",
        "its name ",
        (restart("--etcd-endpoints=http://etcd.invalid:2379"),),
        cuts=False,
        heal=(start,),
        advice="getent hosts",
    ),
    "etcd hangs": Fault(
        "store",
        "etcd does not answer",
        (lambda world: world.lab.etcd.send_signal(signal.SIGSTOP),),
        cuts=False,
        heal=(lambda world: world.lab.etcd.send_signal(signal.SIGCONT),),
        advice="see whether it runs and is reached from here",
    ),
    "etcd stopped": Fault(
        "store", "etcd does not answer", (etcd_stopped,), cuts=False, heal=(etcd_started,), advice="etcd"
    ),
    "etcd stopped, v3": Fault(
        "store",
        "etcd does not answer",
        (etcd_stopped,),
        VXLAN_V3,
        cuts=False,
        heal=(etcd_started,),
        advice="etcd",
    ),
    "no network config": Fault(
        "store",
        "has no network config",
        (config_deleted, restart()),
        cuts=False,
        heal=(config_written,),
        advice="/coreos.com/network/config",
    ),
    "no network config, v3": Fault(
        "store",
        "has no network config",
        (config_deleted, restart()),
        VXLAN_V3,
        cuts=False,
        heal=(config_written,),
        advice="/coreos.com/network/config",
    ),
    "network config that makes no sense": Fault(
        "store",
        "network config",
        (config_garbled, restart()),
        cuts=False,
        heal=(config_written,),
        advice="correct it",
    ),
    "setting of the backend out of range": Fault(
        "start",
        "flanneld cannot start: Error registering network: Backend.VNI is 99999999",
        (stop, configured(VNI=99999999), start_in_vain),
        cuts=False,
        heal=(configured(), start),
        advice="set it to a number from 0 to 16777215",
    ),
    "wrong prefix": Fault(
        "store",
        "/nowhere/config",
        (restart("--etcd-prefix=/nowhere"),),
        cuts=False,
        heal=(start,),
        advice="/nowhere/config",
    ),
    "TLS to a store without": Fault(
        "store",
        "https://{gateway}:2379",
        (restart("--etcd-endpoints=https://{gateway}:2379"),),
        cuts=False,
        heal=(start,),
        advice="check https in -etcd-endpoints",
    ),
    "wrong endpoint": Fault(
        "store",
        "etcd does not answer",
        (restart("--etcd-endpoints=http://{gateway}:2378"),),
        cuts=False,
        heal=(start,),
        advice="etcd",
    ),
    "rule that drops packets to etcd": Fault(
        "filters",
        "this node drops packets to the store: chain OUTPUT",
        (
            "iptables-nft -A OUTPUT -p tcp --dport 2379 -j REJECT --reject-with tcp-reset",
            lambda world: world.wait_for_trouble("store"),
        ),
        cuts=False,
        after=(
            "iptables-nft -D OUTPUT -p tcp --dport 2379 -j REJECT --reject-with tcp-reset",
            "iptables-nft -D OUTPUT -d {gateway} -j ACCEPT",
        ),
    ),
    "rule that drops answers of etcd": Fault(
        "filters",
        "this node drops answers of the store: chain INPUT",
        ("iptables-nft -A INPUT -p tcp --sport 2379 -j DROP", restart()),
        cuts=False,
        after=(
            "iptables-nft -D INPUT -p tcp --sport 2379 -j DROP",
            "iptables-nft -D INPUT -s {gateway} -j ACCEPT",
        ),
    ),
    "network full": Fault(
        "store",
        "no subnet from 10.5.1.0 to 10.5.3.0 is free",
        (full,),
        FULL,
        heal=(not_full,),
        advice=LEASES_END,
    ),
}
