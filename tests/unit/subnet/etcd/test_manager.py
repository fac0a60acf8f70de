"""Leases in a real etcd: config, acquiring and renewing. What a watch sees is in ``test_etcd_watch``."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.config import Config, parse
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.runtime import clock
from flanneld.subnet.allocation import fits
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.keys import Conflict
from flanneld.subnet.etcd.store import SUBNET_TTL, EtcdStore, LeaseTaken
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.store import LocalFacts, Store
from tests.lab.etcd_v3 import V3Keys
from tests.lab.wait import wait_for
from tests.local_etcd import LocalEtcd, Relay, server

NOTHING: LeaseKey = (None, None)
IPV6 = (
    ', "EnableIPv6": true, "IPv6Network": "fc00:3::/48",'
    ' "IPv6SubnetMin": "fc00:3:0:1::", "IPv6SubnetMax": "fc00:3:0:14::"'
)
NETWORK = parse('{"network": "10.3.0.0/16", "subnetMin": "10.3.1.0", "subnetMax": "10.3.25.0"}')
FOUR = parse('{"Network": "10.9.0.0/24", "SubnetLen": 26, "SubnetMin": "10.9.0.0"}')
_numbers = itertools.count()


class EtcdPrefix:
    """A prefix of its own in an etcd, and managers that are closed at the end of the test."""

    def __init__(self, etcd: LocalEtcd, api: str) -> None:
        self.etcd = etcd
        self.api = api[:2]
        self.keys = etcd.keys(self.api)
        self.transport = "grpc" if "gRPC" in api else "json"
        self.prefix = f"/network-{next(_numbers)}"
        self.managers: list[Store] = []

    def manager(self, url: str = "", randrange: Callable[[int], int] | None = None) -> Store:
        options = EtcdOptions((url or self.etcd.url,), self.prefix, transport=self.transport)
        extra = (randrange,) if randrange else ()
        self.managers.append(open_etcd(options, self.api, EtcdTimeouts(read=20.0), *extra))
        return self.managers[-1]

    def put(self, subnet: str, value: str | LeaseAttrs, ttl: int | None = 3600) -> int:
        text = value if isinstance(value, str) else json.dumps({"PublicIP": str(value.public_ip)})
        return self.keys.put(f"{self.prefix}/subnets/{subnet}", text, ttl)

    def get(self, subnet: object) -> dict[str, Any]:
        name = str(subnet).replace("/", "-")
        return self.keys.get(f"{self.prefix}/subnets/{name}") or {}

    def value(self, text: str) -> str:
        """A value of v2 as flannel writes it in this API."""
        return text if self.api == "v2" else with_ipv6(text)


@pytest.fixture(params=["v2", "v3", "v3 of a newer etcd", "v3 over gRPC"])
def store(request: pytest.FixtureRequest) -> Iterator[EtcdPrefix]:
    etcd = request.getfixturevalue("newer_etcd" if "newer" in request.param else "etcd")
    store = EtcdPrefix(etcd, request.param)
    yield store
    for manager in store.managers:
        manager.close()


over_http = pytest.mark.parametrize("store", ["v2", "v3", "v3 of a newer etcd"], indirect=True)


def with_ipv6(value: str) -> str:
    """What a lease without IPv6 says of it in v3."""
    return re.sub('("PublicIP":"[^"]*")', r'\1,"PublicIPv6":null', value)


def node(number: int, data: object = None) -> LeaseAttrs:
    """What a node announces, by its number."""
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), backend_data=data)


def has_full_term(written: dict[str, Any]) -> bool:
    """v3 rounds what is left of a term down."""
    left: int = written["ttl"]
    return SUBNET_TTL - 600 < left <= SUBNET_TTL


def net(text: str) -> IPv4Network:
    return IPv4Network(text)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- endpoints -----------------------------------------------------------------------------------


def test_endpoints_have_keys_of_their_own_with_the_life_of_a_lease(store: EtcdPrefix) -> None:
    manager = store.manager()
    assert manager.endpoints() == {}
    manager.publish_endpoints("a-b_c=", "192.168.1.5:51820")
    manager.publish_endpoints("a-b_c=", "203.0.113.9:40000,192.168.1.5:51820")
    manager.publish_endpoints("_d=", "[2001:db8::1]:51820")  # the v2 API hides such keys
    manager.publish_endpoints("_d=", "[2001:db8::2]:51820")
    other = store.manager()
    assert other.endpoints() == {
        "a-b_c=": "203.0.113.9:40000,192.168.1.5:51820",
        "_d=": "[2001:db8::2]:51820",
    }
    assert has_full_term(store.keys.get(f"{store.prefix}/endpoints/a-b_c=") or {})
    assert list(other.read_leases()) == []


# ---- config and name -----------------------------------------------------------------------------


def test_a_missing_config_comes_with_the_command_that_writes_it(store: EtcdPrefix) -> None:
    with pytest.raises(Retryable) as caught:
        store.manager().network_config()
    api, verb = {"v2": (2, "set"), "v3": (3, "put")}[store.api]
    command = (
        f"""ETCDCTL_API={api} etcdctl {verb} {store.prefix}/config '{{"Network":"10.5.0.0/16","Backend":"""
    )
    assert f"flannelctl config set, or: {command}" in caught.value.remedy


