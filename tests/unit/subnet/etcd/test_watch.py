"""What a watch of the leases delivers, through everything that can happen to etcd and the way to it."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Self

import pytest
from msgspec.structs import replace

from flanneld.errors import Cancelled
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.runtime import clock
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.store import Deliver
from tests.lab.etcd_v3 import V3Keys
from tests.lab.listener import end
from tests.lab.wait import PATIENCE, wait_for
from tests.local_etcd import DEADLINE, LocalEtcd, Relay, free_port, running_etcd, server, silent

_numbers = itertools.count()
LEASE = '{"PublicIP":"192.0.2.1"}'
#: More than etcd remembers.
HISTORY = 1000
#: More than anybody wants to read a line about.
MANY = 500
#: No watch that is closed may wait for any of these.
PATIENT = EtcdTimeouts(read=600.0, poll=600.0, silence=600.0, pause=600.0)
QUICK = EtcdTimeouts(read=20.0, pause=0.05)


class Watched:
    """A prefix in an etcd, and a watch of it whose events come in ``events``."""

    def __init__(self, etcd: LocalEtcd, api: str, *urls: str, timeouts: EtcdTimeouts = QUICK) -> None:
        self.etcd = etcd
        self.api = api[:2]
        self.keys = etcd.keys(self.api)
        self.prefix = f"/watched-{next(_numbers)}"
        transport = "grpc" if "gRPC" in api else "json"
        options = EtcdOptions(urls or (etcd.url,), self.prefix, transport=transport)
        self.manager = open_etcd(options, self.api, timeouts)
        self.events: list[Event] = []
        self.ended: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> Event:
        """Watch all leases, and give the first event."""
        self.start_without_event()
        return self.next(0)

    def start_own(self, lease: Lease) -> Event:
        self._start(lambda deliver: self.manager.watch_own(lease, deliver, lambda: None))
        return self.next(0)

    def start_without_event(self, alive: Callable[[], None] = lambda: None) -> None:
        self._start(lambda deliver: self.manager.watch(deliver, alive))

    def next(self, number: int) -> Event:
        """The event of that number, 0 for the first."""
        return wait_for(lambda: self.events[number:], 10, f"event {number} of {self.events}")[0]

    def put(self, subnet: str, value: str, ttl: int | None = 3600) -> int:
        return self.keys.put(f"{self.prefix}/subnets/{subnet}", value, ttl)

    def delete(self, key: str) -> None:
        """Delete a key with all below it."""
        self.keys.delete(f"{self.prefix}/{key}".rstrip("/"))

    def outrun_history(self) -> None:
        """Make etcd forget what has happened."""
        if self.api == "v2":
            self.etcd.put_often("/unrelated", HISTORY + 10)
        else:
            V3Keys(self.etcd.post).compact()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watches; they have to end."""
        self.manager.close()
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()

    def _start(self, watch: Callable[[Deliver], None]) -> None:
        def run() -> None:
            try:
                watch(self.events.extend)
            except BaseException as error:
                self.ended.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


