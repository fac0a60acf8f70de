"""A node that is in both APIs of etcd at once, on a real etcd."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Self

import pytest
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, LeaseTable, Snapshot
from flanneld.runtime import clock
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet.codec import format_key
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.store import LocalFacts, Store
from tests.lab.wait import wait_for
from tests.local_etcd import LocalEtcd, running_etcd

CONFIG = '{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}'
APIS = ("v3", "v2")
NO_PREVIOUS = (None, None)
_numbers = itertools.count()


@pytest.fixture
def node(etcd: LocalEtcd) -> Iterator[Node]:
    with running(etcd) as node:
        yield node


def attrs(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), backend_type="host-gw")


def value(number: int) -> str:
    return json.dumps({"PublicIP": f"192.0.2.{number}", "BackendType": "host-gw"})


class Node:
    """A network in an etcd, a manager of both APIs, and what it does in threads."""

    def __init__(self, etcd: LocalEtcd) -> None:
        self.etcd = etcd
        self.prefix = f"/both-{next(_numbers)}"
        self.events: list[Event] = []
        self.beats = 0
        self.stop = threading.Event()
        self.revoked = threading.Event()
        self.ended: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._opened: list[Store] = []
        self._cancel: Callable[[], None] = lambda: None
        self.manager = self.open("both")

    def open(self, api: str) -> Store:
        timeouts = EtcdTimeouts(read=20.0, pause=0.05)
        options = EtcdOptions((self.etcd.url,), self.prefix, transport="json")
        self._opened.append(open_etcd(options, api, timeouts))
        return self._opened[-1]

    def key(self, third: int) -> str:
        return f"{self.prefix}/subnets/10.5.{third}.0-24"

    def put(self, api: str, third: int, number: int, ttl: int | None = 3600) -> None:
        self.etcd.keys(api).put(self.key(third), value(number), ttl)

    def owners(self, api: str) -> dict[str, str]:
        """The public IP of each lease, by its subnet."""
        return {
            each["key"].rpartition("/")[2]: json.loads(each["value"])["PublicIP"]
            for each in self.etcd.keys(api).children(f"{self.prefix}/subnets")
        }

    def get(self, api: str, lease: Lease) -> dict[str, Any] | None:
        assert lease.subnet
        return self.etcd.keys(api).get(f"{self.prefix}/subnets/{str(lease.subnet).replace('/', '-')}")

    def join(self, number: int = 1) -> Lease:
        config = self.manager.network_config()
        return self.manager.acquire(config, attrs(number), NO_PREVIOUS)

    def watch(self) -> None:
        self.start(lambda: self.manager.watch(self.events.extend, self._beat))

    def keep(self, lease: Lease) -> LeaseKeeper:
        """Do all that a daemon does for its lease."""
        supervisor = Supervisor()
        supervisor.stop = self.stop
        lease_keeper = LeaseKeeper(
            self.manager,
            lease,
            margin=3600.0,
            stop=self.stop,
            make_loop=supervisor.loop,
            revoked=self.revoked.set,
        )
        self.start(lambda: self.manager.watch_own(lease, lease_keeper.deliver, self._beat))
        self.start(lease_keeper.run)
        self._cancel = lease_keeper.cancel
        return lease_keeper

    def peers(self) -> dict[str, str]:
        table = LeaseTable(own=NO_PREVIOUS)
        for event in tuple(self.events):
            table.apply(event)
        return {str(lease): str(lease.attrs.public_ip) for lease in table}

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as end:
                self.ended.append(end)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def _beat(self) -> None:
        self.beats += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._cancel()
        for manager in self._opened:
            manager.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert all(isinstance(end, Cancelled) for end in self.ended), self.ended


def running(etcd: LocalEtcd, api: str = "v2") -> Node:
    """With a network config in one API."""
    node = Node(etcd)
    etcd.keys(api).put(f"{node.prefix}/config", CONFIG)
    return node


def test_endpoints_are_written_to_both_and_read_from_either(node: Node) -> None:
    node.manager.network_config()
    node.manager.publish_endpoints("one=", "203.0.113.7:51820")
    for api, name in zip(APIS, ("two=", "three="), strict=False):
        store = node.open(api)
        assert store.endpoints() == {"one=": "203.0.113.7:51820"}
        store.publish_endpoints(name, "203.0.113.8:51820")
    assert set(node.manager.endpoints()) == {"one=", "two=", "three="}


# ---- the config ------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_the_config_may_be_in_either(etcd: LocalEtcd, api: str) -> None:
    with running(etcd, api) as node:
        assert node.manager.network_config() == parse(CONFIG)
        assert "etcd v3 at" in node.manager.name
        assert "etcd v2 at" in node.manager.name


def test_configs_that_say_the_same_are_one(node: Node) -> None:
    node.etcd.keys("v3").put(f"{node.prefix}/config", CONFIG.replace(" ", ""))
    assert node.manager.network_config().source == CONFIG.replace(" ", "")


def test_configs_that_differ_are_refused(node: Node) -> None:
    node.etcd.keys("v3").put(f"{node.prefix}/config", CONFIG.replace("10.5", "10.6"))
    with pytest.raises(Retryable, match=f"network configs at {node.prefix}/config .* are different"):
        node.manager.network_config()


def test_a_config_that_makes_no_sense_is_not_passed_over(node: Node) -> None:
    node.etcd.keys("v3").put(f"{node.prefix}/config", "{")
    with pytest.raises(Retryable, match="JSON"):
        node.manager.network_config()


def test_without_a_config_in_either_it_waits(etcd: LocalEtcd) -> None:
    with Node(etcd) as node, pytest.raises(Retryable, match="in neither of its APIs"):
        node.manager.network_config()


# ---- one subnet in both ----------------------------------------------------------------------


def test_a_new_node_has_one_subnet_in_both(node: Node) -> None:
    lease = node.join()
    assert node.owners("v2") == node.owners("v3") == {str(lease).replace("/", "-"): "192.0.2.1"}
    for api in APIS:
        assert 86000 < (node.get(api, lease) or {})["ttl"] <= 86400
    assert lease.expires
    assert lease.expires - clock.now() > 86000


def test_in_dual_stack_both_subnets_are_the_same_in_both(etcd: LocalEtcd) -> None:
    with Node(etcd) as node:
        config = CONFIG[:-1] + ', "EnableIPv6": true, "IPv6Network": "fc00:5::/48"}'
        etcd.put(f"{node.prefix}/config", config)
        ours = replace(attrs(1), public_ipv6=IPv6Address("2001:db8::1"))
        lease = node.manager.acquire(node.manager.network_config(), ours, NO_PREVIOUS)
        assert all(lease.key)
        assert node.manager.renew(lease).attrs == ours
        (name,) = node.owners("v2")
        assert node.owners("v3") == {name: "192.0.2.1"}
        assert "&fc00:5:" in name


@pytest.mark.parametrize("api", APIS)
def test_the_subnet_that_a_node_has_in_one_is_kept(node: Node, api: str) -> None:
    node.put(api, 77, 1)
    assert str(node.join()) == "10.5.77.0/24"
    assert node.owners("v2") == node.owners("v3") == {"10.5.77.0-24": "192.0.2.1"}
    assert node.manager.stored(IPv4Address("192.0.2.1")) == attrs(1)


def test_subnets_leased_in_either_api_are_not_chosen(etcd: LocalEtcd) -> None:
    with Node(etcd) as node:
        etcd.put(f"{node.prefix}/config", CONFIG[:-1] + ', "SubnetMax": "10.5.3.0"}')
        node.put("v2", 1, 11)
        node.put("v3", 3, 13)
        assert str(node.join()) == "10.5.2.0/24"
        assert {"10.5.1.0/24", "10.5.3.0/24"} <= {str(lease) for lease in node.manager.read_leases()}
        node.manager = node.open("both")
        with pytest.raises(Retryable, match=r"no subnet .* is free"):
            node.join(2)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("key", ["10.5.0.0-16", "10.0.0.0-8&fc00:5::-48"])
def test_record_that_no_node_follows_blocks_no_join_and_costs_no_lease(
    etcd: LocalEtcd, api: str, key: str
) -> None:
    with Node(etcd) as node:
        config = CONFIG[:-1] + ', "EnableIPv6": true, "IPv6Network": "fc00:5::/48"}'
        etcd.put(f"{node.prefix}/config", config)
        etcd.keys(api).put(f"{node.prefix}/subnets/{key}", '{"PublicIP":"192.0.2.9"}', 3600)
        lease = node.join()
        node.manager = node.open("both")
        assert node.join().key == lease.key
        own = {format_key(lease.key): "192.0.2.1"}
        assert node.owners(api) == own | {key: "192.0.2.9"}
        assert node.owners("v2" if api == "v3" else "v3") == own


def test_loser_of_a_race_lists_the_leases_again_and_takes_another_subnet(node: Node) -> None:
    slow, quick = node.manager, node.open("both")
    for manager in (slow, quick):
        config = manager.network_config()
        assert manager.stored(IPv4Address("192.0.2.1")) is None
    wanted = (IPv4Network("10.5.6.0/24"), None)
    assert quick.acquire(config, attrs(2), wanted).key == wanted
    lease = slow.acquire(config, attrs(1), wanted)
    assert lease.key != wanted
    assert (
        node.owners("v2")
        == node.owners("v3")
        == {
            "10.5.6.0-24": "192.0.2.2",
            format_key(lease.key): "192.0.2.1",
        }
    )


def test_of_two_new_leases_with_one_subnet_in_common_the_later_is_given_back(etcd: LocalEtcd) -> None:
    common = IPv6Network("fc00:5:0:6::/64")
    with Node(etcd) as node:
        config = CONFIG[:-1] + ', "EnableIPv6": true, "IPv6Network": "fc00:5::/48"}'
        etcd.put(f"{node.prefix}/config", config)
        slow, quick = node.manager, node.open("both")
        for manager in (slow, quick):
            assert manager.network_config().families == (4, 6)
            assert manager.stored(IPv4Address("192.0.2.1")) is None
        first = quick.acquire(parse(config), attrs(2), (IPv4Network("10.5.6.0/24"), common))
        second = slow.acquire(parse(config), attrs(1), (IPv4Network("10.5.7.0/24"), common))
        assert first.ipv6_subnet == common
        assert second.ipv6_subnet not in (None, common)
        assert len(node.owners("v2")) == len(node.owners("v3")) == 2


def test_a_reservation_in_one_is_one_in_both(node: Node) -> None:
    node.put("v2", 77, 1, ttl=None)
    lease = node.join()
    assert lease.expires is None
    for api in APIS:
        assert "ttl" not in (node.get(api, lease) or {})


def test_of_two_subnets_the_previous_one_is_kept_and_the_other_given_back(node: Node) -> None:
    node.put("v2", 77, 1)
    node.put("v3", 88, 1)
    previous = (IPv4Network("10.5.77.0/24"), None)
    lease = node.manager.acquire(node.manager.network_config(), attrs(1), previous)
    assert lease.subnet == previous[0]
    assert node.owners("v2") == node.owners("v3") == {"10.5.77.0-24": "192.0.2.1"}


def test_other_lease_that_changes_before_it_is_given_back_is_listed_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put("v2", 77, 1)
    node.put("v3", 88, 1)
    given_back: list[Lease] = []

    def give_back(store: EtcdStore, lease: Lease) -> None:
        given_back.append(lease)
        if len(given_back) == 1:
            node.put("v3", 88, 1)
        actually(store, lease)

    actually = EtcdStore.give_back
    monkeypatch.setattr(EtcdStore, "give_back", give_back)
    previous = (IPv4Network("10.5.77.0/24"), None)
    assert node.manager.acquire(node.manager.network_config(), attrs(1), previous).key == previous
    assert len(given_back) == 2
    assert node.owners("v2") == node.owners("v3") == {"10.5.77.0-24": "192.0.2.1"}


def test_a_subnet_that_another_node_has_in_the_other_api_is_given_up(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.put("v3", 77, 1)
    node.put("v2", 77, 2)
    lease = node.join()
    assert str(lease) != "10.5.77.0/24"
    assert node.owners("v2")["10.5.77.0-24"] == "192.0.2.2"
    assert "10.5.77.0-24" not in node.owners("v3")
    assert "10.5.77.0/24 of ours overlaps" in caplog.text


def test_nodes_of_all_kinds_that_join_at_once_get_different_subnets(etcd: LocalEtcd) -> None:
    """Those that look into one API only may clash with each other, but not with one that looks into both."""
    with running(etcd) as node:
        etcd.keys("v3").put(f"{node.prefix}/config", CONFIG)
        config = parse(CONFIG[:-1] + ', "SubnetMax": "10.5.24.0"}')
        leases: list[tuple[str, Lease]] = []

        def join(api: str, number: int) -> None:
            leases.append((api, node.open(api).acquire(config, attrs(number), NO_PREVIOUS)))

        kinds = ["both", "both", "v2", "v3"] * 3
        threads = [threading.Thread(target=join, args=each) for each in zip(kinds, range(1, 13), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(leases) == len(kinds)
        subnets = [str(lease) for api, lease in leases if api == "both"]
        assert len(set(subnets)) == 6
        assert not set(subnets) & {str(lease) for api, lease in leases if api != "both"}
        for api in APIS:
            assert set(node.owners(api)) >= {subnet.replace("/", "-") for subnet in subnets}
            assert len(node.owners(api)) == 9


# ---- peers -----------------------------------------------------------------------------------


def test_peers_of_either_are_peers_and_go_when_both_have_said_so(node: Node) -> None:
    node.put("v2", 2, 12)
    node.put("v3", 3, 13)
    for api in APIS:
        node.put(api, 4, 14)
    node.manager.network_config()
    node.watch()
    everyone = {"10.5.2.0/24": "192.0.2.12", "10.5.3.0/24": "192.0.2.13", "10.5.4.0/24": "192.0.2.14"}
    wait_for(lambda: node.peers() == everyone, 10, "all peers")
    assert [type(event) for event in node.events].count(Snapshot) == 1
    for api in APIS:
        node.etcd.keys(api).delete(node.key(4))
        node.put(api, 5, 15)
        wait_for(lambda: "10.5.5.0/24" in node.peers(), 10, "a peer of either")
        assert ("10.5.4.0/24" in node.peers()) == (api == "v3")
        node.etcd.keys(api).delete(node.key(5))
        wait_for(lambda: "10.5.5.0/24" not in node.peers(), 10, "the peer to go")
    assert node.beats > 0


def test_a_subnet_of_two_nodes_is_that_of_v3_and_the_log_says_so(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.put("v3", 2, 13)
    node.put("v2", 2, 12)
    node.manager.network_config()
    node.watch()
    wait_for(lambda: node.peers() == {"10.5.2.0/24": "192.0.2.13"}, 10, "the peer of v3")
    wait_for(lambda: "belongs to node 192.0.2.13 in v3, which counts" in caplog.text, 10, "the warning")


# ---- our own lease ---------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_lease_lost_in_one_api_is_restored(node: Node, api: str, caplog: pytest.LogCaptureFixture) -> None:
    lease = node.join()
    node.keep(lease)
    path = node.key(lease.subnet.network_address.packed[2]) if lease.subnet else ""
    for _ in range(2):
        node.etcd.keys(api).delete(path)
        wait_for(lambda: node.get(api, lease), 10, f"the lease in {api}")
    assert f"Our lease {lease} vanished from etcd {api}: restoring it" in caplog.text
    assert not node.revoked.is_set()


def test_lease_lost_in_both_apis_is_revoked(node: Node) -> None:
    lease = node.join()
    node.keep(lease)
    wait_for(lambda: node.beats >= len(APIS), 10, "the watches")
    for api in APIS:
        node.etcd.keys(api).delete(f"{node.prefix}/subnets")
    wait_for(node.revoked.is_set, 10, "the revocation")


def test_a_renewal_writes_in_v2_and_keeps_alive_in_v3(node: Node) -> None:
    lease = node.join()
    first = {api: (node.get(api, lease) or {})["modifiedIndex"] for api in APIS}
    renewed = node.manager.renew(lease)
    assert renewed.asof > lease.asof
    assert (node.get("v2", lease) or {})["modifiedIndex"] > first["v2"]
    assert (node.get("v3", lease) or {})["modifiedIndex"] == first["v3"]
    assert renewed.expires
    assert lease.expires
    assert renewed.expires > lease.expires


def test_a_new_address_is_announced_in_both(node: Node) -> None:
    lease = node.join()
    for number in (5, 6):
        lease = node.manager.renew(replace(lease, attrs=attrs(number)))
        assert set(node.owners("v2").values()) == set(node.owners("v3").values()) == {f"192.0.2.{number}"}


def test_a_subnet_that_another_node_took_in_one_is_not_taken_back(node: Node) -> None:
    lease = node.join()
    assert lease.subnet
    third = lease.subnet.network_address.packed[2]
    node.etcd.delete(node.key(third))
    node.put("v2", third, 9)
    with pytest.raises(Retryable, match=r"v2: the lease .* belongs to node 192.0.2.9 now"):
        node.manager.renew(lease)
    before = (node.get("v3", lease) or {})["modifiedIndex"]
    with pytest.raises(Retryable, match="v2"):
        node.manager.renew(lease)
    assert (node.get("v3", lease) or {})["modifiedIndex"] == before  # done is done
    assert node.owners("v2") == {f"10.5.{third}.0-24": "192.0.2.9"}


# ---- one of both is away ---------------------------------------------------------------------


def close_v3(etcd: LocalEtcd) -> None:
    """Let nobody in there without a login; v2 has logins of its own."""
    etcd.post("/auth/user/add", {"name": "root", "password": "x"})
    etcd.post("/auth/role/add", {"name": "root"})
    etcd.post("/auth/user/grant", {"user": "root", "role": "root"})
    etcd.post("/auth/enable", {})


def test_an_api_that_is_switched_off_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    for flag, api in (("--enable-v2=false", "v3"), ("--enable-grpc-gateway=false", "v2")):
        with running_etcd(flag) as etcd, running(etcd, api) as node:
            node.put(api, 2, 12)
            lease = node.join()
            node.keep(lease)
            node.watch()
            wait_for(lambda: "10.5.2.0/24" in node.peers(), 10, "the peer")
            assert any(isinstance(event, Snapshot) for event in node.events)
            assert node.manager.renew(lease)
            assert "Only one API of etcd is usable" in caplog.text


def test_while_one_refuses_us_the_other_serves_and_no_peer_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_etcd("--bcrypt-cost=4") as etcd, running(etcd) as node:
        node.put("v3", 3, 13)
        lease = node.join()
        node.watch()
        wait_for(lambda: "10.5.3.0/24" in node.peers(), 10, "the peer of v3")
        close_v3(etcd)
        node.manager.reread()
        wait_for(lambda: "refuses access" in caplog.text, 10, "v3 to refuse")
        node.put("v2", 200, 12)
        wait_for(lambda: "10.5.200.0/24" in node.peers(), 10, "a new peer of v2")
        assert "10.5.3.0/24" in node.peers()
        with pytest.raises(Retryable, match=r"v3: .*refuses access"):
            node.manager.renew(lease)
        # A restart finds its lease in the other one, but nobody new can join.
        again = node.manager = node.open("both")
        assert node.join().key == lease.key
        with pytest.raises(Retryable, match="refuses access"):
            again.acquire(parse(CONFIG), attrs(2), NO_PREVIOUS)


def test_while_one_refuses_us_endpoints_are_in_the_other() -> None:
    with running_etcd("--bcrypt-cost=4") as etcd, running(etcd) as node:
        node.manager.network_config()
        close_v3(etcd)
        with pytest.raises(Retryable, match="refuses access"):
            node.manager.publish_endpoints("one=", "203.0.113.7:51820")
        assert node.open("v2").endpoints() == {"one=": "203.0.113.7:51820"}
        assert node.manager.endpoints() == {"one=": "203.0.113.7:51820"}


def test_a_start_while_one_refuses_us_removes_nothing() -> None:
    with running_etcd("--bcrypt-cost=4") as etcd, running(etcd) as node:
        node.put("v2", 2, 12)
        close_v3(etcd)
        node.manager.network_config()
        node.watch()
        wait_for(lambda: "10.5.2.0/24" in node.peers(), 10, "the peer of v2")
        assert all(isinstance(event, Added) for event in node.events)


def test_a_watch_that_fails_ends_all_with_what_was_wrong(node: Node) -> None:
    node.manager.network_config()

    def deliver(_: list[Event]) -> None:
        raise ValueError("out of order")

    with pytest.raises(ValueError, match="out of order"):
        node.manager.watch(deliver, lambda: None)


# ---- a node with another public IP ----------------------------------------------------------------


def test_a_proven_lease_is_kept_in_both_apis(etcd: LocalEtcd, caplog: pytest.LogCaptureFixture) -> None:
    with running(etcd, "v3") as node:
        former = node.join(1)
        config = node.manager.network_config()
        manager = node.open("both")
        manager.network_config()
        with caplog.at_level("INFO"):
            lease = manager.acquire(config, attrs(2), former.key, LocalFacts(former))
        assert lease.key == former.key
        name = str(former).replace("/", "-")
        for api in ("v2", "v3"):
            assert node.owners(api) == {name: "192.0.2.2"}, api
        assert sum("Keeping the lease" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_a_lease_that_another_node_has_in_one_api_is_not_proven(etcd: LocalEtcd, api: str) -> None:
    with running(etcd, "v3") as node:
        former = node.join(1)
        assert former.subnet
        third = int(str(former.subnet).split(".")[2])
        node.put(api, third, 3)
        manager = node.open("both")
        lease = manager.acquire(manager.network_config(), attrs(2), former.key, LocalFacts(former))
        assert lease.key != former.key
        assert node.owners(api)[str(former).replace("/", "-")] == "192.0.2.3"
