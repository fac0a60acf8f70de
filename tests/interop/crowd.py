"""A node among thousands of peers, whose daemon is replaced: ours spreads routes over protocol numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.bench.cluster import OVERLAY, Peer, open_leases
from tests.lab import Lab, Node, own_command, wait_for
from tests.netns.pair import connect

#: Peers that are leases only. Their subnets are above those that daemons choose.
CROWD = 5000
#: Of them, those that go while a daemon runs, and those that go while none does.
GOING, UNSEEN = range(1000), range(1000, 2000)
_PATIENCE = 120.0


def swap_both_ways(lab: Lab, theirs: Sequence[str], *, hears_all: bool) -> None:
    """Replace ours by theirs and back; see that no packet is lost, no route lacks and none is left.

    Theirs is told of leases that go only if it ``hears_all``: Go's v0.20 loses events of a burst.
    """
    with open_leases(lab.etcd, "vxlan") as leases:
        leases.load(CROWD)
    node, peer = lab.cluster({"Type": "vxlan"}, Network=OVERLAY, SubnetLen=24)
    connect(node, peer)
    real = {peer.subnet(): 1}
    _wait_for(node, len(real) + CROWD)
    assert len(_protocols(node)) > 100
    with node.container().ping(peer.container()) as ping:
        _take_over(node, theirs)
        wait_for(lambda: len(_protocols(node)) == 1, _PATIENCE, "every route to be the other daemon's")
        _wait_for(node, len(real) + CROWD)
        if hears_all:
            _remove(lab, GOING)
            _wait_for(node, len(real) + CROWD - len(GOING))
        node.kill()
        if not hears_all:
            _remove(lab, GOING)
        _remove(lab, UNSEEN)
        _start(node, own_command())
        _wait_for(node, len(real) + CROWD - len(GOING) - len(UNSEEN))
        assert set(_protocols(node)) == {"3"}, "a right route was written again"
        _remove(lab, range(UNSEEN.stop, CROWD))
        _wait_for(node, len(real))
        assert {route["dst"] for route in node.routes("flannel.1")} == real.keys()
        assert ping.lost() == 0


def swap_after_them(lab: Lab, theirs: Sequence[str], *, hears_all: bool) -> None:
    """Start with theirs, replace it by ours and back; peers that come later get numbers of their own."""
    with open_leases(lab.etcd, "vxlan") as leases:
        leases.load(CROWD)
        lab.etcd.put_config({"Network": OVERLAY, "SubnetLen": 24, "Backend": {"Type": "vxlan"}})
        (peer,) = lab.cluster({"Type": "vxlan"}, nodes=1, Network=OVERLAY, SubnetLen=24)
        (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, command=theirs, Network=OVERLAY, SubnetLen=24)
        connect(node, peer)
        _wait_for(node, 1 + CROWD)
        with node.container().ping(peer.container()) as ping:
            _take_over(node, own_command())
            node.wait_for_log("In sync with")
            leases.load(CROWD + 300, first=CROWD)
            _wait_for(node, 1 + CROWD + 300)
            assert _protocols(node)["3"] == 1 + CROWD
            _take_over(node, theirs)
            wait_for(lambda: len(_protocols(node)) == 1, _PATIENCE, "every route to be the other daemon's")
            if not hears_all:
                _take_over(node, own_command())
            _remove(lab, range(CROWD + 300))
            _wait_for(node, 1)
            assert ping.lost() == 0


def _take_over(node: Node, command: Sequence[str]) -> None:
    node.kill()
    _start(node, command)


def _start(node: Node, command: Sequence[str]) -> None:
    node.start(command=command)
    node.wait_ready(_PATIENCE)


def _protocols(node: Node) -> Counter[str]:
    """Count the routes by protocol number; ``ip`` leaves out that of ``boot``."""
    rows = node.namespace.json("ip", "-j", "-N", "route", "show", "dev", "flannel.1")
    return Counter(row.get("protocol", "3") for row in rows)


def _wait_for(node: Node, peers: int) -> None:
    """Wait until there are just so many routes, neighbour entries and forwarding entries."""

    def found() -> tuple[int, int, int]:
        kinds = node.routes("flannel.1"), node.neighbors("flannel.1"), node.fdb("flannel.1")
        return len(kinds[0]), len(kinds[1]), len(kinds[2])

    wait_for(lambda: found() == (peers, peers, peers), _PATIENCE, f"objects of {peers} peers")


def _remove(lab: Lab, numbers: range) -> None:
    with open_leases(lab.etcd, "vxlan") as leases:
        for number in numbers:
            leases.send(leases.removal(Peer(number)))
            leases.finish()
