"""Requests that Go flannel 0.6.2's server was recorded to answer: ours answers the same bytes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.local_etcd import LocalEtcd, running_etcd
from tests.unit.subnet.remote.servers import (
    CONFIG,
    EXCHANGES,
    ROOT,
    Answer,
    LocalFile,
    Running,
    exchange,
    running_server,
    timeless,
)

A = '{"PublicIP":"10.99.0.11","BackendType":"host-gw"}'
B = '{"PublicIP":"10.99.0.12","BackendType":"host-gw"}'
#: What is below the prefix: value and TTL of each key.
PLAIN: dict[str, tuple[str, int | None]] = {"config": (CONFIG, None)}
TWO = PLAIN | {"subnets/10.5.12.0-24": (A, 86400), "subnets/10.5.80.0-24": (B, 86400)}
_OF_140 = '{"PublicIP":"10.99.0.140"}'
RESERVED = PLAIN | {"subnets/10.5.140.0-24": (_OF_140, None)}
FULL = {
    "full/config": (
        '{"network": "10.7.0.0/16", "SUBNETMIN": "10.7.1.0", "SubnetMax": "10.7.2.0", "SubnetLen": 28,'
        ' "Other": 1, "Backend": { "Type" : "vxlan", "VNI": 7, "x": "<&>" }}',
        None,
    )
}
SMALL = {
    "nobe/config": ('{"Network":"10.8.0.0/24"}', None),
    "tiny/config": ('{"Network":"10.11.0.0/28"}', None),
}
_ODD = '{"Network":"10.24.0.0/16","Backend":{"Type":"alloc"}}'


def only(subnet: str) -> dict[str, tuple[str, int | None]]:
    """A network with one subnet to choose."""
    limits = {"SubnetMin": subnet, "SubnetMax": subnet}
    return {
        "config": (json.dumps({"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}, **limits}), None)
    }


#: What has to be in etcd for a recorded exchange, by its number.
STATES: dict[int, Mapping[str, tuple[str, int | None]]] = {
    1: {},
    2: {},
    3: PLAIN,
    4: FULL,
    9: {"sp ace/config": (_ODD, None)},
    10: {"a.b-c_d/config": (_ODD, None)},
    101: {},
    102: TWO,
    103: TWO,
    105: PLAIN,
    107: only("10.5.29.0"),
    115: only("10.5.71.0"),
    120: PLAIN | {"subnets/10.5.140.0-24": ('{"PublicIP":"10.99.0.140","BackendType":"host-gw"}', None)},
    122: {
        "tiny/config": (
            '{"Network":"10.11.0.0/28","SubnetLen":30,"SubnetMin":"10.11.0.4","SubnetMax":"10.11.0.4"}',
            None,
        ),
        "tiny/subnets/10.11.0.4-30": (_OF_140, 86400),
    },
    203: TWO,
    204: TWO,
    214: PLAIN | {"subnets/10.5.254.0-24": ('{"PublicIP":"10.99.0.77"}', 86400)},
    217: PLAIN | {"subnets/10.5.140.0-24": ('{"PublicIP":"10.99.0.140","BackendType":"host-gw"}', None)},
    218: PLAIN | {"subnets/10.5.254.0-24": ('{"PublicIP":"10.99.0.77"}', None)},
    219: PLAIN | {"subnets/10.5.140.0-24": (_OF_140, 86400)},
    236: PLAIN | {"subnets/10.5.20.0-24": (A, 86400)},
    301: {},
    304: FULL | SMALL,
    402: {},
    405: RESERVED,
    406: RESERVED,
    407: RESERVED,
    410: FULL,
    415: PLAIN | {"subnets/10.5.254.0-24": ('{"PublicIP":"10.99.0.77"}', 86400)},
    416: RESERVED | {"subnets/10.5.142.0-24": ('{"PublicIP":"10.99.0.142"}', None)},
    418: RESERVED,
    419: PLAIN | {"subnets/10.5.140.0-24": (_OF_140, 86400)},
}
#: Answered when something happens: what, as a key and its new value, None if it goes.
EVENTS: dict[int, tuple[Mapping[str, tuple[str, int | None]], str, str | None, int | None]] = {
    205: (TWO, "subnets/10.5.12.0-24", A, 86400),
    206: (TWO, "subnets/10.5.12.0-24", A, 86400),
    207: (TWO, "subnets/10.5.12.0-24", None, None),
    208: (TWO, "subnets/10.5.12.0-24", None, None),
    210: (PLAIN | {"subnets/10.5.253.0-24": (A, 86400)}, "subnets/10.5.253.0-24", None, None),
    220: (PLAIN, "subnets/10.5.150.0-24", '{"PublicIP":"10.99.0.12"}', None),
    305: (FULL, "blue/config", CONFIG, None),
    306: (FULL | {"blue/config": (CONFIG, None)}, "blue/config", CONFIG, None),
    307: (FULL | {"blue/config": (CONFIG, None)}, "blue/config", None, None),
}
#: Errors whose reason after these words is ours.
OTHER_WORDS = {
    111: "JSON decoding error: ",
    117: "JSON decoding error: ",
    122: "",
    412: "JSON decoding error: ",
}
#: Recorded events that the tests below provoke, one answer at a time.
LATER = {221, 222, 223, 230, 302, 308, 312, *range(601, 621)}
NUMBERS = {int(name[:3]): name for name in EXCHANGES}


@pytest.fixture(scope="module", params=["v2", "v3", "file"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def etcd(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEtcd | LocalFile]:
    if api == "file":
        yield LocalFile(tmp_path_factory.mktemp("store") / "leases.db")
        return
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture
def server(etcd: LocalEtcd | LocalFile, api: str) -> Iterator[Running]:
    with running_server(etcd, api) as server:
        yield server
    clear(etcd, api)


def clear(etcd: LocalEtcd | LocalFile, api: str) -> None:
    if isinstance(etcd, LocalFile) or api == "v3":
        etcd.keys(api).delete(ROOT)
    elif etcd.get("/coreos.com"):
        etcd.delete("/coreos.com")


def fill(etcd: LocalEtcd | LocalFile, api: str, state: Mapping[str, tuple[str, int | None]]) -> None:
    for key, (value, ttl) in state.items():
        etcd.keys(api).put(f"{ROOT}/{key}", value, ttl)


def same(answer: Answer, recorded: Mapping[str, Any]) -> None:
    headers = {name: text for name, text in answer.headers.items() if name not in ("Date", "Content-Length")}
    assert (answer.status, headers) == (recorded["status"], recorded["headers"])
    assert sorted_snapshot(timeless(answer.body)) == sorted_snapshot(timeless(recorded["answer"]))
    length = answer.headers["Content-Length"]
    assert length == str(len(answer.body)) or recorded["method"] == "HEAD"


def sorted_snapshot(text: str) -> str:
    """Give the names of networks an order: etcd has one of its own."""
    return re.sub(r'"snapshot":\[("[^\]]*)\]', lambda m: f'"snapshot":{sorted(m[1].split(","))}', text)


def replay(server: Running, recorded: Mapping[str, Any]) -> Answer:
    return server.ask(recorded["method"], recorded["target"], recorded["body"])


@pytest.mark.parametrize("number", sorted(NUMBERS.keys() - EVENTS.keys() - LATER), ids=lambda n: NUMBERS[n])
def test_answer_is_as_recorded(etcd: LocalEtcd | LocalFile, api: str, server: Running, number: int) -> None:
    fill(etcd, api, STATES.get(number, PLAIN))
    answer, recorded = replay(server, exchange(number)), exchange(number)
    if (start := OTHER_WORDS.get(number)) is not None:
        assert answer.body.startswith(start)
        answer = answer._replace(
            body=recorded["answer"],
            headers=answer.headers | {"Content-Length": str(len(recorded["answer"]))},
        )
    same(answer, recorded)


@pytest.mark.parametrize("number", sorted(EVENTS), ids=lambda n: NUMBERS[n])
def test_watch_is_answered_as_recorded(
    etcd: LocalEtcd | LocalFile, api: str, server: Running, number: int
) -> None:
    state, key, value, ttl = EVENTS[number]
    fill(etcd, api, state)
    recorded = exchange(number)
    target = recorded["target"].partition("?")[0]
    server.follow()
    answers: list[Answer] = []
    cursor = server.cursor("/v1/_/leases")
    watch = threading.Thread(target=lambda: answers.append(server.ask("GET", f"{target}?next={cursor}")))
    watch.start()
    watch.join(0.3)
    assert watch.is_alive()
    if value is None:
        etcd.keys(api).delete(f"{ROOT}/{key}")
    else:
        etcd.keys(api).put(f"{ROOT}/{key}", value, ttl)
    watch.join(20)
    same(answers[0], recorded)


def test_events_that_were_missed_come_one_for_each_request(
    etcd: LocalEtcd | LocalFile, api: str, server: Running
) -> None:
    fill(etcd, api, PLAIN)
    server.follow()
    cursor = server.cursor()
    key = "subnets/10.5.251.0-24"
    for value in ('{"PublicIP":"10.99.0.201"}', '{"PublicIP":"10.99.0.202"}'):
        fill(etcd, api, {key: (value, 86400)})
    etcd.keys(api).delete(f"{ROOT}/{key}")
    for number in (221, 222, 223):
        answer = server.ask("GET", f"/v1/_/leases?next={cursor}")
        same(answer, exchange(number))
        cursor = json.loads(answer.body)["cursor"]


def test_watch_from_before_the_log_is_answered_with_a_snapshot(
    etcd: LocalEtcd | LocalFile, api: str, server: Running
) -> None:
    fill(etcd, api, TWO)
    same(server.ask("GET", "/v1/_/leases?next=1"), exchange(203))


def test_watch_from_the_future_is_answered_with_a_snapshot(
    etcd: LocalEtcd | LocalFile, api: str, server: Running
) -> None:
    fill(etcd, api, TWO)
    same(server.ask("GET", f"/v1/_/leases?next={int(server.cursor()) + 100}"), exchange(203))


def test_foreign_keys_and_values_stop_no_watch(
    etcd: LocalEtcd | LocalFile, api: str, server: Running
) -> None:
    fill(etcd, api, TWO)
    server.follow()
    cursor = server.cursor()
    answers: list[Answer] = []
    watch = threading.Thread(target=lambda: answers.append(server.ask("GET", f"/v1/_/leases?next={cursor}")))
    watch.start()
    watch.join(0.3)
    fill(etcd, api, {"subnets/foo": ("x", None), "subnets/10.5.9.0-24": ("nonsense", None)})
    fill(etcd, api, {"subnets/10.5.12.0-24": (A, 86400)})
    watch.join(20)
    same(answers[0], exchange(206))
    same(server.ask("GET", "/v1/_/leases"), exchange(203))
