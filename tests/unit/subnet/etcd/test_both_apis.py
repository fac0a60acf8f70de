"""What a node in both APIs makes of what each of them says, over two files in place of an etcd."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from flanneld.compat.glog import V
from flanneld.config import Config
from flanneld.errors import Cancelled, NoAnswer, Retryable
from flanneld.model import Event, IPAddress, Lease, LeaseAttrs, Removed
from flanneld.runtime import clock
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, open_file
from flanneld.subnet.etcd.both import BothStores
from flanneld.subnet.etcd.keys import KeyReply, NoConfig, NoSuchApi
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.store import Deliver
from tests.clock import Clock

CONFIG = '{"Network":"10.5.0.0/16"}'
KEY = f"{PREFIX}/subnets/10.5.1.0-24"
ADDRESSES: frozenset[IPAddress] = frozenset({IPv4Address("203.0.113.2")})
DOWN, LACKING = NoAnswer("it is down", "start it"), NoSuchApi("it has no such API", "switch it on")


def attrs(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), backend_type="host-gw")


def value(number: int) -> str:
    return json.dumps({"PublicIP": f"192.0.2.{number}", "BackendType": "host-gw"})


class Api(EmbeddedClient):
    """One API: a file, which answers each request with ``failure`` if there is one."""

    def __init__(self, path: Path, api: str) -> None:
        super().__init__(open_file(str(path / api), create=True))
        self.api = api
        self.failure: Retryable | None = None
        self.is_full = False

    def check(self) -> None:
        super().check()
        if self.failure is not None:
            raise self.failure

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        if self.is_full:
            raise Retryable("it is full")
        return super().create(key, value, ttl)

    def put(self, key: str, text: str, ttl: int | None = None) -> None:
        self.store.create(key, text, ttl)

    def owners(self) -> dict[str, str]:
        """The public IP of each lease, by its subnet."""
        found = self.store.below(f"{PREFIX}/subnets")[0]
        return {each.key.rpartition("/")[2]: json.loads(each.value)["PublicIP"] for each in found}


class Side(EtcdStore):
    """A store on one API whose watch is alive, or fails, whenever a test says so."""

    broken: Retryable | None = None

    def __init__(self, client: Api) -> None:
        super().__init__(client, PREFIX, "two files", pause_time=0.0, addresses=lambda: ADDRESSES)

    @property
    def problem(self) -> Retryable | None:
        return self.broken

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        del deliver
        self.beat = alive


class Node:
    """A node in both APIs."""

    def __init__(self, path: Path) -> None:
        self.apis = self.v3, self.v2 = Api(path, "v3"), Api(path, "v2")
        self.sides = [Side(each) for each in self.apis]
        self.pauses: list[float] = []
        self.is_closed = False
        self.store = BothStores(*self.sides, pause=lambda _, seconds: self._pause(seconds))

    def api(self, name: str) -> Api:
        return next(each for each in self.apis if each.api == name)

    def join(self, number: int = 1) -> Lease:
        return self.store.acquire(self.config(), attrs(number), (None, None))

    def config(self) -> Config:
        return self.store.network_config()

    def _pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return self.is_closed


@pytest.fixture
def empty(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def node(empty: Node) -> Node:
    empty.v3.put(f"{PREFIX}/config", CONFIG)
    return empty


# ---- the config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_v3", "in_v2", "kind", "words"),
    [
        (None, None, Retryable, "no network config at /coreos.com/network/config, in neither"),
        (LACKING, None, Retryable, "no network config at /coreos.com/network/config, in neither"),
        (None, LACKING, Retryable, "no network config at /coreos.com/network/config, in neither"),
        (LACKING, LACKING, NoSuchApi, "it has no such API; switch it on"),
        (DOWN, None, NoAnswer, "it is down; start it"),
        (None, DOWN, NoAnswer, "it is down; start it"),
        (LACKING, DOWN, NoAnswer, "it is down; start it"),
        (DOWN, LACKING, NoAnswer, "it is down; start it"),
    ],
)
def test_without_a_config_the_worst_of_both_problems_is_told(
    empty: Node, in_v3: Retryable | None, in_v2: Retryable | None, kind: type[Retryable], words: str
) -> None:
    empty.v3.failure, empty.v2.failure = in_v3, in_v2
    with pytest.raises(Retryable, match=words) as caught:
        empty.config()
    assert type(caught.value) is kind
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("failure", "warnings", "names"),
    [
        (None, [], ["v3", "v2"]),
        (NoConfig("none"), [], ["v3", "v2"]),
        (DOWN, ["Only one API of etcd is usable; v2: it is down; start it"], ["v3", "v2"]),
        (LACKING, ["Only one API of etcd is usable; v2: it has no such API; switch it on"], ["v3"]),
    ],
)
def test_api_that_is_missing_is_left_out_and_named_once(
    node: Node,
    failure: Retryable | None,
    warnings: list[str],
    names: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    node.v2.failure = failure
    for _ in range(2):
        assert node.config().source == CONFIG
    assert caplog.messages == warnings
    assert node.store.name == " and ".join(f"etcd {each} at two files under {PREFIX}" for each in names)


def test_configs_must_say_the_same_and_that_of_v3_is_taken(node: Node) -> None:
    node.v2.put(f"{PREFIX}/config", CONFIG.replace(":", " : "))
    assert node.config().source == CONFIG
    found = node.v2.store.get(f"{PREFIX}/config")[0]
    node.v2.store.replace(found.key, CONFIG.replace("10.5", "10.6"), None, found.modified)
    with pytest.raises(Retryable, match="are different; make them equal, or remove the one that is wrong"):
        node.config()


# ---- our lease -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_new_node_joins_only_if_it_can_read_both(node: Node, name: str) -> None:
    config = node.config()
    node.api(name).failure = DOWN
    with pytest.raises(NoAnswer, match="it is down"):
        node.store.acquire(config, attrs(1), (None, None))
    assert node.v3.owners() == node.v2.owners() == {}


@pytest.mark.parametrize(("name", "other"), [("v3", "v2"), ("v2", "v3")])
def test_lease_that_one_api_has_is_kept_while_the_other_is_down_and_written_there_later(
    node: Node, name: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.api(name).put(KEY, value(1), 600)
    config = node.config()
    node.api(other).failure = DOWN
    lease = node.store.acquire(config, attrs(1), (None, None))
    assert (str(lease), node.api(other).owners()) == ("10.5.1.0/24", {})
    assert caplog.text.count(f"Our lease {lease} is not in {other} yet: it is down; start it") == 1
    with pytest.raises(Retryable, match=f"{other}: it is down"):
        node.store.renew(lease)
    written = node.api(name).store.get(KEY)[0].modified
    node.api(other).failure = None
    renewed = node.store.renew(lease)
    assert (renewed.key, node.api(other).owners()) == (lease.key, {"10.5.1.0-24": "192.0.2.1"})
    assert node.api(name).store.get(KEY)[0].modified == written


def test_leases_are_listed_again_only_once_a_race_is_lost(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(V(1))
    config = node.config()
    assert node.store.stored(IPv4Address("192.0.2.2")) is None
    node.v3.put(KEY, value(2))
    assert node.store.stored(IPv4Address("192.0.2.2")) is None
    assert list(node.store.read_leases()) == []
    wanted = IPv4Network("10.5.1.0/24")
    assert node.store.acquire(config, attrs(1), (wanted, None)).subnet != wanted
    assert sum(each.startswith("Another node was quicker") for each in caplog.messages) == 1
    assert node.store.stored(IPv4Address("192.0.2.2")) == attrs(2)


def test_lease_that_is_not_written_anywhere_is_an_error(node: Node) -> None:
    for each in node.apis:
        each.is_full = True
    with pytest.raises(Retryable, match=r"the lease .* could not be written; see the log above"):
        node.join()


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_lease_that_vanished_from_one_api_is_restored_after_a_second(
    node: Node, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    lease, told = node.join(), list[Event]()
    hear = node.store.hearing_own(lease, told.extend)
    node.store.renew(lease)
    assert node.pauses == []
    api = node.api(name)
    found = api.store.below(f"{PREFIX}/subnets")[0][0]
    api.store.remove(found.key, found.modified)
    hear(name, [Removed(lease.key)])
    assert f"Our lease {lease} vanished from etcd {name}: restoring it" in caplog.text
    assert node.store.renew(lease).key == lease.key
    assert (node.pauses, len(api.owners())) == ([1.0], 1)
    hear(name, [Removed(lease.key)])
    node.is_closed = True
    with pytest.raises(Cancelled):
        node.store.renew(lease)


def test_lease_that_vanished_from_both_apis_is_not_restored(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    lease, told = node.join(), list[Event]()
    hear = node.store.hearing_own(lease, told.extend)
    for each in ("v2", "v3"):
        hear(each, [Removed(lease.key)])
    assert told[-1] == Removed(lease.key)
    assert caplog.text.count("restoring it") == 1
    with pytest.raises(Retryable, match=f"the lease {lease} has gone from both APIs"):
        node.store.renew(lease)


def test_attributes_of_a_node_are_those_of_v3_if_both_have_some(node: Node) -> None:
    node.config()
    node.v2.put(KEY, value(1))
    assert node.store.stored(IPv4Address("192.0.2.1")) == attrs(1)
    assert node.store.stored(IPv4Address("192.0.2.2")) is None


# ---- endpoints -------------------------------------------------------------------------------------


def test_endpoints_of_v3_count_if_both_have_some(node: Node) -> None:
    node.config()
    for each, port in zip(node.sides, (1, 2), strict=True):
        each.publish_endpoints("one=", f"203.0.113.7:{port}")
    node.sides[1].publish_endpoints("two=", "203.0.113.8:1")
    assert node.store.endpoints() == {"one=": "203.0.113.7:1", "two=": "203.0.113.8:1"}


@pytest.mark.parametrize(("down", "other"), [("v3", "v2"), ("v2", "v3")])
def test_endpoints_are_published_in_one_while_the_other_is_down(node: Node, down: str, other: str) -> None:
    node.config()
    node.api(down).failure = DOWN
    with pytest.raises(NoAnswer):
        node.store.publish_endpoints("one=", "203.0.113.7:1")
    assert node.store.endpoints() == {"one=": "203.0.113.7:1"}
    node.api(other).failure = DOWN
    with pytest.raises(NoAnswer):
        node.store.endpoints()


# ---- watching --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_v3", "in_v2", "told"),
    [(None, None, None), (DOWN, None, DOWN), (None, LACKING, LACKING), (DOWN, LACKING, DOWN)],
)
def test_problem_of_either_watch_is_that_of_both(
    node: Node, in_v3: Retryable | None, in_v2: Retryable | None, told: Retryable | None
) -> None:
    node.sides[0].broken, node.sides[1].broken = in_v3, in_v2
    assert node.store.problem is told


def test_addresses_are_those_of_the_servers_of_both(node: Node) -> None:
    assert node.store.addresses == ADDRESSES


def test_watch_of_both_is_alive_as_long_as_neither_is_silent(node: Node) -> None:
    moved, alive, (one, other) = Clock(), list[float](), node.sides
    moved.time = 10.0
    with clock.replaced(moved):
        with suppress(Cancelled):
            node.store.watch(lambda _: None, lambda: alive.append(moved.time))
        for time, side in ((10.0, one), (189.0, one), (190.0, one), (191.0, one), (192.0, other)):
            moved.time = time
            side.beat()
    assert alive == [10.0, 189.0, 192.0]