def test_the_config_is_read_below_the_prefix_however_it_is_spelt(store: EtcdPrefix) -> None:
    text = '{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}'
    store.keys.put(f"{store.prefix}/config", text)
    store.prefix = f"/{store.prefix}///"
    manager = store.manager()
    assert manager.network_config() == parse(text)
    assert f"{store.etcd.url} under /network-" in manager.name


def test_a_config_that_makes_no_sense_may_be_corrected(store: EtcdPrefix) -> None:
    store.keys.put(f"{store.prefix}/config", "{")
    with pytest.raises(Retryable, match="JSON"):
        store.manager().network_config()


def test_etcd_manager_is_a_subnet_manager(store: EtcdPrefix) -> None:
    manager: Store = store.manager()
    assert manager.name


# ---- acquiring -----------------------------------------------------------------------------------


def test_a_lease_is_written_as_go_flanneld_writes_it(store: EtcdPrefix) -> None:
    before = clock.now()
    lease = store.manager().acquire(NETWORK, node(4), NOTHING)
    written = store.get(lease)
    assert written["value"] == store.value('{"PublicIP":"192.0.2.4"}')
    assert has_full_term(written)
    assert lease.asof == written["modifiedIndex"]
    assert lease.expires
    assert before + SUBNET_TTL <= lease.expires <= clock.now() + SUBNET_TTL
    assert lease.attrs == node(4)


def test_backend_data_and_ipv6_are_written_as_later_versions_do(store: EtcdPrefix) -> None:
    config = parse('{"Network": "10.3.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:3::/48"}')
    attrs = LeaseAttrs(
        IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"), "vxlan", {"VtepMAC": "a"}, {"VtepMAC": "b"}
    )
    subnet, ipv6_subnet = (net("10.3.7.0/24"), IPv6Network("fd00:3:0:7::/64"))
    lease = store.manager().acquire(config, attrs, (subnet, ipv6_subnet))
    assert lease.key == (subnet, ipv6_subnet)
    assert store.get("10.3.7.0-24&fd00:3:0:7::-64")["value"] == (
        '{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8::1","BackendType":"vxlan",'
        '"BackendData":{"VtepMAC":"a"},"BackendV6Data":{"VtepMAC":"b"}}'
    )
    assert store.manager().acquire(config, attrs, NOTHING).key == lease.key


def test_only_what_is_stored_is_claimed(store: EtcdPrefix) -> None:
    attrs = replace(node(1), public_ipv6=IPv6Address("2001:db8::1"))
    stored = attrs if store.api == "v3" else node(1)
    assert store.manager().acquire(NETWORK, attrs, NOTHING).attrs == stored


def test_subnets_come_from_the_range_and_avoid_what_is_taken(store: EtcdPrefix) -> None:
    taken = {net(f"10.3.{number}.0/24") for number in range(1, 26) if number not in (7, 19)}
    for number, subnet in enumerate(taken):
        store.put(str(subnet).replace("/", "-"), node(100 + number))
    got = {store.manager().acquire(NETWORK, node(number), NOTHING).subnet for number in (1, 2)}
    assert got == {net("10.3.7.0/24"), net("10.3.19.0/24")}


def test_a_node_gets_its_own_lease_back_with_its_new_attributes(store: EtcdPrefix) -> None:
    first = store.manager().acquire(NETWORK, node(1), NOTHING)
    second = store.manager().acquire(NETWORK, node(1, {"VNI": 1}), (net("10.3.25.0/24"), None))
    assert second.key == first.key
    assert second.attrs == node(1, {"VNI": 1})
    assert store.get(first)["value"] == store.value('{"PublicIP":"192.0.2.1","BackendData":{"VNI":1}}')


