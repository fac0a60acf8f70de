"""Which of etcd's APIs is used: the one that was asked for, else the one that has a network config."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, ip_address

import pytest

from flanneld.config import parse
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Event, LeaseAttrs
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.store import Store
from tests.etcd_clients import opened
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import LocalEtcd, Relay, running_etcd, server

V2_CONFIG = '{"Network": "10.2.0.0/16", "Backend": {"Type": "vxlan"}}'
V3_CONFIG = '{"Network": "10.3.0.0/16", "Backend": {"Type": "vxlan"}}'
_numbers = itertools.count()


@pytest.fixture
def prefix() -> str:
    return f"/chosen-{next(_numbers)}"


def manager(url: str, prefix: str, api: str = "auto", transport: str = "auto") -> Store:
    manager = open_etcd(EtcdOptions((url,), prefix, transport=transport), api, EtcdTimeouts(read=20.0))
    opened.callback(manager.close)
    return manager


def put_config(etcd: LocalEtcd, api: str, prefix: str) -> None:
    etcd.keys(api).put(f"{prefix}/config", V2_CONFIG if api == "v2" else V3_CONFIG)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def watch(store: Store, deliver: Callable[[list[Event]], None] = lambda _: None) -> None:
    """Watch until the first list was delivered."""
    steps = itertools.count()
    with suppress(Cancelled):
        store.watch(deliver, lambda: store.close() if next(steps) else None)


@pytest.mark.parametrize(("api", "config"), [("v2", V2_CONFIG), ("v3", V3_CONFIG)])
def test_the_api_that_has_a_config_is_used_for_everything(
    etcd: LocalEtcd, prefix: str, api: str, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put_config(etcd, api, prefix)
    chosen = manager(etcd.url, prefix)
    assert f"{etcd.url} under {prefix}" in chosen.name
    assert chosen.network_config() == chosen.network_config() == parse(config)
    address = IPv4Address("192.0.2.1")
    lease = chosen.acquire(parse(config), LeaseAttrs(address), (None, None))
    chosen.reconnect()
    assert chosen.renew(lease).key == lease.key
    assert chosen.stored(address) == LeaseAttrs(address)
    assert len(etcd.keys(api).children(f"{prefix}/subnets")) == 1
    (pool,) = parse(config).ranges
    assert [record.getMessage() for record in caplog.records] == [
        f"The network config is in etcd {api} at {etcd.url} under {prefix}",
        f"Picking subnet in range {pool.subnet_min} ... {pool.subnet_max}",
        f"Allocated lease ({lease}) to current node (192.0.2.1)",
    ]


def test_if_both_have_one_that_of_v3_counts_and_the_log_says_so(
    etcd: LocalEtcd, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_config(etcd, "v2", prefix)
    put_config(etcd, "v3", prefix)
    chosen = manager(etcd.url, prefix)
    for _ in range(2):
        assert chosen.network_config() == parse(V3_CONFIG)
    assert warnings(caplog) == []
    watch(chosen)
    (warning,) = warnings(caplog)
    assert "-etcd-api=v2" in warning
    assert f"{prefix}/config" in warning


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_a_config_that_is_written_later_is_found(etcd: LocalEtcd, prefix: str, api: str) -> None:
    chosen = manager(etcd.url, prefix)
    with pytest.raises(Retryable, match=f"{prefix}/config, in neither of its APIs"):
        chosen.network_config()
    with pytest.raises(Retryable, match="not known yet"):
        chosen.stored(None)
    put_config(etcd, api, prefix)
    chosen.network_config()
    assert f"etcd {api} at" in chosen.name


def test_a_start_on_v2_costs_one_request_more_on_the_same_connection(etcd: LocalEtcd, prefix: str) -> None:
    put_config(etcd, "v2", prefix)
    relay = Relay(etcd.url)
    with server(relay) as url:
        manager(url, prefix).network_config()
    probe, read = relay.requests
    assert probe == "POST /v3/kv/range"
    assert read.startswith(f"GET /v2/keys{prefix}/config?")
    assert relay.connections == 1


@pytest.mark.parametrize(("asked", "other"), [("v2", "v3"), ("v3", "v2")])
def test_a_config_in_the_api_that_was_not_asked_for_is_named(
    etcd: LocalEtcd, prefix: str, asked: str, other: str
) -> None:
    put_config(etcd, other, prefix)
    with pytest.raises(Retryable, match=rf"found a {other}-only config.*-etcd-api={other}"):
        manager(etcd.url, prefix, asked).network_config()


def test_an_api_that_is_switched_off_is_done_without(prefix: str) -> None:
    with running_etcd("--enable-grpc-gateway=false") as old, running_etcd("--enable-v2=false") as new:
        for etcd, has, lacks, hint in ((old, "v2", "v3", "grpc-gateway"), (new, "v3", "v2", "enable-v2")):
            with pytest.raises(Retryable, match="etcd answers, but has no network config"):
                manager(etcd.url, prefix, transport="json").network_config()
            with pytest.raises(Retryable, match=hint):
                manager(etcd.url, prefix, lacks, "json").network_config()
            put_config(etcd, has, prefix)
            assert manager(etcd.url, prefix, transport="json").network_config()


def test_a_start_on_v3_keeps_its_connection_where_v2_is_switched_off(prefix: str) -> None:
    with running_etcd("--enable-v2=false") as etcd:
        put_config(etcd, "v3", prefix)
        relay = Relay(etcd.url)
        with server(relay) as url:
            chosen = manager(url, prefix)
            chosen.network_config()
            chosen.stored(None)
            assert [request.split()[0] for request in relay.requests] == ["POST", "POST"]
            asked_before: list[int] = []
            watch(chosen, lambda _: asked_before.append(len(relay.requests)))
        assert asked_before == [2]
        assert relay.requests[2].startswith("GET /v2/keys")
        assert relay.connections == 1


def test_a_config_that_makes_no_sense_is_not_passed_over(etcd: LocalEtcd, prefix: str) -> None:
    put_config(etcd, "v2", prefix)
    etcd.keys("v3").put(f"{prefix}/config", "{")
    with pytest.raises(Retryable, match="JSON"):
        manager(etcd.url, prefix).network_config()


def test_an_api_that_refuses_us_is_not_taken_for_empty(prefix: str) -> None:
    with running_etcd("--bcrypt-cost=4") as etcd:
        put_config(etcd, "v2", prefix)
        V3Keys(etcd.post).require_login("flannel", "secret", prefix)
        with pytest.raises(Retryable, match="refuses access"):
            manager(etcd.url, prefix).network_config()
        assert manager(etcd.url, prefix, "v2").network_config() == parse(V2_CONFIG)


def test_after_close_nothing_is_chosen_any_more(etcd: LocalEtcd, prefix: str) -> None:
    put_config(etcd, "v2", prefix)
    chosen = manager(etcd.url, prefix)
    chosen.network_config()
    for each in (manager(etcd.url, prefix), chosen):
        each.close()
        with pytest.raises(Cancelled):
            each.network_config()
    for watch in (chosen.watch, lambda *_: chosen.stored(None)):
        with pytest.raises(Cancelled):
            watch(print, threading.Event().set)


@pytest.mark.parametrize("api", ["v2", "v3", "both", "auto"])
def test_addresses_are_those_of_all_endpoints_also_of_unused_ones(api: str) -> None:
    endpoints = ("http://192.0.2.1:2379", "http://[2001:db8::1]:2379")
    store = open_etcd(EtcdOptions(endpoints), api)
    assert store.addresses == {ip_address("192.0.2.1"), ip_address("2001:db8::1")}
