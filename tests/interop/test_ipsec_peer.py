"""IPsec together with Go flannel 0.12.0: both ways, in either order, and over a swap of the daemon."""

from __future__ import annotations

import pytest

from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, with_own_run
from tests.netns.test_ipsec import talk

pytestmark = [pytest.mark.needs_kernel("esp"), pytest.mark.parametrize("api", ["v2"])]

#: Version 0.12.0 knows one place where charon may be. The machine forgets the link.
FOLDER = "/usr/lib/strongswan"
LINKED = f'mkdir -p {FOLDER} && ln -sfn /usr/lib/ipsec/charon {FOLDER}/charon && exec "$0" "$@"'


def start(node: Node, *, ours: bool) -> None:
    command = own_command() if ours else peer_command()
    assert command, "set FLANNELD_PEER to the other daemon's command"
    node.start(command=with_own_run(node, *(() if ours else ("sh", "-c", LINKED)), *command))
    node.wait_ready()


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other(lab: Lab, ours_first: bool) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**IPSEC, "UDPEncap": not ours_first}})
    one, other = lab.add_nodes(2)
    start(one, ours=ours_first)
    start(other, ours=not ours_first)
    talk(one, other)
    values = lab.etcd.lease_values()
    written = {values[node.subnet()].replace(node.address, "IP") for node in (one, other)}
    assert written == {'{"PublicIP":"IP","BackendType":"ipsec"}'}
    theirs = other if ours_first else one
    before = lab.etcd.leases()[theirs.subnet()]
    theirs.stop()
    start(theirs, ours=True)
    talk(one, other)
    wait_for(lambda: lab.etcd.leases()[theirs.subnet()] == before, what="the lease to be as before")
