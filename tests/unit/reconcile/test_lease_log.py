"""The log of changed leases, which says at most ten lines a second about single ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.model import Lease, LeaseAttrs
from flanneld.reconcile.peers import LeaseChange, lease_log
from flanneld.runtime.logs import LogBatch

LEASES = [
    Lease(LeaseAttrs(IPv4Address("192.168.0.6")), IPv4Network((0x0A010000 + (each << 8), 24)))
    for each in range(100)
]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> LogBatch[LeaseChange]:
    caplog.set_level("INFO")
    return lease_log()


def gone(log: LogBatch[LeaseChange], leases: Iterable[Lease]) -> None:
    for lease in leases:
        log.add(LeaseChange(lease.key))


def test_few_changes_have_a_line_each_at_once(
    log: LogBatch[LeaseChange], caplog: pytest.LogCaptureFixture
) -> None:
    assert log.due == math.inf
    log.add(LeaseChange(LEASES[0].key, LEASES[0]))
    log.add(LeaseChange(LEASES[1].key, Lease(LeaseAttrs(), IPv4Network("10.1.1.0/24"))))
    gone(log, LEASES[2:3])
    log.write(7.0)
    assert caplog.messages == [
        "Subnet added: 10.1.0.0/24 via 192.168.0.6",
        "Subnet added: 10.1.1.0/24 via no public IP",
        "Subnet removed: 10.1.2.0/24",
    ]
    assert log.due == math.inf


@pytest.mark.parametrize("number", [10, 11])
def test_more_than_ten_at_once_have_one_line(
    number: int, log: LogBatch[LeaseChange], caplog: pytest.LogCaptureFixture
) -> None:
    gone(log, LEASES[:number])
    log.write(7.0)
    assert len(caplog.messages) == (10 if number == 10 else 1)
    assert ("Leases: 0 new or changed, 11 gone" in caplog.messages) == (number == 11)


def test_what_exceeds_ten_a_second_is_told_at_the_end_of_the_second(
    log: LogBatch[LeaseChange], caplog: pytest.LogCaptureFixture
) -> None:
    for number, lease in enumerate(LEASES[:50]):
        gone(log, [lease])
        log.write(7.0 + number / 100)
    assert caplog.messages == [f"Subnet removed: {lease}" for lease in LEASES[:10]]
    assert log.due == 8.0
    log.write(7.9)
    log.write(8.0)
    assert caplog.messages[10:] == ["Leases: 0 new or changed, 40 gone"]
    gone(log, LEASES[50:52])
    log.write(8.5)
    assert (len(caplog.messages), log.due) == (11, 9.0)
    log.write(9.0)
    assert caplog.messages[11:] == [f"Subnet removed: {lease}" for lease in LEASES[50:52]]


def test_nothing_is_left_out_at_the_end(log: LogBatch[LeaseChange], caplog: pytest.LogCaptureFixture) -> None:
    gone(log, LEASES[:10])
    log.write(7.0)
    gone(log, LEASES[10:11])
    log.write(7.1)
    log.write(math.inf)
    assert len(caplog.messages) == 11
