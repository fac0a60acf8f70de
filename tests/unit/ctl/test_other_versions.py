"""Each part of a status may be of another type than ours, as another version's daemon tells it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl import nodes, paths
from flanneld.ctl.checks.cluster import remarks
from flanneld.ctl.checks.encryption import sessions_of
from flanneld.ctl.commands import COMMANDS
from flanneld.ctl.doctor import examine
from flanneld.ctl.output import table_lines
from flanneld.ctl.source import _of_the_daemon
from flanneld.diagnostics.status import NotUnderstood, Status
from flanneld.errors import FlannelError
from flanneld.model import IPAddress
from flanneld.network.survey import SILENCE, Reply
from flanneld.options import Options
from flanneld.state.resources import Address
from tests.unit.ctl.documents import object_of
from tests.unit.ctl.test_checks import WELL
from tests.unit.ctl.test_trace import FDB, LINK, NEIGH, ROUTE

SESSION = {"subnet": "10.5.2.0/24", "state": "established", "handshake": 1.0, "endpoint": "192.0.2.2:51820"}
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "pid": 7,
    "time": 1000.0,
    "started": 10.0,
    "kube_subnet_mgr": False,
    "answer_port": 0,
    "store": {"name": "etcd v3 at x", "answers": True, "problem": "away", "remedy": None, "cache": None},
    "health": {"ready": True, "missing": ["x"], "conditions": [{"part": "store", "problem": "x"}]},
    "network": {"ranges": [{"network": "10.5.0.0/16", "subnet_len": 24}], "backend": "vxlan", "also": None},
    "lease": {"subnets": ["10.5.1.0/24"], "expires": 5000.0, "macs": ["02:00:00:00:00:01"]},
    "uplink": {"name": "lo", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": ["192.0.2.1"]},
    "mtu": 1450,
    "devices": ["flannel.1"],
    "local": [object_of(LINK), object_of(Address("flannel.1", ip_address("10.5.1.0")))],
    "synced": True,
    "last_sync": 99.0,
    "repairs": [{"kind": "route", "cause": "audit", "number": 2}],
    "fights": False,
    "lost_notifications": 1,
    "refused": [{"object": "route x", "reason": "no", "errno": 101, "remedy": "", "table": "route"}],
    "removal_guard": {"holds": True, "number": 1},
    "firewall": {"place": "nft", "not_in_place": ["IPv6"], "repairs": []},
    "events": [{"time": 1.0, "severity": "I", "source": "main", "text": "flanneld 1"}],
    "peers": [
        {
            "subnets": ["10.5.2.0/24"],
            "public_ips": ["192.0.2.2"],
            "vnis": [1],
            "backend": "wireguard",
            "state": "in the kernel",
            "objects": [object_of(each) for each in (NEIGH, FDB, ROUTE)],
            "sessions": [SESSION],
            "probe": {"target": "10.5.2.0", "time": 1.0, "rtt": None},
        }
    ],
}
#: Values of other types, and those among them that no field of an object may have.
OTHERS: tuple[Any, ...] = (None, [], {}, 7, -1, 1e30, "x", "", True)
NO_FIELD: tuple[Any, ...] = ([], {})
ARGUMENTS = argparse.Namespace(address=ip_address("10.5.2.7"), from_container=None, output="table")


def places(told: Any, *place: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each value."""
    yield place
    parts = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for name, part in parts:
        yield from places(part, *place, name)


def with_value(place: tuple[str | int, ...], value: object) -> bytes:
    document = deepcopy(DOCUMENT)
    part: Any = document
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    return json.dumps(document).encode()


def looks(status: Status) -> Iterator[Callable[[], object]]:
    """Yield what the commands do with a status that takes no packets."""

    def quiet(to: Iterable[IPAddress]) -> dict[IPAddress, Reply]:
        return dict.fromkeys(to, SILENCE)

    yield lambda: examine(replace(WELL, status=status))
    yield lambda: paths.sample(status, lambda asked: [None] * len(asked))
    yield lambda: list(sessions_of(status, [], {"10.5.2.0/24"}, 1.0))
    yield lambda: remarks(nodes.gather(status, quiet, quiet, 1.0))


@pytest.mark.parametrize("name", DOCUMENT)
def test_value_of_another_type_is_left_out_or_not_understood(name: str) -> None:
    """Any other error would be told as a bug of flannelctl."""
    for place in places(DOCUMENT[name], name):
        for value in NO_FIELD if "value" in place[:-1] else OTHERS:
            source = _of_the_daemon(with_value(place, value), Options())
            for look in looks(source.status):
                try:
                    look()
                except (NotUnderstood, FlannelError):
                    continue
            for command in ("status", "peers", "logs", "routes", "trace"):
                try:
                    shown, plain, _ = COMMANDS[command][0](source, ARGUMENTS)
                except (NotUnderstood, FlannelError):
                    continue
                assert [list(table_lines(table)) for table in shown]
                assert plain()
