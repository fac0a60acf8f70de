"""Servers of stores that drip, which are left, and those behind a slow link, which are not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from flanneld.errors import NoAnswer, Retryable
from flanneld.option_values import RemoteServer
from flanneld.runtime.sockets import interruptible
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.remote import connection
from flanneld.subnet.remote.connection import RemoteAnswer, RemoteClient, RemoteServers, accepted
from tests.etcd_clients import opened, transport_to
from tests.lab.etcd_v3 import V3Keys
from tests.lab.listener import end
from tests.lab.wait import wait_for
from tests.local_etcd import DEADLINE, LocalEtcd, Relay, running_etcd, server
from tests.unit.subnet.remote.servers import CONFIG, ROOT, Running, running_server

#: Bytes that pass before a server begins to drip: a head, and with a list a part of the body.
INSIDE_A_BODY = 3000
VALUE = json.dumps(
    {"PublicIP": "192.0.2.1", "BackendType": "vxlan", "BackendData": {"VtepMAC": "02:00:00:00:00:01"}}
)
#: Bytes that drip from a server, 20 a second.
LONGEST_DRIP = 600
#: Leases in a network of 10.0.0.0/8 with /24 for each node.
ALL_LEASES = 65_434
APIS = [("v2", "json"), ("v3", "json"), ("v3", "grpc")]


class Throttle(Relay):
    """Passes on ``at_once`` bytes of each connection, and then ``size`` bytes every ``pause`` seconds.

    A single byte at a time is passed on for so long only that a client without the rule fails its test.
    """

    def __init__(self, target: str, at_once: int, size: int, pause: float) -> None:
        super().__init__(target)
        self._at_once, self._size, self._pause = at_once, size, pause
        self._left = LONGEST_DRIP if size == 1 else 1 << 30
        self._gone = threading.Event()

    def close(self) -> None:
        self._gone.set()

    def _pass_back(self, etcd: socket.socket, client: socket.socket) -> None:
        left = self._at_once
        with suppress(OSError):
            while self._left >= 0 and not self._gone.is_set() and (data := etcd.recv(65536)):
                client.sendall(data[:left])
                for start in range(left, len(data), self._size):
                    self._left -= 1
                    if self._left < 0 or self._gone.wait(self._pause):
                        break
                    client.sendall(data[start : start + self._size])
                left = max(0, left - len(data))
        end(client)


@contextmanager
def throttled(target: str, at_once: int, size: int = 1, pause: float = 0.05) -> Iterator[str]:
    throttle = Throttle(target, at_once, size, pause)
    with server(throttle) as url:
        yield url
        throttle.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule, ten times as fast."""
    monkeypatch.setattr(interruptible, "WITHIN", 1.0)
    monkeypatch.setattr(connection, "ANSWER_TIME", 1.0)


# ---- etcd ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many() -> Iterator[LocalEtcd]:
    """An etcd with leases in both APIs."""
    with running_etcd() as etcd:
        for number in range(400):
            etcd.put(f"/list/{number:05}", VALUE)
        fill(etcd, 2000)
        yield etcd


def fill(etcd: LocalEtcd, count: int) -> None:
    keys = V3Keys(etcd.post)
    for start in range(0, count, 100):
        keys.put_all({f"/list/{number:05}": VALUE for number in range(start, min(count, start + 100))})


def listed(api: str, transport: str, *urls: str, read: float = 1.0) -> Callable[[], int]:
    options = EtcdTimeouts(connect=20, read=read)
    client = open_client(api, transport_to(*urls, timeouts=options, transport=transport))
    opened.callback(client.cancel)
    return lambda: len(client.fetch("/list", recursive=True).children)


@pytest.mark.parametrize("at_once", [0, INSIDE_A_BODY], ids=["head", "body"])
def test_etcd_that_drips_over_grpc_is_left(quick: None, many: LocalEtcd, at_once: int) -> None:
    del quick
    with throttled(many.url, at_once) as url:
        with pytest.raises(Retryable, match=r"no answer within|less than 4 KiB in 1 s"):
            listed("v3", "grpc", url)()
        both = listed("v3", "grpc", url, many.url)

        def answer() -> int:
            with suppress(Retryable):  # a busy etcd may take longer than such a client waits
                return both()
            return 0

        assert wait_for(answer, DEADLINE) == 2000


@pytest.mark.parametrize(("api", "transport"), APIS)
def test_list_of_etcd_behind_a_slow_link_arrives(
    quick: None, many: LocalEtcd, api: str, transport: str
) -> None:
    """It takes longer than an answer without progress may."""
    del quick
    size = 2_000 if api == "v2" else 10_000
    with throttled(many.url, 0, size=size, pause=0.05) as url:
        assert listed(api, transport, url, read=5.0)() == (400 if api == "v2" else 2000)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["json", "grpc"])
def test_all_leases_that_a_network_can_have_arrive_over_a_slow_link(transport: str) -> None:
    """At 2 Mbit/s it takes a minute and more."""
    with running_etcd() as etcd:
        fill(etcd, ALL_LEASES)
        with throttled(etcd.url, 0, size=12_500, pause=0.05) as url:
            assert listed("v3", transport, url, read=5.0)() == ALL_LEASES


# ---- lease servers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lease_server(many: LocalEtcd) -> Iterator[Running]:
    many.put(f"{ROOT}/config", CONFIG)
    for number in range(40):
        many.put(f"{ROOT}/subnets/10.5.{number}.0-24", VALUE, 86400)
    with running_server(many, "v2") as running:
        yield running


def client_to(*ports: int) -> Callable[..., RemoteAnswer]:
    found = RemoteClient(RemoteServers(tuple(RemoteServer("127.0.0.1", port) for port in ports), None))
    opened.callback(found.cancel)
    return partial(found.ask, "GET", understand=accepted)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("at_once", [0, 120], ids=["head", "body"])
def test_watch_of_a_lease_server_that_drips_ends_and_the_next_one_is_asked(
    quick: None, lease_server: Running, many: LocalEtcd, at_once: int
) -> None:
    del quick
    cursor = lease_server.cursor()
    with throttled(f"http://127.0.0.1:{lease_server.port}", at_once) as url:
        both = client_to(port_of(url), lease_server.port)
        failed = threading.Event()

        def watch() -> None:
            with suppress(NoAnswer):
                both(f"/v1/_/leases?next={cursor}", alive=lambda: None)
                return
            failed.set()

        thread = threading.Thread(target=watch)
        thread.start()
        many.put(f"{ROOT}/subnets/10.5.200.0-24", VALUE, 86400)
        assert failed.wait(DEADLINE)
        thread.join()
        answer = both(f"/v1/_/leases?next={cursor}", alive=lambda: None)
        assert str(answer.server.port) == str(lease_server.port)
