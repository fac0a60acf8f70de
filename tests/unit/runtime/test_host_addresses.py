"""Addresses of the hosts that a store's endpoints name."""

from __future__ import annotations

import socket
import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import pytest

from flanneld.runtime import clock
from flanneld.runtime.sockets.interruptible import HostAddresses
from tests.clock import Clock
from tests.lab.wait import wait_for


class Resolver:
    """Stands in for the C library's resolver; it answers once ``may_answer`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host: bytes, port: None, **_: Any) -> list[Any]:
        del port
        name = host.decode()
        self.asked.append(name)
        self.may_answer.wait(10)
        if name not in self.answers:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(0, 0, 0, "", (address, 0)) for address in self.answers[name]]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


def test_addresses_of_literal_hosts_are_known_without_lookup(resolver: Resolver) -> None:
    hosts = HostAddresses(lambda: ["10.77.0.9", "fd00::9", "::ffff:10.77.0.8"])
    assert hosts.known() == {ip_address("10.77.0.9"), IPv6Address("fd00::9"), IPv4Address("10.77.0.8")}
    assert resolver.asked == []


def test_all_addresses_of_a_name_are_known_after_its_lookup(resolver: Resolver) -> None:
    resolver.answers["etcd.example"] = ["10.77.0.9", "10.78.0.9", "fd00::9"]
    hosts = HostAddresses(lambda: ["etcd.example"])
    wait_for(lambda: hosts.known() == {ip_address(each) for each in resolver.answers["etcd.example"]}, 5)


def test_hanging_resolver_holds_nobody_up_and_is_asked_once(resolver: Resolver) -> None:
    resolver.may_answer.clear()
    resolver.answers["etcd.example"] = ["10.77.0.9"]
    hosts = HostAddresses(lambda: ["etcd.example", "10.78.0.9"])
    for _ in range(3):
        assert hosts.known() == {IPv4Address("10.78.0.9")}
    resolver.may_answer.set()
    wait_for(lambda: IPv4Address("10.77.0.9") in hosts.known(), 5)
    assert resolver.asked == ["etcd.example"]


def test_failed_lookup_keeps_the_last_answer(resolver: Resolver) -> None:
    resolver.answers["etcd.example"] = ["10.77.0.9"]
    time = Clock()
    with clock.replaced(time):
        hosts = HostAddresses(lambda: ["etcd.example"])
        wait_for(hosts.known, 5)
        del resolver.answers["etcd.example"]
        time.time += 61
        wait_for(lambda: hosts.known() and len(resolver.asked) > 1, 5)
        assert hosts.known() == {IPv4Address("10.77.0.9")}


def test_new_answer_replaces_the_last_one(resolver: Resolver) -> None:
    resolver.answers["etcd.example"] = ["10.77.0.9"]
    time = Clock()
    with clock.replaced(time):
        hosts = HostAddresses(lambda: ["etcd.example"])
        wait_for(hosts.known, 5)
        resolver.answers["etcd.example"] = ["10.77.0.10"]
        time.time += 61
        wait_for(lambda: hosts.known() == {IPv4Address("10.77.0.10")}, 5)