def test_choice_of_a_subnet_is_told_once_however_often_it_is_tried(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(1, 26):
        store.put(f"10.3.{number}.0-24", node(100 + number))
    manager = store.manager()
    for _ in range(3):
        with pytest.raises(Retryable, match="no subnet from"):
            manager.acquire(NETWORK, node(1), NOTHING)
    assert caplog.messages == ["Picking subnet in range 10.3.1.0 ... 10.3.25.0"]


def test_subnet_of_the_family_that_stays_is_kept(store: EtcdPrefix) -> None:
    config = parse(f'{{"Network": "10.3.0.0/16", "SubnetMin": "10.3.1.0", "SubnetMax": "10.3.25.0"{IPV6}}}')
    both = store.manager().acquire(config, node(1), NOTHING)
    lease = store.manager().acquire(NETWORK, node(1), both.key)
    assert lease.key == (both.subnet, None)
    assert [each.key for each in store.manager().read_leases()] == [lease.key]


def test_a_previous_subnet_outside_of_the_range_is_not_taken(store: EtcdPrefix) -> None:
    lease = store.manager().acquire(NETWORK, node(1), (net("10.4.1.0/24"), None))
    assert lease.subnet
    assert NETWORK.ranges[0].contains(lease.subnet)


@pytest.mark.parametrize("holder", ["10.3.6.0-24", "10.3.6.128-25"])
def test_a_previous_subnet_of_another_node_is_left_to_it(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture, holder: str
) -> None:
    index = store.put(holder, node(2))
    lease = store.manager().acquire(NETWORK, node(1), (net("10.3.6.0/24"), None))
    assert lease.subnet != net("10.3.6.0/24")
    assert store.get(holder)["modifiedIndex"] == index
    (line,) = warnings(caplog)
    assert "belongs to another node" in line
    assert f"{store.prefix}/subnets/{holder} (public IP 192.0.2.2)" in line


def test_a_proven_lease_is_kept_under_another_public_ip(store: EtcdPrefix) -> None:
    former = store.manager().acquire(NETWORK, node(1, {"VNI": 1}), NOTHING)
    lease = store.manager().acquire(NETWORK, node(2, {"VNI": 1}), former.key, LocalFacts(former))
    assert lease.key == former.key
    assert lease.attrs == node(2, {"VNI": 1})
    assert store.get(lease)["value"] == store.value('{"PublicIP":"192.0.2.2","BackendData":{"VNI":1}}')


@pytest.mark.parametrize(
    ("backend", "mac", "is_kept"), [("vxlan", 1, True), ("vxlan", 2, False), ("x", 1, False)]
)
def test_a_backup_that_shows_an_earlier_address_proves_the_lease_by_its_mac(
    store: EtcdPrefix, backend: str, mac: int, is_kept: bool
) -> None:
    def attributes(address: int, mac: int = 1) -> LeaseAttrs:
        return replace(node(address, {"VtepMAC": f"0a:00:00:00:00:0{mac}"}), backend_type=backend)

    shown = store.manager().acquire(NETWORK, attributes(1, mac), NOTHING)
    written = replace(shown, attrs=attributes(2))
    lease = store.manager().acquire(NETWORK, attributes(3), shown.key, LocalFacts(written))
    assert (lease.key == shown.key) is is_kept


def test_a_proven_lease_comes_before_another_one_with_our_public_ip(store: EtcdPrefix) -> None:
    former = store.manager().acquire(NETWORK, node(1), NOTHING)
    other = store.manager().acquire(NETWORK, node(2), NOTHING)
    lease = store.manager().acquire(NETWORK, node(2), former.key, LocalFacts(former))
    assert lease.key == former.key
    assert store.get(other)


@pytest.mark.parametrize(
    "meanwhile", [node(1, {"VNI": 2}), node(3, {"VNI": 1})], ids=["other data", "another node"]
)
@pytest.mark.parametrize("is_known", [True, False], ids=["before the list", "after the list"])
def test_a_lease_that_somebody_else_wrote_is_not_proven(
    store: EtcdPrefix, meanwhile: LeaseAttrs, is_known: bool
) -> None:
    former = store.manager().acquire(NETWORK, node(1, {"VNI": 1}), NOTHING)
    manager = store.manager()
    if not is_known:
        assert isinstance(manager, EtcdStore)
        manager.listing()
    index = store.put(str(former).replace("/", "-"), meanwhile)
    lease = manager.acquire(NETWORK, node(2, {"VNI": 1}), former.key, LocalFacts(former))
    assert lease.key != former.key
    assert store.get(former)["modifiedIndex"] == index


def test_a_new_subnet_avoids_the_networks_of_this_host(store: EtcdPrefix) -> None:
    local = LocalFacts(connected=tuple(net(f"10.3.{number}.0/24") for number in range(1, 25)))
    assert store.manager().acquire(NETWORK, node(1), NOTHING, local).subnet == net("10.3.25.0/24")
    # Reused and previous ones stay.
    everything = LocalFacts(connected=(net("10.3.25.0/24"), net("10.3.6.0/24")))
    assert store.manager().acquire(NETWORK, node(1), NOTHING, everything).subnet == net("10.3.25.0/24")
    previous = (net("10.3.6.0/24"), None)
    assert store.manager().acquire(NETWORK, node(2), previous, everything).key == previous


def test_new_subnet_is_not_around_the_public_ip_of_a_node_if_another_is_free(store: EtcdPrefix) -> None:
    store.put("10.9.0.192-26", LeaseAttrs(IPv4Address("10.9.0.7")))
    manager = store.manager(randrange=lambda _: 0)
    assert str(manager.acquire(FOUR, node(1), NOTHING)) == "10.9.0.64/26"
    assert str(manager.acquire(FOUR, node(2), NOTHING)) == "10.9.0.128/26"
    assert str(manager.acquire(FOUR, node(3), NOTHING)) == "10.9.0.0/26"


def test_a_lease_that_does_not_fit_a_new_config_is_given_back(store: EtcdPrefix) -> None:
    old = store.manager().acquire(NETWORK, node(1), NOTHING)
    new = store.manager().acquire(FOUR, node(1), old.key)
    assert new.subnet
    assert FOUR.ranges[0].contains(new.subnet)
    assert not store.get(old)


def test_a_lease_without_a_family_that_the_config_has_is_given_back(store: EtcdPrefix) -> None:
    old = store.manager().acquire(NETWORK, node(1), NOTHING)
    config = parse('{"Network": "10.3.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:3::/48"}')
    new = store.manager().acquire(config, node(1), old.key)
    assert None not in new.key
    assert not store.get(old)


def test_of_two_own_leases_the_one_that_fits_is_taken(store: EtcdPrefix) -> None:
    store.put("10.2.0.0-24", node(1))
    store.put("10.3.9.0-24", node(1))
    assert store.manager().acquire(NETWORK, node(1), NOTHING).subnet == net("10.3.9.0/24")


def test_of_two_own_leases_the_one_we_had_is_taken(store: EtcdPrefix) -> None:
    for key in ("10.3.7.0-24", "10.3.8.0-24", "10.3.9.0-24"):
        store.put(key, node(1))
    assert store.manager().acquire(NETWORK, node(1), NOTHING).subnet == net("10.3.7.0/24")
    had = (net("10.3.8.0/24"), None)
    assert store.manager().acquire(NETWORK, node(1), had).key == had


def test_a_reservation_is_taken_and_stays_one(store: EtcdPrefix) -> None:
    store.put("10.3.9.0-24", node(1), ttl=None)
    lease = store.manager().acquire(NETWORK, node(1, {"VNI": 2}), NOTHING)
    assert (lease.subnet, lease.expires) == (net("10.3.9.0/24"), None)
    assert "ttl" not in store.get(lease)
    assert "VNI" in store.get(lease)["value"]


def test_when_nothing_is_free_the_range_and_the_remedy_are_named(store: EtcdPrefix) -> None:
    for number, base in enumerate((0, 64, 128, 192)):
        store.put(f"10.9.0.{base}-26", node(number))
    with pytest.raises(Retryable) as caught:
        store.manager().acquire(FOUR, node(9), NOTHING)
    assert "10.9.0.0 to 10.9.0.192" in caught.value.problem
    assert "4 are leased" in caught.value.problem
    assert f"{store.prefix}/config" in caught.value.remedy


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        (["10.3.0.0-16"], ""),
        (["0.0.0.0-1"], ""),
        (["10.3.0.0-20", "10.3.1.0-24", "10.3.16.0-20", "10.3.16.0-24"], ""),
        (["0.0.0.0-0&fc00:3::-48"], IPV6),
        (["10.0.0.0-8&fc00::-16"], IPV6),
    ],
)
@pytest.mark.parametrize("value", [node(9), "garbage"], ids=["readable", "unreadable"])
def test_record_that_no_node_follows_blocks_no_join_and_is_named(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture, keys: list[str], more: str, value: LeaseAttrs | str
) -> None:
    config = parse(f'{{"Network": "10.3.0.0/16", "SubnetMin": "10.3.1.0", "SubnetMax": "10.3.25.0"{more}}}')
    for key in keys:
        store.put(key, value)
    lease = store.manager().acquire(config, node(1), NOTHING)
    assert fits(config, lease.key)
    assert str(lease.subnet) not in ("10.3.1.0/24", "10.3.16.0/24") or len(keys) == 1
    (line,) = (text for text in warnings(caplog) if text.startswith("Not counted as leased"))
    large = [key for key in keys if not key.endswith("-24")]
    assert all(f"{store.prefix}/subnets/{key}" in line for key in large)
    # A restart keeps the subnet, with and without its record of it.
    for previous in (lease.key, NOTHING):
        assert store.manager().acquire(config, node(1), previous).key == lease.key


