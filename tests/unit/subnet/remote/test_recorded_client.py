"""What Go flannel 0.6.2's client was recorded to ask: ours asks the same, and understands its server."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from flanneld.errors import Cancelled, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.option_values import RemoteServer
from flanneld.runtime import clock
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from tests.lab.impostor import http
from tests.local_etcd import answering, server
from tests.unit.subnet.remote.servers import exchange

ATTRS = LeaseAttrs(public_ip=IPv4Address("10.99.0.11"), backend_type="host-gw")
SUBNET = IPv4Network("10.5.12.0/24")
NOTHING = (None, None)


def wire(recorded: dict[str, Any]) -> bytes:
    """The bytes of a recorded answer."""
    answer: str = recorded["answer"]
    body = answer.encode()
    headers = recorded["headers"] | {
        "Date": "Mon, 01 Aug 2016 10:00:00 GMT",
        "Content-Length": str(len(body)),
    }
    lines = [f"HTTP/1.1 {recorded['status']} {HTTPStatus(recorded['status']).phrase}"]
    lines += [f"{name}: {text}" for name, text in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Script:
    """Answers each request as recorded and notes it; a request that was never answered stays open."""

    def __init__(self, *numbers: int) -> None:
        self._recorded = {(each["method"], each["target"]): each for each in map(exchange, numbers)}
        self.asked: list[dict[str, Any]] = []

    def add(self, method: str, target: str, number: int) -> None:
        """Answer another request as that one."""
        self._recorded[method, target] = exchange(number)

    def __call__(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as reader:
            while line := reader.readline():
                method, target, _ = line.decode().split()
                headers = {}
                while header := reader.readline().strip():
                    name, _, text = header.decode().partition(": ")
                    headers[name] = text
                body = reader.read(int(headers.get("Content-Length", 0))).decode()
                asked = {"method": method, "target": target, "body": body}
                self.asked.append(asked | {"content_type": headers.get("Content-Type", "")})
                recorded = self._recorded.get((method, target))
                if recorded is None or "status" not in recorded:
                    connection.recv(1)  # until the client goes
                    return
                connection.sendall(wire(recorded))


def same_request(asked: dict[str, Any], number: int) -> None:
    recorded = {name: exchange(number)[name] for name in asked}
    assert timeless(asked) == timeless(recorded)


def timeless(request: dict[str, Any]) -> dict[str, Any]:
    return request | {"body": re.sub(r'"Expiration":"(?!0001)[^"]*"', "T", request["body"])}


def manager_of(*urls: str) -> RemoteStore:
    servers = [url.removeprefix("http://").split(":") for url in urls]
    return RemoteStore(RemoteOptions(tuple(RemoteServer(host, int(port)) for host, port in servers)), 0.05)


@contextmanager
def following(
    manager: RemoteStore, lease: Lease | None = None, then: Iterable[Callable[[], None]] = ()
) -> Iterator[SimpleQueue[list[Event]]]:
    """Watch in a thread; with each delivery one of ``then`` is called."""
    events: SimpleQueue[list[Event]] = SimpleQueue()
    deeds = iter(then)

    def deliver(told: list[Event]) -> None:
        events.put(told)
        next(deeds, lambda: None)()

    def run() -> None:
        with suppress(Cancelled):
            if lease is None:
                manager.watch(deliver, lambda: None)
            else:
                manager.watch_own(lease, deliver, lambda: None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield events
    finally:
        manager.close()
        thread.join(5)
        assert not thread.is_alive()


def test_config_and_lease_are_had_as_recorded() -> None:
    script = Script(601, 602)
    with server(script) as url:
        manager = manager_of(url)
        config = manager.network_config()
        lease = manager.acquire(config, ATTRS, NOTHING)
        manager.close()
    assert [str(each.network) for each in config.ranges] == ["10.5.0.0/16"]
    assert (lease.subnet, lease.attrs) == (SUBNET, ATTRS)
    # A day by the server's clock, years off ours.
    assert lease.expires is not None
    assert 86300 < lease.expires - clock.now() < 86500
    same_request(script.asked[0], 601)
    same_request(script.asked[1], 602)


def test_renewal_is_as_recorded() -> None:
    script = Script(613)
    with server(script) as url:
        manager = manager_of(url)
        held = Lease(ATTRS, SUBNET, expires=clock.now() + 3600)
        renewed = manager.renew(held)
        manager.close()
    assert renewed.subnet == SUBNET
    same_request(script.asked[0], 613)


def test_reserved_lease_has_no_end() -> None:
    script = Script(619)
    with server(script) as url:
        manager = manager_of(url)
        attrs = LeaseAttrs(public_ip=IPv4Address("10.99.0.12"), backend_type="host-gw")
        assert manager.acquire(None, attrs, NOTHING).expires is None  # type: ignore[arg-type]
        manager.close()
    same_request(script.asked[0], 619)


def test_watch_of_leases_is_as_recorded() -> None:
    script = Script(604, 606, 614)
    with server(script) as url, following(manager_of(url)) as events:
        first, second = events.get(timeout=10)[0], events.get(timeout=10)[0]
    assert isinstance(first, Snapshot)
    assert [lease.subnet for lease in first.leases] == [SUBNET]
    assert isinstance(second, Added)
    assert (str(second.lease.subnet), second.lease.asof) == ("10.5.80.0/24", 11)
    same_request(script.asked[0], 604)
    same_request(script.asked[1], 606)


def test_watch_of_our_own_lease_is_as_recorded() -> None:
    script = Script(603, 605)
    with server(script) as url, following(manager_of(url), Lease(ATTRS, SUBNET)) as events:
        assert [type(events.get(timeout=10)[0]) for _ in range(2)] == [Added, Added]
    same_request(script.asked[0], 603)
    same_request(script.asked[1], 605)


def test_other_leases_are_no_news_of_our_own() -> None:
    script = Script(603)
    for cursor, number in (("10", 606), ("11", 605)):
        script.add("GET", f"/v1/_/leases/10.5.12.0-24?next={cursor}", number)
    with server(script) as url, following(manager_of(url), Lease(ATTRS, SUBNET)) as events:
        told = [event for _ in range(2) for event in events.get(timeout=10)]
    assert [isinstance(each, Added) and each.lease.subnet for each in told] == [SUBNET, SUBNET]


def test_reread_between_two_requests_lists_again_from_a_server_that_closes_connections() -> None:
    leases = wire(exchange(604)).replace(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n")

    def answer(connection: socket.socket) -> None:
        if b"?next=" in connection.recv(1 << 16):
            connection.recv(1)  # a poll: until the client goes
        else:
            connection.sendall(leases)

    with server(answer) as url:
        manager = manager_of(url)
        # While a list is delivered no request is under way, and no connection is there to cut.
        with following(manager, then=[manager.reread]) as events:
            assert [type(events.get(timeout=10)[0]) for _ in range(2)] == [Snapshot, Snapshot]


def test_revoked_lease_is_told_once() -> None:
    gone = exchange(209) | {"target": "/v1/_/leases/10.5.12.0-24"}
    with server(answering(wire(gone))) as url, following(manager_of(url), Lease(ATTRS, SUBNET)) as events:
        assert events.get(timeout=10) == [Removed((SUBNET, None))]
        with pytest.raises(Empty):
            events.get(timeout=0.5)


def test_former_subnet_is_asked_for() -> None:
    script = Script(602)
    with server(script) as url:
        manager = manager_of(url)
        manager.acquire(None, ATTRS, (IPv4Network("10.5.3.0/24"), None))  # type: ignore[arg-type]
        manager.close()
    assert json.loads(script.asked[0]["body"])["PreviousSubnet"] == "10.5.3.0/24"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\nno\x1b!", "HTTP 500, no\\\\x1b!"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "non-string cursor"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n[", "invalid answer: "),
    ],
)
def test_answer_without_sense_is_an_error_with_a_remedy(answer: bytes, words: str) -> None:
    with server(answering(answer)) as url:
        manager = manager_of(url)
        with pytest.raises(Retryable, match=words):
            manager.stored(ATTRS.public_ip)
        manager.close()


def test_config_that_is_no_text_is_an_error_with_a_remedy() -> None:
    with server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff")) as url:
        manager = manager_of(url)
        with pytest.raises(Retryable, match=r"the config is no text\); "):
            manager.network_config()
        manager.close()


@pytest.mark.parametrize(
    ("cursor", "index", "asof"),
    [
        ("11", 7, 7),
        ("11", 0, 11),
        ("9" * 19, 0, int("9" * 19)),
        ("9" * 20, 0, 0),
        ("-11", 0, 0),
        ("", 0, 0),
    ],
)
def test_lease_is_as_old_as_its_index_or_else_as_the_answer_if_that_is_a_number(
    cursor: str, index: int, asof: int
) -> None:
    lease = {"Subnet": "10.5.12.0/24", "Attrs": {"PublicIP": "10.99.0.11"}, "Index": index}
    body = json.dumps({"snapshot": [lease], "cursor": cursor})
    with server(answering(http("200 OK", body))) as url:
        manager = manager_of(url)
        assert [each.asof for each in manager.read_leases()] == [asof]
        manager.close()


def test_addresses_are_those_of_all_servers() -> None:
    servers = (RemoteServer("192.0.2.1", 8888), RemoteServer("2001:db8::1", 8888))
    manager = RemoteStore(RemoteOptions(servers))
    assert manager.addresses == {IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")}