@pytest.fixture(params=["v2", "v3"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


over_all = pytest.mark.parametrize("api", ["v2", "v3", "v3 over gRPC"])


@pytest.fixture(params=["v2", "v3", "v3 of a newer etcd", "v3 over gRPC"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    etcd = request.getfixturevalue("newer_etcd" if "newer" in request.param else "etcd")
    with Watched(etcd, request.param) as watched:
        yield watched


@pytest.fixture
def watched_v2(etcd: LocalEtcd) -> Iterator[Watched]:
    with Watched(etcd, "v2") as watched:
        yield watched


def value(number: int) -> str:
    return f'{{"PublicIP":"192.0.2.{number}"}}'


def lease_of(event: Event) -> tuple[str, str]:
    """The subnet and the public IP of an event that adds a lease."""
    assert isinstance(event, Added)
    return str(event.lease), str(event.lease.attrs.public_ip)


def subnets(event: Event) -> set[str]:
    assert isinstance(event, Snapshot)
    return {str(lease) for lease in event.leases}


def known(events: list[Event]) -> dict[str, str]:
    """The public IP of each subnet, for a reader of all events."""
    there: dict[str, str] = {}
    for event in list(events):
        match event:
            case Added():
                there.update([lease_of(event)])
            case Removed((subnet, _)):
                there.pop(str(subnet), None)
            case Snapshot(leases):
                there = {str(each): str(each.attrs.public_ip) for each in leases}
    return there


def removed(subnet: str) -> Removed:
    return Removed((IPv4Network(subnet), None))


def lease(subnet: str, number: int = 1) -> Lease:
    return Lease(LeaseAttrs(IPv4Address(f"192.0.2.{number}")), IPv4Network(subnet))


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


# ---- all leases ----------------------------------------------------------------------------------


def test_a_watch_begins_with_all_leases(watched: Watched) -> None:
    begin = clock.now()
    watched.put("10.1.1.0-24", value(1), ttl=100)
    watched.put("10.1.2.0-24", value(2), ttl=None)
    watched.put("10.1.3.0-24", "nonsense")
    first = watched.start()
    assert isinstance(first, Snapshot)
    ordinary, reservation = sorted(first.leases, key=str)
    assert ordinary.expires
    # v3 tells how long a lease lasts only if asked for each.
    assert watched.api == "v3" or begin + 98 < ordinary.expires < clock.now() + 102
    assert reservation.expires is None
    assert first.unreadable == {(IPv4Network("10.1.3.0/24"), None)}


def test_without_any_lease_it_begins_with_none(watched: Watched) -> None:
    assert watched.start() == Snapshot(())


def test_a_new_lease_is_one_event(watched: Watched) -> None:
    watched.start()
    index = watched.put("10.1.1.0-24", value(1))
    event = watched.next(1)
    assert lease_of(event) == ("10.1.1.0/24", "192.0.2.1")
    assert isinstance(event, Added)
    assert event.lease.asof == index
    watched.put("10.1.1.0-24", value(2))
    assert lease_of(watched.next(2)) == ("10.1.1.0/24", "192.0.2.2")
    assert len(watched.events) == 3


def test_a_lease_that_expires_is_one_event(watched: Watched) -> None:
    watched.put("10.1.1.0-24", value(1), ttl=1)
    watched.start()
    assert watched.next(1) == removed("10.1.1.0/24")


def test_a_lease_may_be_deleted_with_a_condition(watched_v2: Watched) -> None:
    index = watched_v2.put("10.1.1.0-24", value(1))
    watched_v2.start()
    watched_v2.etcd.delete(f"{watched_v2.prefix}/subnets/10.1.1.0-24", f"prevIndex={index}")
    assert watched_v2.next(1) == removed("10.1.1.0/24")


def test_invalid_lease_is_logged_once_and_does_not_stop_the_watch(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.put("10.1.1.0-24", value(1))
    watched.start()
    for _ in range(2):
        watched.put("no-lease", value(1))
        watched.put("10.1.1.0-24", "{")
        watched.put("folder/10.1.1.0-24", value(1))
    watched.delete("subnets/no-lease")
    watched.put("10.1.2.0-24", value(2))
    assert lease_of(watched.next(1)) == ("10.1.2.0/24", "192.0.2.2")
    for key in ("no-lease", "10.1.1.0-24", "folder/10.1.1.0-24"):
        assert sum(f"{watched.prefix}/subnets/{key} " in text for text in texts(caplog)) == 1


def test_many_invalid_keys_are_one_line(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MANY):
        watched.put(f"no-lease-{number:04}", "{", ttl=None)
    watched.start()
    for number in (1, 2):
        watched.manager.reread()
        watched.next(number)
    (line,) = [text for text in texts(caplog) if "Ignoring" in text]
    start = f"Ignoring {MANY} keys in etcd: {watched.prefix}/subnets/no-lease-"
    assert line.startswith(start)
    assert line.endswith(f"; and {MANY - 3} more")
    watched.put("no-lease-too", "{")
    watched.put("10.1.2.0-24", value(2))
    watched.next(3)
    assert sum("Ignoring" in text for text in texts(caplog)) == 1, "the next line is due in a minute"


@pytest.mark.parametrize("name", ["no-lease", "10.1.1.0-24"])
def test_warning_about_a_removed_key_is_forgotten(
    watched: Watched, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    watched.start()
    for _ in range(2):
        watched.put(name, "{")
        watched.delete(f"subnets/{name}")
    watched.put("10.1.2.0-24", value(2))
    wait_for(lambda: isinstance(watched.events[-1], Added), DEADLINE, "what came after them")
    assert sum(f"{watched.prefix}/subnets/{name} " in text for text in texts(caplog)) == 2


@pytest.mark.parametrize("directory", ["subnets", ""])
def test_when_the_directory_goes_everything_is_read_again(watched_v2: Watched, directory: str) -> None:
    watched_v2.put("10.1.1.0-24", value(1))
    assert subnets(watched_v2.start()) == {"10.1.1.0/24"}
    watched_v2.delete(directory)
    assert watched_v2.next(1) == Snapshot(())
    watched_v2.put("10.1.2.0-24", value(2))
    assert lease_of(watched_v2.next(2)) == ("10.1.2.0/24", "192.0.2.2")


def test_a_backlog_is_read_quickly(watched: Watched) -> None:
    with Watched(watched.etcd, watched.api, timeouts=EtcdTimeouts(read=60.0, pause=1.0)) as slow:
        slow.manager.stored(None)
        slow.keys.put_often(f"{slow.prefix}/subnets/10.1.1.0-24", 300, value(1))
        slow.start()
        # With a pause after each it would take longer.
        wait_for(lambda: len(slow.events) == 300 + 1, 250 / PATIENCE, "all events")


def test_catching_up_with_the_history_keeps_one_connection(
    etcd: LocalEtcd, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy host is silent for longer, and each silence costs a connection.
    monkeypatch.setattr("flanneld.subnet.etcd.v2._QUIET", 60.0)
    relay = Relay(etcd.url)
    with server(relay) as url, Watched(etcd, api, url, timeouts=EtcdTimeouts(read=60.0)) as slow:
        slow.manager.stored(None)
        before = relay.connections
        slow.keys.put_often(f"{slow.prefix}/subnets/10.1.1.0-24", 300, value(1))
        slow.start()
        wait_for(lambda: len(slow.events) == 300 + 1, DEADLINE, "all events")
        # In v2 a stream that begins in the history tells one change. One connection of polls tells the rest.
        assert relay.connections - before == (2 if api == "v2" else 1)


def test_events_that_etcd_has_forgotten_end_in_a_snapshot(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.put("10.1.1.0-24", value(1))
    watched.manager.stored(None)
    watched.delete("subnets/10.1.1.0-24")
    watched.outrun_history()
    assert subnets(watched.start()) == {"10.1.1.0/24"}
    assert watched.next(1) == Snapshot(())
    watched.put("10.1.2.0-24", value(2))
    assert lease_of(watched.next(2)) == ("10.1.2.0/24", "192.0.2.2")
    assert sum("has compacted" in text for text in texts(caplog)) == 1


def test_a_history_of_others_that_etcd_has_forgotten_is_not_worth_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What others write makes a silent watch doubtful, and where it would go on from has been forgotten."""
    brief = replace(QUICK, silence=0.1)
    # An etcd of its own: elsewhere the leases of other tests may end meanwhile.
    with running_etcd() as etcd, Watched(etcd, "v3", timeouts=brief) as watched:

        def forget_what_others_wrote() -> None:
            watched.keys.put("/unrelated", "1")
            watched.keys.put("/unrelated", "2")
            watched.outrun_history()

        def act() -> None:
            acts.pop(len(watched.events), str)()

        # The watch has to have told something: until then etcd itself looks things up in the history.
        acts: dict[int, Callable[[], object]]
        acts = {1: lambda: watched.put("10.1.1.0-24", value(1)), 2: forget_what_others_wrote}
        watched.start_without_event(act)
        assert subnets(watched.next(2)) == {"10.1.1.0/24"}
    assert not any("has compacted" in text for text in texts(caplog))


def test_a_watch_without_news_keeps_up_with_a_busy_etcd(etcd: LocalEtcd) -> None:
    relay = Relay(etcd.url)
    brief = EtcdTimeouts(poll=0.2, pause=0.05)
    with server(relay) as url, Watched(etcd, "v2", url, timeouts=brief) as watched:
        watched.start()
        for _ in range(3):
            etcd.put_often("/unrelated", HISTORY // 2)
            relay.requests.clear()
            wait_for(lambda: len(relay.asked("wait=true")) >= 2, 5, "another poll")
        watched.put("10.1.1.0-24", value(1))
        assert lease_of(watched.next(1)) == ("10.1.1.0/24", "192.0.2.1")
        assert len(watched.events) == 2


def test_reconnection_of_our_own_loses_no_lease_and_is_no_warning(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.start()
    for number in (1, 2):
        watched.manager.reconnect()
        watched.put(f"10.1.{number}.0-24", value(number))
        wait_for(lambda: len(known(watched.events)) == number, DEADLINE, "the lease")  # noqa: B023
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- one lease -----------------------------------------------------------------------------------


def test_a_watch_of_one_lease_tells_what_becomes_of_it(watched: Watched) -> None:
    watched.put("10.1.1.0-24", value(1), ttl=100)
    first = watched.start_own(lease("10.1.1.0/24"))
    assert lease_of(first) == ("10.1.1.0/24", "192.0.2.1")
    watched.put("10.1.2.0-24", value(2))
    watched.put("10.1.1.0-24", value(1), ttl=None)
    second = watched.next(1)
    assert isinstance(second, Added)
    assert second.lease.expires is None
    watched.delete("subnets/10.1.1.0-24")
    assert watched.next(2) == removed("10.1.1.0/24")


def test_a_lease_that_is_not_there_is_told_at_once(watched: Watched) -> None:
    assert watched.start_own(lease("10.1.1.0/24")) == removed("10.1.1.0/24")
    watched.put("10.1.1.0-24", value(1))
    assert lease_of(watched.next(1)) == ("10.1.1.0/24", "192.0.2.1")


def test_a_lease_that_goes_with_its_directory_has_gone(watched: Watched) -> None:
    watched.put("10.1.1.0-24", value(1))
    watched.start_own(lease("10.1.1.0/24"))
    watched.delete("subnets")
    assert watched.next(1) == removed("10.1.1.0/24")


def test_garbage_in_our_own_lease_is_told_like_anothers_attributes(watched: Watched) -> None:
    watched.put("10.1.1.0-24", value(1))
    watched.start_own(lease("10.1.1.0/24"))
    watched.put("10.1.1.0-24", "nonsense")
    assert lease_of(watched.next(1)) == ("10.1.1.0/24", "None")
    watched.put("10.1.1.0-24", value(3))
    assert lease_of(watched.next(2)) == ("10.1.1.0/24", "192.0.2.3")


@pytest.mark.parametrize("api", ["v2", "v3"])
@pytest.mark.parametrize(
    ("is_removed", "number", "expected"),
    [(True, 3, removed("10.1.1.0/24")), (True, 1, "192.0.2.1"), (False, 3, "192.0.2.3")],
    ids=["taken by another node", "put back for us", "overwritten"],
)
def test_removal_of_our_own_lease_between_two_lists_is_told(
    etcd: LocalEtcd, api: str, is_removed: bool, number: int, expected: Removed | str
) -> None:
    with Watched(etcd, api) as watched:
        assert isinstance(watched.manager, EtcdStore)
        index = watched.put("10.1.1.0-24", value(1))
        told: list[Event] = []
        watch = watched.manager.own_watch(lease("10.1.1.0/24"))
        watch.step(clock.now(), told.extend)
        if is_removed:
            watched.delete("subnets/10.1.1.0-24")
            watched.put("10.1.1.0-24", value(number))
        else:
            # As each node does it: a plain write makes a key of v2 anew.
            client = watched.manager._requests
            client.replace(f"{watched.prefix}/subnets/10.1.1.0-24", value(number), 3600, index)
        watch.reread()
        while len(told) < 2:
            watch.step(math.inf, told.extend)
        assert told[1] == expected or lease_of(told[1])[1] == expected


def polls(relay: Relay) -> list[str]:
    return [*relay.asked("wait=true"), *relay.asked("/v3/watch")]


# ---- disasters -----------------------------------------------------------------------------------


@over_all
def test_a_watch_survives_restarts_of_etcd_and_tells_of_each_once(
    api: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def told(what: str) -> int:
        return sum(what in text for text in texts(caplog))

    with running_etcd() as etcd, Watched(etcd, api) as watched:
        watched.start()
        for outage in (1, 2):
            etcd.stop()
            wait_for(lambda: told("Watching") > 2 * told("etcd is back"), 10, "a word about it")
            etcd.start()
            watched.put(f"10.1.{outage}.0-24", value(1))
            wait_for(lambda: f"10.1.{outage}.0/24" in known(watched.events), 10, "the lease")  # noqa: B023
            wait_for(lambda: told("etcd is back") == outage, 10, "a word about its end")  # noqa: B023
            # Until the new watch has told something, another failure would belong to the same outage.
            watched.put(f"10.2.{outage}.0-24", value(1))
            wait_for(lambda: len(known(watched.events)) == 2 * outage, 10, "more news")  # noqa: B023
            assert told("Watching") == 2 * outage


@over_all
def test_after_a_long_outage_etcd_is_found_as_soon_as_after_a_short_one(api: str) -> None:
    """It is asked once a pause, which never grows; outside of tests that is a second."""
    assert EtcdTimeouts().pause == 1.0
    attempts: list[None] = []
    with running_etcd() as etcd, Watched(etcd, api) as watched:
        watched.start_without_event(lambda: attempts.append(None))
        watched.next(0)
        etcd.stop()
        before = len(attempts)
        wait_for(lambda: len(attempts) - before > 50, DEADLINE, "fifty attempts")
        etcd.start()
        watched.put("10.1.1.0-24", value(1))
        wait_for(lambda: known(watched.events) == {"10.1.1.0/24": "192.0.2.1"}, 10, "the lease")


@over_all
@pytest.mark.parametrize("writes", [0, 100], ids=["behind", "overtaken"])
def test_a_backup_that_was_put_back_is_read_anew(api: str, writes: int, tmp_path: Path) -> None:
    """Its revision may be any, and the ID of the cluster is the same as before."""
    backup = tmp_path / "backup"
    with running_etcd() as etcd, Watched(etcd, api) as watched:
        watched.put("10.1.1.0-24", value(1))
        etcd.stop()
        etcd.copy_data(backup)
        etcd.start()
        watched.start()
        watched.keys.put_often("/unrelated", 50, "x")
        watched.put("10.1.2.0-24", value(2))
        watched.next(1)
        etcd.stop()
        elsewhere = LocalEtcd(tmp_path)
        elsewhere.start(data=str(backup))
        keys = elsewhere.keys(watched.api)
        keys.put(f"{watched.prefix}/subnets/10.1.3.0-24", value(3), None)
        keys.put_often("/unrelated", writes, "x")
        elsewhere.stop()
        etcd.start(data=str(backup))
        expected = {"10.1.1.0/24": "192.0.2.1", "10.1.3.0/24": "192.0.2.3"}
        wait_for(lambda: known(watched.events) == expected, 10, "the leases of the backup")


@over_all
def test_an_etcd_made_anew_is_read_anew(api: str) -> None:
    with running_etcd() as etcd, Watched(etcd, api) as watched:
        watched.put("10.1.1.0-24", value(1))
        watched.start()
        etcd.stop()
        etcd.start(data="other", token="other")
        assert watched.next(1) == Snapshot(())
        watched.put("10.1.2.0-24", value(2))
        assert lease_of(watched.next(2)) == ("10.1.2.0/24", "192.0.2.2")


@over_all
def test_a_problem_that_lasts_is_told_once(
    api: str, etcd: LocalEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    attempts = threading.Semaphore(0)

    def hang_up(_connection: object) -> None:
        attempts.release()

    with server(hang_up) as url, Watched(etcd, api, url) as watched:
        watched.start_without_event()
        for _ in range(3):
            assert attempts.acquire(timeout=DEADLINE)
    assert sum("broke the connection" in text for text in texts(caplog)) == 1


def test_polls_that_are_cut_again_and_again_do_not_fill_the_log(
    api: str, etcd: LocalEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    relay = Relay(etcd.url)
    relay.cut_polls = True
    with server(relay) as url, Watched(etcd, api, url) as watched:
        watched.start()
        wait_for(lambda: len(polls(relay)) >= 3, 10, "three polls")
        relay.cut_polls = False
        watched.put("10.1.1.0-24", value(1))
        watched.next(1)
    assert sum("broke the connection" in text for text in texts(caplog)) == 1
    assert sum("etcd is back" in text for text in texts(caplog)) == 1


@over_all
def test_the_next_server_is_watched_when_one_falls_silent(api: str, etcd: LocalEtcd) -> None:
    dead, brief = f"http://127.0.0.1:{free_port()}", EtcdTimeouts(read=0.3)
    with server(silent) as url, Watched(etcd, api, url, dead, etcd.url, timeouts=brief) as watched:
        watched.start()
        watched.put("10.1.1.0-24", value(1))
        assert lease_of(watched.next(1)) == ("10.1.1.0/24", "192.0.2.1")


def test_watch_warns_when_its_server_breaks_off_and_goes_on_at_the_next(
    api: str, etcd: LocalEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    relays = [Relay(etcd.url), Relay(etcd.url)]
    with server(relays[0]) as one, server(relays[1]) as two, Watched(etcd, api, one, two) as watched:
        watched.start()
        wait_for(lambda: any(polls(relay) for relay in relays), 10, "a poll")
        for relay in relays:
            for client in relay.clients:
                end(client)
        watched.put("10.1.1.0-24", value(1))
        wait_for(lambda: known(watched.events) == {"10.1.1.0/24": "192.0.2.1"}, 10, "the lease")
    assert sum("Watching" in text and "broke the connection" in text for text in texts(caplog)) == 1


def test_a_watch_ends_at_once_when_the_manager_is_closed(api: str, etcd: LocalEtcd) -> None:
    relay = Relay(etcd.url)
    with server(relay) as url, Watched(etcd, api, url, timeouts=PATIENT) as watched:
        watched.start()
        watched.start_own(lease("10.1.1.0/24"))
        wait_for(lambda: len(polls(relay)) == 2, 10, "two polls")
        watched.close()
        assert [type(error) for error in watched.ended] == [Cancelled, Cancelled]


@over_all
def test_a_watch_that_waits_to_try_again_ends_at_once_too(
    api: str, etcd: LocalEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    with Watched(etcd, api, f"http://127.0.0.1:{free_port()}", timeouts=PATIENT) as watched:
        watched.start_without_event()
        wait_for(lambda: texts(caplog), 10, "a word about the failure")
        watched.close()
        assert [type(error) for error in watched.ended] == [Cancelled]


@pytest.mark.parametrize("api", ["v2", "v3", "v3 over gRPC"])
def test_order_of_creation_is_known_in_v3_and_outlives_renewals(etcd: LocalEtcd, api: str) -> None:
    known = api != "v2"
    with Watched(etcd, api) as watched:
        for subnet in ("10.5.9.0-24", "10.5.1.0-24", "10.5.9.0-24"):
            watched.put(subnet, LEASE)
        first = watched.start()
        assert isinstance(first, Snapshot)
        created = {str(lease): lease.created for lease in first.leases}
        assert (0 < created["10.5.9.0/24"] < created["10.5.1.0/24"]) is known
        assert known or set(created.values()) == {0}
        # As Go renews, and as an operator deletes a lease that its node writes again.
        watched.put("10.5.9.0-24", LEASE)
        watched.delete("subnets/10.5.1.0-24")
        watched.put("10.5.1.0-24", LEASE)
        renewed, again = watched.next(1), watched.next(3)
        assert isinstance(renewed, Added)
        assert isinstance(again, Added)
        assert renewed.lease.created == created["10.5.9.0/24"]
        assert (again.lease.created > created["10.5.1.0/24"]) is known
