"""IPsec together with Go's daemons: both ways, in either order, and over a swap of the daemon."""

from __future__ import annotations

import pytest

from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, with_own_run
from tests.netns.test_ipsec import talk

APIS = [api for api in ("v2", "v3") if peer_command(api)]

pytestmark = [pytest.mark.needs_kernel("esp"), pytest.mark.parametrize("api", APIS)]

#: The one place where these versions look for charon. The machine forgets the link.
FOLDER = "/usr/lib/strongswan"
LINKED = f'mkdir -p {FOLDER} && ln -sfn /usr/lib/ipsec/charon {FOLDER}/charon && exec "$0" "$@"'

#: Lease of either daemon: versions with the v3 API name the address of the other family.
WRITTEN = {
    "v2": '{"PublicIP":"IP","BackendType":"ipsec"}',
    "v3": '{"PublicIP":"IP","PublicIPv6":null,"BackendType":"ipsec"}',
}


def start(node: Node, api: str, *, ours: bool) -> None:
    command = own_command() if ours else peer_command(api)
    node.start(command=with_own_run(node, *(() if ours else ("sh", "-c", LINKED)), *command))
    node.wait_ready()


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other(lab: Lab, api: str, ours_first: bool) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**IPSEC, "UDPEncap": not ours_first}})
    one, other = lab.add_nodes(2)
    start(one, api, ours=ours_first)
    start(other, api, ours=not ours_first)
    talk(one, other)
    values = lab.etcd.lease_values()
    written = {values[node.subnet()].replace(node.address, "IP") for node in (one, other)}
    assert written == {WRITTEN[api]}
    theirs = other if ours_first else one
    before = lab.etcd.leases()[theirs.subnet()]
    theirs.stop()
    start(theirs, api, ours=True)
    talk(one, other)
    wait_for(lambda: lab.etcd.leases()[theirs.subnet()] == before, what="the lease to be as before")
