"""The laboratory: a cluster of network namespaces, a real etcd and real daemons on one machine.

It needs root and Debian's etcd-server, iproute2 and iputils-ping, and never touches the network of the
host it runs on. ``tests/netns``, ``tests/interop``, ``tests/bench`` and ``dist/demo`` all stand on it::

    with Lab() as lab:
        first, second = lab.cluster({"Type": "vxlan"}, nodes=2)
        first.container().wait_for_reply(second.container())
"""

from tests.lab.daemon import Daemon, Exit, own_command, peer_command
from tests.lab.door import Door, Mishap
from tests.lab.etcd import Etcd, EtcdError
from tests.lab.impostor import Impostor
from tests.lab.kube import Kube
from tests.lab.kube_api.faults import Fault
from tests.lab.lab import Lab
from tests.lab.namespace import CommandError, Namespace
from tests.lab.node import Container, Node
from tests.lab.ping import Ping
from tests.lab.proxy import Proxy, Trouble
from tests.lab.wait import wait_for

__all__ = [
    "CommandError",
    "Container",
    "Daemon",
    "Door",
    "Etcd",
    "EtcdError",
    "Exit",
    "Fault",
    "Impostor",
    "Kube",
    "Lab",
    "Mishap",
    "Namespace",
    "Node",
    "Ping",
    "Proxy",
    "Trouble",
    "own_command",
    "peer_command",
    "wait_for",
]
