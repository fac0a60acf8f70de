"""Simulated Kubernetes API server: nodes with versions, lists in pages, and watches that fail.

A list may be stale, as out of a watch cache. A watch repeats events or tells them late; history is compacted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from flanneld.errors import Cancelled
from flanneld.runtime import clock
from flanneld.subnet.kube.api import NODES, ApiRefusal, ApiStream, BrokenOff, Expired, NoServer
from tests.unit.simulation.world import World

#: Seconds after which a watch that says nothing gets a bookmark.
BOOKMARK = 60.0


def _nothing() -> None:
    pass


class Event(Struct, frozen=True, gc=False):
    """One version of a node, as a watch tells it, and the node before."""

    line: bytes
    name: str
    before: dict[str, Any] | None


class Faults(Struct):
    """Chances of a stale list, of a repeated event, and the longest delay of an event in seconds."""

    stale: float = 0.0
    repeated: float = 0.0
    lag: float = 0.05


class SimulatedApiServer:
    """Nodes, each with an object as the API tells it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = Faults()
        self.is_down = False
        self.nodes: dict[str, dict[str, Any]] = {}
        self.history: list[Event] = []
        self.first = 1
        self.streams: list[_Stream] = []
        #: Returns how many changes the next list lacks, as out of a watch cache that is behind.
        self.age: Callable[[], int] = lambda: 0
        #: Returns the seconds until a watch hears of a change.
        self.delay: Callable[[], float] = lambda: world.random.uniform(0.001, self.faults.lag)

    @property
    def version(self) -> int:
        return self.first + len(self.history) - 1

    def add_node(self, name: str, *cidrs: str) -> None:
        """A kubelet registers a node, and the controller manager gives it a podCIDR of each family."""
        meta = {
            "name": name,
            "uid": f"{name}-{self.version + 1}",
            "creationTimestamp": clock.utc_text(self.world.wall()),
            "annotations": {},
        }
        self._store("ADDED", name, {"metadata": meta, "spec": {"podCIDR": cidrs[0], "podCIDRs": [*cidrs]}})

    def delete_node(self, name: str) -> None:
        """Remove a node. A store that was restored may lack it already."""
        if name in self.nodes:
            self._store("DELETED", name, self.nodes[name])
            del self.nodes[name]

    def patch(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if name not in self.nodes:
            raise ApiRefusal(f"no node {name}", "", 404)
        old = self.nodes[name]
        notes = {**old["metadata"]["annotations"], **body.get("metadata", {}).get("annotations", {})}
        new = {**old, "metadata": {**old["metadata"], "annotations": notes}, **_conditions(body)}
        return self._store("MODIFIED", name, new)

    def compact(self) -> None:
        self.first, self.history = self.version + 1, []
        self.break_watches()

    def restore(self, changes: int) -> None:
        """Put a backup in place that lacks the last changes; every connection ends."""
        count = min(changes, len(self.history))
        self.nodes, _ = self._before(count)
        del self.history[len(self.history) - count :]
        self.break_watches()

    def set_down(self, *, down: bool) -> None:
        self.is_down = down
        if down:
            self.break_watches()

    def break_watches(self) -> None:
        for stream in self.streams:
            stream.is_broken = True
            stream.hear(0.0)

    def listed(self, selector: str, *, may_be_stale: bool) -> dict[str, Any]:
        nodes, version = self._before(self.age())
        if may_be_stale and self.world.random.random() < self.faults.stale:
            nodes, version = self._before(self.world.random.randint(1, 5))
        desired = selector.partition("metadata.name=")[2]
        found = [each for name, each in sorted(nodes.items()) if desired in ("", name)]
        return {"metadata": {"resourceVersion": str(version)}, "items": found}

    def _before(self, changes: int) -> tuple[dict[str, dict[str, Any]], int]:
        nodes, count = dict(self.nodes), min(changes, len(self.history))
        for event in reversed(self.history[len(self.history) - count :]):
            if event.before is None:
                nodes.pop(event.name, None)
            else:
                nodes[event.name] = event.before
        return nodes, self.version - count

    def _store(self, kind: str, name: str, node: dict[str, Any]) -> dict[str, Any]:
        meta = {**node["metadata"], "resourceVersion": str(self.version + 1)}
        before = self.nodes.get(name)
        node = self.nodes[name] = {**node, "metadata": meta}
        self.history.append(Event(json.dumps({"type": kind, "object": node}).encode() + b"\n", name, before))
        for stream in self.streams:
            stream.hear(self.delay())
        return node


class SimulatedApi:
    """The product's ``Api`` of one process. ``before_request`` is called first, and may raise."""

    name = "simulation"

    def __init__(
        self,
        server: SimulatedApiServer,
        before_request: Callable[[], None],
        effect: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._server = server
        self._before_request = before_request
        self._effect = effect
        self._is_cancelled = False
        self.is_down = False
        self.wake: Callable[[float], None] = lambda _when: None
        self.stream: _Stream | None = None

    def get(
        self, path: str, alive: Callable[[], None] = _nothing, read: float | None = None, /, **query: str
    ) -> dict[str, Any]:
        self._ask()
        del alive, read
        assert path == NODES
        selector = query.get("fieldSelector", "")
        return self._server.listed(selector, may_be_stale=not selector)

    def patch(self, path: str, body: str) -> dict[str, Any]:
        self._ask()
        self._effect(f"before {path} is patched")
        done = self._server.patch(path.split("/")[-2], json.loads(body))
        self._before_request()  # the process may end before it has the answer
        self._effect(f"after {path} is patched")
        return done

    def post(self, path: str, obj: Mapping[str, Any]) -> dict[str, Any]:
        del path, obj
        self._ask()
        return {}

    def watch(self, path: str, **query: str) -> ApiStream:
        assert path == NODES
        self._ask()
        version = int(query["resourceVersion"])
        if version < self._server.first - 1:
            raise Expired("too old resource version")
        self.stream = stream = _Stream(self._server, self, version, float(query["timeoutSeconds"]))
        self._server.streams.append(stream)
        if version < self._server.version:
            stream.hear(0.0)
        return ApiStream(stream.read, stream.close)

    def reconnect(self) -> None:
        """Do nothing: no request takes time."""

    def close(self) -> None:
        """Do nothing: no connection is kept between requests."""

    def cancel(self) -> None:
        self._is_cancelled = True
        if self.stream is not None:
            self.stream.hear(0.0)
            self.stream.close()

    def check(self) -> None:
        if self._is_cancelled:
            raise Cancelled
        if self._server.is_down:
            raise NoServer("the API server does not answer")

    def _ask(self) -> None:
        self.check()
        self._before_request()


class _Stream:
    """One watch, from after a version on."""

    def __init__(self, server: SimulatedApiServer, api: SimulatedApi, version: int, lasts: float) -> None:
        self._server = server
        self._api = api
        self._told = version
        self._ends = server.world.time + lasts
        self.is_broken = False
        self.stalled_until = -math.inf

    def hear(self, after: float) -> None:
        self._api.wake(max(self._server.world.time + after, self.stalled_until))

    def has_news(self) -> bool:
        return self._told < self._server.version

    def wait(self) -> float:
        """Return when ``read`` would return without news."""
        return min(self._server.world.time + BOOKMARK, self._ends)

    def read(self, runs: bool = False) -> bytes:
        del runs
        server = self._server
        self._api.check()
        if self.is_broken:
            raise BrokenOff("the connection of the watch was lost")
        if self._told < server.first - 1:
            raise Expired("the history was compacted")
        if server.world.time >= self._ends:
            return b""
        news = server.history[self._told + 1 - server.first :]
        self._told = server.version
        if not news:
            meta = {"resourceVersion": str(self._told)}
            return json.dumps({"type": "BOOKMARK", "object": {"metadata": meta}}).encode() + b"\n"
        if server.world.random.random() < server.faults.repeated:
            news = [*news[:1], *news]
        return b"".join(each.line for each in news)

    def close(self) -> None:
        if self._api.stream is self:
            self._server.streams.remove(self)
            self._api.stream = None


def _conditions(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status": body["status"]} if "status" in body else {}
