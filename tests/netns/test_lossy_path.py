"""A way to the store that is slow, breaks, and says things twice costs neither packets nor news."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.lab import Lab, Node, Proxy, Trouble, wait_for
from tests.lab.etcd import PORT as ETCD_PORT
from tests.lab.kube import PORT as KUBE_PORT
from tests.lab.lab import NETWORK
from tests.netns.kube import write_net_conf

HOST_GW = {"Type": "host-gw"}
#: A daemon waits up to 40 s between two attempts to reach Kubernetes.
PATIENCE = 60.0

HASTY = Trouble(delay=(0.0, 0.1), cut=0.1, repeat=0.3)
#: As an etcd on a slow disk. What takes longer than 5 s counts as no answer.
SLOW = Trouble(delay=(2.0, 4.5))


@pytest.fixture(params=["v3", "kube", pytest.param("v2", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def api(store: str) -> str:
    return "v2" if store == "kube" else store


class Site:
    """A network whose nodes reach their store through a proxy each."""

    def __init__(self, lab: Lab, store: str, stack: ExitStack) -> None:
        self.lab = lab
        self.proxies: list[Proxy] = []
        self._is_kube = store == "kube"
        self._stack = stack
        #: The gateway of each peer's subnet, but for those that have daemons.
        self.peers: dict[str, str] = {}
        if self._is_kube:
            write_net_conf(lab, HOST_GW)
        else:
            lab.etcd.put_config({"Network": NETWORK, "SubnetMin": "10.5.200.0", "Backend": HOST_GW})

    def start(self, trouble: Trouble = Trouble()) -> Node:  # noqa: B008 - frozen
        """A new node whose daemon is yet to become ready."""
        (node,) = self.lab.add_nodes()
        number = len(self.proxies)
        target = (self.lab.etcd.address, KUBE_PORT if self._is_kube else ETCD_PORT)
        listen = (self.lab.etcd.address, 2400 + number)
        proxy = self._stack.enter_context(Proxy(self.lab.switch, listen, target, seed=number))
        proxy.trouble = trouble
        self.proxies.append(proxy)
        if self._is_kube:
            self.lab.kube.add(node, f"10.5.{200 + number}.0/24")
            flags = ["--kube-subnet-mgr", f"--net-config-path={self.lab.directory / 'net-conf.json'}"]
            node.start(*flags, f"--kube-api-url={proxy.url}", environment={"NODE_NAME": node.name})
        else:
            node.start(f"-etcd-endpoints={proxy.url}")
        return node

    def put(self, number: int, gateway: int) -> None:
        """A peer's subnet, 10.5.<number>.0/24, is behind 198.18.0.<gateway> now."""
        subnet, address = f"10.5.{number}.0/24", f"198.18.0.{gateway}"
        self.peers[subnet] = address
        if self._is_kube:
            self.lab.kube.control.put_peer(f"p{number}", subnet, address, "host-gw")
        else:
            self.lab.etcd.put_lease(subnet, {"PublicIP": address, "BackendType": "host-gw"})

    def drop(self, number: int) -> None:
        del self.peers[f"10.5.{number}.0/24"]
        if self._is_kube:
            self.lab.kube.control.delete_node(f"p{number}")
        else:
            self.lab.etcd.delete_lease(f"10.5.{number}.0/24")

    def forget_history(self) -> None:
        if self._is_kube:
            self.lab.kube.control.jump(5000)
            self.lab.kube.control.compact()
        else:
            self.lab.etcd.forget_history()

    def wait_until_known(self, nodes: list[Node]) -> None:
        """Wait until each node leads to all peers, and to nobody else."""
        for node in nodes:
            others = {each.subnet(): each.address for each in nodes if each is not node}
            wanted = self.peers | others
            wait_for(lambda node=node: gateways(node) == wanted, PATIENCE, f"{wanted} on {node.name}")  # type: ignore[misc]  # noqa: B023


def gateways(node: Node) -> dict[str, str]:
    return {row["dst"]: row["gateway"] for row in node.routes("eth0") if row["dst"].startswith("10.5.")}


@pytest.fixture
def site(lab: Lab, store: str) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(lab, store, stack)


@contextmanager
def no_packet_lost(one: Node, other: Node) -> Iterator[None]:
    one.container().wait_for_reply(other.container(), 20)
    with one.container().ping(other.container()) as ping:
        yield
        ping.wait_for_replies(deadline=20)
        assert ping.lost() == 0


def pair(site: Site, trouble: Trouble = Trouble()) -> tuple[Node, Node]:  # noqa: B008
    nodes = site.start(trouble), site.start(trouble)
    for node in nodes:
        node.wait_ready(PATIENCE)
    site.wait_until_known(list(nodes))
    return nodes


@pytest.mark.parametrize(
    "trouble", [HASTY, pytest.param(SLOW, marks=pytest.mark.long)], ids=["hasty", "slow"]
)
def test_delays_repetitions_and_breaks_cost_no_packet_and_no_news(site: Site, trouble: Trouble) -> None:
    first, second = pair(site)
    subnets = first.subnet(), second.subnet()
    with no_packet_lost(first, second):
        for proxy in site.proxies:
            proxy.trouble = trouble
        for number in range(1, 13):
            site.put(number, 220)
        third = site.start(trouble)
        for number in range(1, 13):
            if number % 3 == 0:
                site.put(number, 221)
            elif number % 3 == 1:
                site.drop(number)
        third.wait_ready(2 * PATIENCE)
        site.wait_until_known([first, second, third])
    assert (first.subnet(), second.subnet()) == subnets
    assert first.running
    assert second.running


def test_a_history_that_was_lost_while_the_way_was_cut_costs_no_packet_and_few_words(site: Site) -> None:
    first, second = pair(site)
    for number in (1, 2, 3):
        site.put(number, 220)
    site.wait_until_known([first, second])
    with no_packet_lost(first, second):
        logged = len(first.log())
        with site.proxies[0].away():
            site.forget_history()
            site.put(2, 221)
            site.drop(3)
            site.put(4, 220)
            site.forget_history()
            wait_for(lambda: "does not answer" in first.log()[logged:], 20, "the daemon to notice")
        site.wait_until_known([first, second])
        site.put(5, 220)
        site.wait_until_known([first, second])
    said = [line for line in first.log()[logged:].splitlines() if "] Lease" not in line]
    assert len(said) <= 10, said
