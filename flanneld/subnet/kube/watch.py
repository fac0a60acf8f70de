"""Watch of all nodes: a paged list, then a watch that survives lost connections and lost history."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.errors import NoAnswer, Refused, Retryable
from flanneld.model import Event
from flanneld.runtime import clock
from flanneld.runtime.clock import randint
from flanneld.runtime.logs import Once
from flanneld.runtime.sockets.http_connection import Lines
from flanneld.runtime.waits import Backoff, Backoffs
from flanneld.subnet.kube.api import NODES, Api, ApiStream, BrokenOff, Denied, Expired, NoServer
from flanneld.subnet.kube.nodes import KubeNode, NodeReader, child, decoded, items
from flanneld.subnet.list_watch import Contact, RelistNeeded
from flanneld.subnet.store import Deliver

log = logging.getLogger(__name__)

#: Nodes per page of a list. Smaller pages take less memory and no more time.
PAGE = 250
#: Seconds a watch lasts, chosen at random: otherwise all nodes would return at the same time.
_SHORTEST, _LONGEST = 300, 600
#: A watch shorter than this, in seconds, that brought no new version counts as failed.
_VERY_SHORT = 1.0
#: Seconds without contact after which the API server may have lost its history. Restoring its store from a
#: backup takes longer, because the server must be stopped and started.
LONGEST_SILENCE = 2.0
#: Seconds after a restored store in which each lost watch is followed by a list: whoever put back one backup
#: may try another, and its version may have overtaken ours.
_WARY = 60.0
#: Seconds for the first list of all nodes, after which the saved ones serve until it is there.
_FIRST_LIST = 5.0
#: Longest pauses in seconds by kind of failure; jitter adds up to as much. Attempts put no load on an absent
#: server, and its return should be noticed soon; so should rights that were given.
_LONGEST_PAUSES: dict[type, float] = {NoServer: 2.0, Denied: 2.5}


class InvalidWatchData(Retryable):
    """Error for a watch that sent invalid data: relist."""


class Restored(RelistNeeded):
    """Error for an API server whose history differs from ours: its store was restored or replaced."""


class NodeHandler(Protocol):
    """Receiver of nodes that turns them into lease events."""

    @property
    def own(self) -> KubeNode | None:
        """Our own node, as last seen."""
        ...

    def listed(self, nodes: list[KubeNode]) -> list[Event]:
        """Take the complete list of nodes. Raises ``Retryable`` if it is implausible."""
        ...

    def seen(self, node: KubeNode) -> list[Event]: ...

    def gone(self, node: KubeNode) -> list[Event]: ...


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return type and object of one event. Raises ``Expired``, or ``InvalidWatchData`` for invalid data."""
    try:
        event = decoded(line)
        kind, obj = event["type"], event["object"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = obj = None
    if not isinstance(kind, str) or not isinstance(obj, dict):
        raise InvalidWatchData("the watch sends what is no event", "is that a Kubernetes API server?")
    if kind != "ERROR":
        return kind, obj
    if obj.get("code") == 410:
        raise Expired(str(obj.get("message", ""))[:300])
    raise InvalidWatchData(f"the watch ended with: {str(obj.get('message', ''))[:300]}")


def backoffs(make: Callable[[], Backoff]) -> Backoffs:
    """Return back-offs by class of error, some with short pauses only."""

    def for_kind(kind: type) -> Backoff:
        backoff = make()
        return replace(backoff, longest=min(backoff.longest, _LONGEST_PAUSES.get(kind, math.inf)))

    return Backoffs(for_kind)


def is_behind(now: str, known: str) -> bool:
    """Return True if both resource versions are numbers and ``now`` is the lower."""
    return now.isdecimal() and known.isdecimal() and int(now) < int(known)


def pages(ask: Callable[..., dict[str, Any]], **selector: str) -> Iterator[dict[str, Any]]:
    """Yield the pages of a list of nodes. ``ask`` gets the query of each."""
    token = ""
    while True:
        page = ask(limit=str(PAGE), **selector, **({"continue": token} if token else {}))
        yield page
        token = str(child(page, "metadata").get("continue") or "")
        if not token:
            return


class WatchMemory:
    """State of a watch of nodes that outlives its sources."""

    def __init__(self, make_backoff: Callable[[], Backoff]) -> None:
        #: When a list or a watch last brought data, or a watch ended regularly; minus infinity to list.
        self.heard_at = -math.inf
        #: When the API server's store was last found to be restored.
        self.restored_at = -math.inf
        #: Function that returns what to deliver if the first list fails or is late; None afterwards.
        self.substitute: Callable[[Retryable], list[Event]] | None = None
        self.backoffs = backoffs(make_backoff)
        self.once = Once()

    def pause(self, reason: Retryable) -> float:
        return max(reason.retry_after, self.backoffs.pause(type(reason)))


class NodeSource:
    """``Source`` that lists and watches nodes over a connection of its own. A position is a resource version.

    A resource version alone does not reveal that the API server's store was restored from a backup: it may
    have overtaken ours since. So all nodes are relisted after a long loss of the server. After a short one,
    and after the regular end of a watch, a request for our own node compares version and uid, and the watch
    is resumed without a list.

    ``deliver`` takes the saved nodes while the first list is late. ``alive`` is called while a long response
    is read. ``only`` limits the watch to the node of that name.
    """

    def __init__(
        self,
        api: Api,
        reader: NodeReader,
        handler: NodeHandler,
        memory: WatchMemory,
        deliver: Deliver,
        alive: Callable[[], None],
        contact: Contact,
        *,
        only: str = "",
    ) -> None:
        self._api = api
        self._reader = reader
        self._handler = handler
        self._memory = memory
        self._selector = _selector(only) if only else {}
        self._deliver = deliver
        self._alive = alive
        self._contact = contact
        #: The watch, its incomplete line, its start time, and the version it started at.
        self._stream: ApiStream | None = None
        self._lines = Lines()
        self._began = -math.inf
        self._began_at = ""
        self.cancel = api.cancel

    def start(self, resume: str | None) -> tuple[list[Event], str]:
        with self._failing():
            return self._begin(resume)

    def changes(self, after: str) -> tuple[list[Event], str]:
        with self._failing():
            if self._stream is not None:
                return self._listen(self._stream, after)
            # The last watch has ended.
            return self._begin(after) if self._began_at else self._watch(after)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._api.close()  # a list that is not acted on leaves a connection, which nothing else would close

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Retryable as reason:
            self._fall_back(reason)
            if isinstance(reason, RelistNeeded | InvalidWatchData | NoAnswer):
                self._memory.heard_at = -math.inf
            if isinstance(reason, Restored):
                self._memory.restored_at = clock.now()
            raise

    def _begin(self, version: str | None) -> tuple[list[Event], str]:
        self._began_at = ""
        now, memory = clock.now(), self._memory
        if version is None or now - memory.heard_at > LONGEST_SILENCE or now - memory.restored_at < _WARY:
            return self._list()
        return self._compare(version), self._watch(version)[1]

    def _list(self) -> tuple[list[Event], str]:
        nodes: list[KubeNode] = []
        late = clock.now() + _FIRST_LIST

        def alive() -> None:
            self._alive()
            if clock.now() > late:
                self._fall_back(Retryable(f"the list of all nodes takes longer than {_FIRST_LIST:g} s"))

        def ask(**query: str) -> dict[str, Any]:
            return self._api.get(NODES, alive, _FIRST_LIST if self._memory.substitute else None, **query)

        for page in pages(ask, **self._selector):
            alive()
            nodes += self._read(items(page))
        version = _version_of(page)
        del page
        events = self._handler.listed(nodes)
        self._contact()
        self._memory.substitute, self._memory.heard_at = None, clock.now()
        return events, version

    def _fall_back(self, reason: Retryable) -> None:
        """Deliver the substitute for a list that is not there, once."""
        substitute, self._memory.substitute = self._memory.substitute, None
        if substitute is not None:
            self._deliver(substitute(reason))

    def _compare(self, version: str) -> list[Event]:
        """Raise ``Restored`` if the API server is behind ``version`` or does not have our node's uid.

        Our node is taken in once more: a backup may lack only what we wrote since ``version``.
        """
        own = self._handler.own
        selector = _selector(own.name) if own else {}
        page = self._api.get(NODES, self._alive, limit="1", **selector)
        if is_behind(_version_of(page), version):
            raise Restored("the API server's version went back; was its store restored?")
        ours = (
            node for node in self._read(items(page)) if own and (node.name, node.uid) == (own.name, own.uid)
        )
        found = next(ours, None)
        if own and not found:
            raise Restored(f"the API server has another node {own.name} than before, or none")
        return self._handler.seen(found) if found else []

    def _read(self, found: list[Any]) -> Iterator[KubeNode]:
        for item in found:
            try:
                yield self._reader.read(item)
            except Refused as reason:
                self._refuse(reason)

    def _watch(self, version: str) -> tuple[list[Event], str]:
        seconds = randint(_SHORTEST, _LONGEST)
        query = {"resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        self._lines, self._began, self._began_at = Lines(), clock.now(), version
        self._stream = self._api.watch(NODES, watch="true", **self._selector, **query)
        return [], version

    def _listen(self, stream: ApiStream, after: str) -> tuple[list[Event], str]:
        try:
            piece = stream.read(self._lines.is_incomplete)
        except BrokenOff as reason:
            log.log(V(1), "Watching again: %s", reason)
        else:
            self._memory.heard_at = clock.now()
            if piece:
                return self._hear(self._lines.feed(piece), after)
        self.close()
        if after == self._began_at and clock.now() - self._began < _VERY_SHORT:
            raise Retryable("the API server ends each watch at once", "see the API server's log")
        return [], after

    def _hear(self, lines: list[bytes], version: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        try:
            for line in lines:
                kind, obj = decode(line)
                events += self._take(kind, obj)
                version = _version_in(obj) or version
        except Retryable:
            self._deliver(events)
            raise
        if lines:
            self._contact()
            self._memory.backoffs.reset()
        return events, version

    def _take(self, kind: str, obj: dict[str, Any]) -> list[Event]:
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return []
        try:
            node = self._reader.read(obj)
        except Refused as reason:
            self._refuse(reason)
            return []
        return self._handler.gone(node) if kind == "DELETED" else self._handler.seen(node)

    def _refuse(self, reason: Refused) -> None:
        self._memory.once.warn(log, "node", f"Ignoring an object that is no node: {reason}")


def _selector(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _version_in(obj: dict[str, Any]) -> str:
    version = child(obj, "metadata").get("resourceVersion")
    return version if isinstance(version, str) else ""


def _version_of(page: dict[str, Any]) -> str:
    version = _version_in(page)
    if not version:
        raise Retryable("the list of nodes has no resourceVersion", "is that a Kubernetes API server?")
    return version
