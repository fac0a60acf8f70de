"""What a copy of a network does about each lease, by its term and by what the other store has."""

from __future__ import annotations

import math
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.model import IPNetwork, Lease, LeaseAttrs
from flanneld.runtime import clock
from flanneld.subnet.codec import format_attrs
from flanneld.subnet.copy import KeyAction, Migration, decide, move
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, KeyStore, open_file
from flanneld.subnet.etcd.keys import Conflict, KeyReply, StoredKey
from flanneld.subnet.etcd.transport import EtcdOptions
from tests.clock import Clock
from tests.local_etcd import LocalEtcd

NOW = 5000.0
ATTRS = LeaseAttrs(IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1"), "vxlan")
SUBNET, IPV6_SUBNET = IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5:0:1::/64")
KEY = f"{PREFIX}/subnets/10.5.1.0-24"
CONFIG = '{"Network":"10.5.0.0/16"}'


def found(ttl: float | None, attrs: LeaseAttrs = ATTRS) -> StoredKey:
    return StoredKey(KEY, format_attrs(attrs, with_ipv6=True), ttl, 7)


@pytest.mark.parametrize(
    ("left", "there", "act"),
    [
        pytest.param(600.0, found(None), "keep", id="a reservation there"),
        pytest.param(None, found(None), "keep", id="a reservation in both"),
        pytest.param(None, found(86400.0), "renew", id="a reservation here"),
        pytest.param(1000.0, found(700.0), "keep", id="five minutes longer here"),
        pytest.param(1001.0, found(700.0), "renew", id="more than five minutes longer here"),
        pytest.param(10.0, found(700.0), "keep", id="longer there"),
        pytest.param(600.0, None, "copy", id="nothing there"),
    ],
)
def test_lease_is_written_if_the_other_store_lacks_it_or_ends_it_early(
    left: float | None, there: StoredKey | None, act: str
) -> None:
    lease = Lease(ATTRS, SUBNET, expires=None if left is None else NOW + left)
    assert decide(lease, there, [], NOW).act == act


@pytest.mark.parametrize(
    ("stored", "whose"),
    [
        (LeaseAttrs(ATTRS.public_ip, None, "udp"), "of the same node, with other data"),
        (LeaseAttrs(None, ATTRS.public_ipv6, "udp"), "of the same node, with other data"),
        (LeaseAttrs(IPv4Address("192.0.2.9"), ATTRS.public_ipv6, "vxlan"), "of 192.0.2.9"),
        (LeaseAttrs(None, IPv6Address("2001:db8::9"), "vxlan"), "of 2001:db8::9"),
    ],
)
def test_different_lease_in_the_other_store_is_left_and_its_owner_named(
    stored: LeaseAttrs, whose: str
) -> None:
    told = decide(Lease(ATTRS, SUBNET), found(60.0, stored), [], NOW, "the file")
    assert told == KeyAction("refuse", f"the file has another lease there, {whose}")


def test_key_in_the_other_store_that_is_no_lease_is_left() -> None:
    there = StoredKey(KEY, "{", 60.0, 7)
    told = decide(Lease(ATTRS, SUBNET), there, [], NOW, "the file")
    assert told.act == "refuse"
    assert told.why.startswith("in the file there is something else: ")


@pytest.mark.parametrize(
    ("others", "rival"),
    [
        ([IPv4Network("10.5.2.0/24")], None),
        ([IPv4Network("10.5.2.0/24"), IPv4Network("10.5.0.0/22")], "10.5.0.0/22"),
        ([IPv6Network("fc00:5::/60")], "fc00:5::/60"),
    ],
)
def test_new_lease_must_overlap_none_of_the_other_store(others: list[IPNetwork], rival: str | None) -> None:
    told = decide(Lease(ATTRS, SUBNET, IPV6_SUBNET), None, others, NOW)
    assert told.act == ("refuse" if rival else "copy")
    assert told.why == (f"it overlaps {rival}, which is in v3" if rival else "")


# ---- from file to file -----------------------------------------------------------------------------


def open_store(path: Path) -> KeyStore:
    store = open_file(str(path), create=True)
    store.create(f"{PREFIX}/config", CONFIG, None)
    return store


@pytest.mark.parametrize(
    ("term", "passed", "earlier", "line", "left"),
    [
        (600, 0.0, None, "copied {}, 600 s left", 600.0),
        (600, 100.6, None, "copied {}, 499 s left", 499.0),
        (600, 599.8, None, "copied {}, 1 s left", 1.0),
        (600, 0.0, 100, "prolonged {}, 480 s left", 480.0),
        (600, 0.0, 600, "kept {}", 600.0),
        (None, 0.0, 100, "prolonged {}, a reservation", None),
    ],
)
def test_copy_lasts_whole_seconds_at_least_one_and_a_prolonged_one_ends_earlier(
    tmp_path: Path, term: int | None, passed: float, earlier: int | None, line: str, left: float | None
) -> None:
    moved, said = Clock(), list[str]()
    value = format_attrs(LeaseAttrs(ATTRS.public_ip, None, "udp"), with_ipv6=True)
    with clock.replaced(moved):
        here, there = open_store(tmp_path / "here"), open_store(tmp_path / "there")
        here.create(KEY, value, term)
        moved.time += passed
        if earlier is not None:
            there.create(KEY, value, earlier)
        assert Migration(
            EmbeddedClient(here), EmbeddedClient(there), PREFIX, said.append, dry_run=False
        ).run()
        assert (there.get(KEY)[0].value, there.get(KEY)[0].ttl) == (value, left)
    assert said == [line.format(KEY), f"kept {PREFIX}/config"]


class Hurried(EmbeddedClient):
    """A client that another writer is quicker than, so many times."""

    def __init__(self, store: KeyStore, times: int) -> None:
        super().__init__(store)
        self._left = times

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        self._left -= 1
        if self._left >= 0:
            raise Conflict(f"{key} is there")
        return super().create(key, value, ttl)


@pytest.mark.parametrize(
    ("times", "done", "says"),
    [
        (9, True, "copied {}, 600 s left".format),
        (10, False, "could not copy {}: it changes all the time".format),
    ],
)
def test_copy_of_a_lease_that_others_write_is_tried_ten_times(
    tmp_path: Path, times: int, done: bool, says: Callable[[str], str]
) -> None:
    said: list[str] = []
    with clock.replaced(Clock()):
        here, there = open_store(tmp_path / "here"), open_store(tmp_path / "there")
        here.create(KEY, format_attrs(ATTRS, with_ipv6=True), 600)
        new = Hurried(there, times)
        assert Migration(EmbeddedClient(here), new, PREFIX, said.append, dry_run=False).run() is done
    assert said == [says(KEY), f"kept {PREFIX}/config"]


class Untimed(EmbeddedClient):
    """A client whose lists tell of no lease when it ends, as those of v3."""

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        reply = super().fetch(key, recursive=recursive)
        return replace(reply, children=tuple(replace(each, ttl=math.inf) for each in reply.children))


@pytest.mark.parametrize(("term", "left"), [(600, "600 s left"), (None, "a reservation")])
def test_term_that_a_list_does_not_tell_is_that_of_the_lease_when_it_is_copied(
    tmp_path: Path, term: int | None, left: str
) -> None:
    said: list[str] = []
    with clock.replaced(Clock()):
        here, there = open_store(tmp_path / "here"), open_store(tmp_path / "there")
        here.create(KEY, format_attrs(ATTRS, with_ipv6=True), term)
        old, new = Untimed(here), EmbeddedClient(there)
        assert Migration(old, new, PREFIX, said.append, dry_run=False).run()
    assert said[0] == f"copied {KEY}, {left}"


def test_config_that_another_writes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    said: list[str] = []
    new = Hurried(open_file(str(tmp_path / "there"), create=True), 1)
    old = EmbeddedClient(open_store(tmp_path / "here"))
    assert not Migration(old, new, PREFIX, said.append, dry_run=False).run()
    assert said == [f"could not copy {PREFIX}/config: somebody else has just written one"]


# ---- all networks ----------------------------------------------------------------------------------


def keys(store: KeyStore) -> dict[str, str]:
    return {node.key.removeprefix(f"{PREFIX}/"): node.value for node in store.below(PREFIX)[0]}


@pytest.mark.parametrize(("api", "meant"), [("v2", "v2"), ("v3", "v3"), ("auto", "v3")])
def test_every_network_of_a_file_gets_into_etcd_and_back_with_what_is_left_of_its_leases(
    etcd: LocalEtcd, tmp_path: Path, api: str, meant: str
) -> None:
    here, there = open_store(tmp_path / "here"), open_file(str(tmp_path / "there"), create=True)
    value = format_attrs(ATTRS, with_ipv6=True)
    here.create(KEY, value, 5000)
    here.create(f"{PREFIX}/blue/config", CONFIG.replace("10.5", "10.6"), None)
    here.create(f"{PREFIX}/blue/subnets/10.6.1.0-24", value, None)
    options: Any = {"options": EtcdOptions((etcd.url,), f"/moved-by-{api}"), "api": api}
    for store, into_file in ((here, False), (there, True)):
        planned, said = list[str](), list[str]()
        assert move(store, **options, say=planned.append, into_file=into_file, dry_run=True)
        assert move(store, **options, say=said.append, into_file=into_file, dry_run=False)
        assert [each.partition(" /")[0] for each in planned] == ["would copy"] * 4
        assert [each.partition(" /")[0] for each in said] == ["copied"] * 4
        assert said[2].endswith("/blue/subnets/10.6.1.0-24, a reservation")
    assert etcd.keys(meant).get(f"/moved-by-{api}/config")
    assert keys(there) == keys(here)
    assert 4900 < (there.get(KEY)[0].ttl or 0) <= 5000
    assert there.get(f"{PREFIX}/blue/subnets/10.6.1.0-24")[0].ttl is None


def test_move_of_one_network_that_is_incomplete_says_so_and_moves_the_others(
    etcd: LocalEtcd, tmp_path: Path
) -> None:
    here, said = open_store(tmp_path / "here"), list[str]()
    here.create(KEY, "{", None)
    here.create(f"{PREFIX}/blue/config", CONFIG, None)
    options = EtcdOptions((etcd.url,), "/moved-in-part")
    assert not move(here, options, "v3", said.append, into_file=False, dry_run=False)
    assert said == [
        "could not copy /moved-in-part/subnets/10.5.1.0-24: its value in the file is invalid",
        "could not copy /moved-in-part/config: it comes last, so that no daemon misses the leases above",
        "copied /moved-in-part/blue/config",
    ]


def test_move_without_a_network_is_an_error_that_names_what_to_check(etcd: LocalEtcd, tmp_path: Path) -> None:
    nowhere = open_file(str(tmp_path / "nowhere"), create=True)
    with pytest.raises(Retryable, match="no network to copy; check -store, -etcd-prefix"):
        move(nowhere, EtcdOptions((etcd.url,)), "v3", print, into_file=False, dry_run=False)