def test_a_lease_of_our_address_from_another_host_is_warned_of(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture
) -> None:
    store.manager().acquire(NETWORK, node(1, {"VtepMAC": "02:00:00:00:00:01"}), NOTHING)
    assert not warnings(caplog)
    manager = store.manager()
    for _ in range(2):
        manager.acquire(NETWORK, node(1, {"VtepMAC": "02:00:00:00:00:02"}), NOTHING)
    assert ["-public-ip" in text for text in warnings(caplog)] == [True]


def test_twenty_nodes_that_start_at_once_get_twenty_subnets(store: EtcdPrefix) -> None:
    config = parse(f'{{"Network": "10.3.0.0/16", "SubnetMin": "10.3.1.0", "SubnetMax": "10.3.20.0"{IPV6}}}')
    leases: list[Lease] = []
    ready = threading.Barrier(20)

    def start(number: int) -> None:
        manager = store.manager(randrange=lambda free: min(number % 4, free - 1))
        ready.wait()
        while True:
            try:
                leases.append(manager.acquire(config, node(number), NOTHING))
            except Retryable:
                continue
            return

    threads = [threading.Thread(target=start, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len({lease.subnet for lease in leases}) == 20
    assert len({lease.ipv6_subnet for lease in leases}) == 20
    assert len(nodes(store)) == 20


def test_of_two_new_leases_with_one_subnet_in_common_the_later_is_given_back(store: EtcdPrefix) -> None:
    dual = parse(f'{{"Network": "10.3.0.0/16"{IPV6}}}')
    common = IPv6Network("fc00:3:0:6::/64")
    slow = store.manager()
    assert slow.stored(IPv4Address("192.0.2.1")) is None
    first = store.manager().acquire(dual, node(2), (net("10.3.6.0/24"), common))
    second = slow.acquire(dual, node(1), (net("10.3.7.0/24"), common))
    assert first.key == (net("10.3.6.0/24"), common)
    assert second.subnet == net("10.3.7.0/24")
    assert second.ipv6_subnet not in (None, common)
    assert len(nodes(store)) == 2


@pytest.mark.parametrize("store", ["v3", "v3 over gRPC"], indirect=True)
@pytest.mark.parametrize("is_used", [False, True])
def test_restored_lease_is_given_back_if_another_node_had_its_subnet_before(
    is_used: bool, store: EtcdPrefix
) -> None:
    dual = parse(f'{{"Network": "10.3.0.0/16"{IPV6}}}')
    mine = net("10.3.6.0/24"), IPv6Network("fc00:3:0:7::/64")
    store.put("10.3.6.0-24&fc00:3:0:6::-64", node(2))
    store.put("10.3.6.0-24&fc00:3:0:7::-64", node(1))
    lease = store.manager().acquire(dual, node(1), mine if is_used else NOTHING)
    assert (lease.key == mine) is is_used, "containers have addresses of the subnet in subnet.env"
    assert (lease.subnet == mine[0]) is is_used
    assert len(nodes(store)) == 2


def test_loser_of_a_race_takes_another_subnet(store: EtcdPrefix, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(V(1))
    slow = store.manager()
    assert slow.stored(IPv4Address("192.0.2.1")) is None
    store.manager().acquire(NETWORK, node(2), (net("10.3.6.0/24"), None))
    assert slow.acquire(NETWORK, node(1), (net("10.3.6.0/24"), None)).subnet != net("10.3.6.0/24")
    assert any("quicker" in record.getMessage() and record.levelno == V(1) for record in caplog.records)


def test_of_two_hosts_with_one_address_the_later_learns_of_the_earlier(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture
) -> None:
    first = store.manager().acquire(NETWORK, node(1, "a"), NOTHING)
    slow = store.manager()
    slow.stored(IPv4Address("192.0.2.1"))
    store.manager().acquire(NETWORK, node(1, "a"), NOTHING)
    caplog.clear()
    assert slow.acquire(NETWORK, node(1, "b"), NOTHING).key == first.key
    assert any("another node has this address" in text for text in warnings(caplog))


@over_http
def test_a_new_lease_is_compared_with_others_even_if_the_answer_was_lost(store: EtcdPrefix) -> None:
    dual = parse(f'{{"Network": "10.3.0.0/16"{IPV6}}}')
    common = IPv6Network("fc00:3:0:6::/64")
    relay = Relay(store.etcd.url)
    with server(relay) as url:
        slow = store.manager(url)
        slow.stored(IPv4Address("192.0.2.1"))
        store.manager().acquire(dual, node(2), (net("10.3.6.0/24"), common))
        relay.answers_to_lose = 1 if store.api == "v2" else 2
        with pytest.raises(Retryable):
            slow.acquire(dual, node(1), (net("10.3.7.0/24"), common))
        relay.answers_to_lose = 0
        lease = slow.acquire(dual, node(1), (net("10.3.7.0/24"), common))
        slow.close()
    assert lease.ipv6_subnet not in (None, common)
    assert len(nodes(store)) == 2


#: Answers to a write to lose: v3 repeats it, over a new connection.
LOST = 2


@over_http
def test_a_create_whose_answer_was_lost_is_found_again(store: EtcdPrefix) -> None:
    relay = Relay(store.etcd.url)
    relay.answers_to_lose = LOST
    with server(relay) as url:
        manager = store.manager(url)
        with pytest.raises(Retryable):
            manager.acquire(NETWORK, node(1), NOTHING)
        relay.answers_to_lose = 0
        lease = manager.acquire(NETWORK, node(1), NOTHING)
        manager.close()
    assert [each["key"].rpartition("/")[2] for each in nodes(store)] == [str(lease).replace("/", "-")]


class RacingRelay(Relay):
    """Does something before it passes the second write on, which repeats the first one."""

    before_second: Callable[[], object] | None = None
    _writes = 0

    def rewritten(self, data: bytes) -> bytes:
        if self.before_second is not None and self._is_write(self.requests[-1]):
            self._writes += 1
            if self._writes == 2:
                self.before_second()
        return data


@over_http
@pytest.mark.parametrize("is_taken", [False, True], ids=["unchanged", "taken by another node"])
def test_write_that_is_repeated_over_a_new_connection_overwrites_nothing_newer(
    store: EtcdPrefix, is_taken: bool
) -> None:
    relay = RacingRelay(store.etcd.url)
    with server(relay) as url:
        manager = store.manager(url)
        lease = manager.acquire(NETWORK, node(1), NOTHING)
        name = str(lease).replace("/", "-")
        relay.before_second = lambda: store.put(name, node(9)) if is_taken else None
        relay.answers_to_lose = 1
        try:
            manager.renew(replace(lease, attrs=node(2)))
        except LeaseTaken:
            assert is_taken
        assert relay.answers_to_lose == 0
        manager.close()
    assert f'"192.0.2.{9 if is_taken else 2}"' in store.get(lease)["value"]


def test_removal_that_is_repeated_over_a_new_connection_removes_nothing_newer(etcd: LocalEtcd) -> None:
    store, relay = EtcdPrefix(etcd, "v3"), RacingRelay(etcd.url)
    with server(relay) as url:
        manager = store.manager(url)
        assert isinstance(manager, EtcdStore)
        lease = manager.acquire(NETWORK, node(1), NOTHING)
        relay.before_second = lambda: store.put(str(lease).replace("/", "-"), node(9))
        relay.answers_to_lose = 1
        with pytest.raises(Conflict):
            manager.give_back(lease)
        manager.close()
    assert relay.answers_to_lose == 0
    assert '"192.0.2.9"' in store.get(lease)["value"]


class LaggingRelay(Relay):
    """Answers one listing with what etcd said to the first one, as a member that lags behind."""

    lags = False
    _is_list = False
    _first = b""

    def rewritten(self, data: bytes) -> bytes:
        self._is_list = b"recursive=true" in data or b'"range_end"' in data
        return data

    def answered(self, data: bytes) -> bytes:
        if self._is_list:
            self._first = self._first or data
            if self.lags:
                self.lags = False
                return self._first
        return data


@over_http
def test_a_create_whose_answer_was_lost_is_found_again_behind_a_stale_read(store: EtcdPrefix) -> None:
    relay = LaggingRelay(store.etcd.url)
    with server(relay) as url:
        numbers = itertools.count()
        manager = store.manager(url, randrange=lambda _: next(numbers))
        assert isinstance(manager, EtcdStore)
        assert manager.listing().leases == {}
        relay.answers_to_lose = LOST
        with pytest.raises(Retryable):
            manager.acquire(NETWORK, node(1), NOTHING)
        relay.answers_to_lose = 0
        relay.lags = True
        manager.acquire(NETWORK, node(1), NOTHING)
        assert not relay.lags
        manager.close()
    assert len(nodes(store)) == 1


@over_http
@pytest.mark.parametrize("because", ["another node has it", "the network has moved"])
def test_a_create_whose_answer_was_lost_is_not_repeated_where_the_subnet_is_not_to_be_had(
    store: EtcdPrefix, because: str
) -> None:
    relay = Relay(store.etcd.url)
    relay.answers_to_lose = LOST
    config = NETWORK
    with server(relay) as url:
        manager = store.manager(url)
        with pytest.raises(Retryable):
            manager.acquire(config, node(1), NOTHING)
        relay.answers_to_lose = 0
        (lost,) = nodes(store)
        store.keys.delete(lost["key"])
        if because == "another node has it":
            store.put(lost["key"].rpartition("/")[2], node(2))
        else:
            config = FOUR
        lease = manager.acquire(config, node(1), NOTHING)
        manager.close()
    assert lease.subnet is not None
    assert config.ranges[0].contains(lease.subnet)
    assert not lost["key"].endswith(str(lease).replace("/", "-"))


def nodes(store: EtcdPrefix) -> list[dict[str, Any]]:
    return store.keys.children(f"{store.prefix}/subnets")


def test_values_that_make_no_sense_keep_their_subnet(
    store: EtcdPrefix, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse('{"Network": "10.9.0.0/24", "SubnetLen": 26}')  # .64, .128 and .192
    store.put("10.9.0.64-26", "{")
    store.put("10.9.0.128-26", '{"PublicIP": "nonsense"}')
    store.put("no-lease", "{}")
    store.keys.put(f"{store.prefix}/subnets/folder/10.9.0.192-26", "{}")
    manager = store.manager(randrange=lambda _: 0)
    for _ in range(2):
        assert manager.acquire(config, node(1), NOTHING).subnet == net("10.9.0.192/26")
    nested = "folder" if store.api == "v2" else "folder/10.9.0.192-26"
    for key in ("10.9.0.64-26", "10.9.0.128-26", "no-lease", nested):
        assert sum(f"{store.prefix}/subnets/{key} " in text for text in warnings(caplog)) == 1


# ---- stored --------------------------------------------------------------------------------------


def test_stored_attributes_are_those_of_the_lowest_lease(store: EtcdPrefix) -> None:
    store.put("10.3.20.0-24", '{"PublicIP":"192.0.2.1","BackendType":"high"}')
    store.put("10.3.3.0-24", '{"PublicIP":"192.0.2.1","BackendType":"low"}')
    manager = store.manager()
    found = manager.stored(IPv4Address("192.0.2.1"))
    assert found
    assert found.backend_type == "low"
    assert manager.stored(IPv4Address("192.0.2.2")) is None
    assert manager.stored(None) is None


@over_http
def test_one_list_serves_the_whole_start(store: EtcdPrefix) -> None:
    store.put("10.3.3.0-24", node(3))
    relay = Relay(store.etcd.url)
    events: list[Any] = []
    with server(relay) as url:
        manager = store.manager(url)
        manager.stored(IPv4Address("192.0.2.1"))
        lease = manager.acquire(NETWORK, node(1), NOTHING)
        thread = threading.Thread(
            target=ignore_cancelled, args=(lambda: manager.watch(events.extend, lambda: None),)
        )
        thread.start()
        wait_for(lambda: len(events) == 2, 5, "the snapshot and our own lease")
        manager.close()
        thread.join(60)
    assert isinstance(events[0], Snapshot)
    assert [each.subnet for each in events[0].leases] == [net("10.3.3.0/24")]
    heard = events[1].lease
    assert heard == replace(lease, expires=heard.expires, created=heard.created)
    if store.api == "v2":
        lists = relay.asked("GET", "/subnets?", "recursive=true", "sorted=false", "quorum=true")
        assert len(lists) == 1
        written = f"PUT /v2/keys{store.prefix}/subnets/{dashed(lease)}?prevExist=false"
        assert relay.asked("PUT", "?prevExist=false") == [written]
        first_poll = relay.asked("wait=true")[0]
        assert "recursive=true" in first_poll
        assert f"waitIndex={lease.asof}" in first_poll
    else:
        # None for the term of a peer's lease.
        assert relay.requests == [
            f"POST /v3/{each}" for each in ("kv/range", "lease/grant", "kv/txn", "watch")
        ]


def dashed(lease: Lease) -> str:
    return str(lease).replace("/", "-")


def ignore_cancelled(call: Callable[[], object]) -> None:
    with pytest.raises(Cancelled):
        call()


# ---- renewing ------------------------------------------------------------------------------------


def acquired(store: EtcdPrefix, config: Config = NETWORK) -> tuple[Store, Lease]:
    manager = store.manager()
    return manager, manager.acquire(config, node(1, {"VNI": 1}), NOTHING)


def test_a_renewed_lease_has_its_full_term_and_its_attributes(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    value = store.get(lease)["value"]
    store.put(dashed(lease), value, ttl=100)
    begin = clock.now()
    renewed = manager.renew(lease)
    end = clock.now()
    assert has_full_term(store.get(lease))
    assert store.get(lease)["value"] == value
    assert renewed == replace(lease, expires=renewed.expires, asof=store.get(lease)["modifiedIndex"])
    assert renewed.expires
    assert begin + SUBNET_TTL - 2 < renewed.expires < end + SUBNET_TTL + 2


only_v3 = pytest.mark.parametrize("store", ["v3", "v3 of a newer etcd", "v3 over gRPC"], indirect=True)


@only_v3
def test_a_renewal_in_v3_keeps_the_lease_alive_and_tells_nobody(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    written = store.get(lease)
    # etcd counts whole seconds: a lease that is a second older by its count may be a little younger by ours.
    wait_for(lambda: store.get(lease)["ttl"] < SUBNET_TTL - 2, 30, "the lease to age")
    renewed = manager.renew(lease)
    assert renewed.expires
    assert lease.expires
    assert renewed.expires > lease.expires + 1
    assert renewed == replace(lease, expires=renewed.expires, created=renewed.created)
    again = store.get(lease)
    assert (again["lease"], again["modifiedIndex"]) == (written["lease"], written["modifiedIndex"])


@only_v3
def test_a_lease_that_was_left_behind_does_not_take_the_key_along(store: EtcdPrefix) -> None:
    _, lease = acquired(store)
    left = store.get(lease)["lease"]
    acquired(store)  # as after a restart
    V3Keys(store.etcd.post).revoke(left)
    assert has_full_term(store.get(lease))


@only_v3
def test_changed_attributes_are_written_with_a_new_etcd_lease(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    written = store.get(lease)
    manager.renew(replace(lease, attrs=node(1, "new")))
    again = store.get(lease)
    assert again["modifiedIndex"] > written["modifiedIndex"]
    assert again["lease"] != written["lease"]


def test_lease_with_a_former_address_of_ours_is_renewed_whoever_brought_it_back(store: EtcdPrefix) -> None:
    """As after a write whose answer got lost, or in an etcd that was restored from a backup."""
    manager, lease = acquired(store)
    former = store.get(lease)["value"]
    renewed = manager.renew(replace(lease, attrs=node(2)))
    store.put(dashed(lease), former)
    assert manager.renew(renewed).attrs == node(2)
    store.put(dashed(lease), former.replace("192.0.2.1", "192.0.2.3"))
    with pytest.raises(LeaseTaken):
        manager.renew(renewed)


def test_lease_that_a_backup_shows_as_a_former_nodes_is_renewed(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    index = store.put(dashed(lease), node(2))
    with pytest.raises(LeaseTaken):
        manager.renew(lease)
    renewed = manager.renew(replace(lease, asof=index + 1))
    assert renewed.attrs == lease.attrs
    assert store.get(lease)["modifiedIndex"] == renewed.asof > index


def test_a_reservation_is_left_alone_unless_we_changed(store: EtcdPrefix) -> None:
    store.put("10.3.9.0-24", '{"PublicIP":"192.0.2.1"}', ttl=None)
    manager = store.manager()
    lease = manager.acquire(NETWORK, node(1), NOTHING)
    renewed = manager.renew(lease)
    assert renewed == replace(lease, created=renewed.created)
    changed = manager.renew(replace(lease, attrs=node(1, "new")))
    assert (changed.expires, changed.attrs.backend_data) == (None, "new")
    assert "ttl" not in store.get(lease)


def test_reservation_of_an_operator_stays_one(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    store.put(dashed(lease), store.get(lease)["value"], ttl=None)
    assert manager.renew(lease).expires is None
    assert "ttl" not in store.get(lease)


def test_renewal_overwrites_only_its_last_known_value(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    moved = manager.renew(replace(lease, attrs=node(7)))
    assert moved.attrs == node(7)
    index = store.put(dashed(lease), node(2))
    assert manager.renew(replace(moved, asof=index)).attrs == node(7)


def test_an_unreadable_value_of_our_lease_is_repaired(store: EtcdPrefix) -> None:
    manager, lease = acquired(store)
    store.put(dashed(lease), "{")
    manager.renew(lease)
    assert json.loads(store.get(lease)["value"])["PublicIP"] == "192.0.2.1"
