"""Following all nodes: a list in pages, then a watch, through lost connections and lost history."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec.structs import replace

from flanneld.compat.glog import Once, V
from flanneld.errors import NoAnswer, Refused, Retryable
from flanneld.model import Event
from flanneld.runtime import clock, randomness
from flanneld.runtime.backoff import Backoff, Backoffs
from flanneld.runtime.outage import Outage
from flanneld.subnet.kube.api import NODES, Api, ApiStream, BrokenOff, Expired, NoServer
from flanneld.subnet.kube.nodes import Node, NodeReader, child, decoded, items
from flanneld.subnet.manager import Deliver
from flanneld.subnet.watch_lines import Lines

log = logging.getLogger(__name__)

#: Nodes in a page of a list. Smaller pages take less memory, and no more time.
PAGE = 250
#: A watch lasts so many seconds, chosen anew each time: else all nodes would come back at once.
_SHORTEST, _LONGEST = 300, 600
#: A watch that ends sooner and has led no further, in seconds, is a failure.
_VERY_SHORT = 1.0
#: Seconds without a word of the API server after which its history may be another one. To restore its store
#: from a backup it has to be stopped and started, which takes longer.
_GAP = 2.0
#: Upper limit of a pause while no connection can be made, in seconds; up to as much comes on top by chance.
#: An attempt burdens no server then, and the sooner the server's return is noticed the better.
_NO_SERVER = 2.0


class ListAgain(Retryable):
    """The stream cannot be trusted any more: only a list can tell what is there."""


class Restored(Expired):
    """The API server's history is not the one that we know: its store was restored, or is another one."""


class Audience(Protocol):
    """Who makes leases of nodes."""

    @property
    def own(self) -> Node | None:
        """Our own node, as last seen."""
        ...

    def listed(self, nodes: list[Node]) -> list[Event]:
        """These are all nodes. Raises ``Retryable`` if that cannot be."""
        ...

    def seen(self, node: Node) -> list[Event]: ...

    def gone(self, node: Node) -> list[Event]: ...


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """Type and object of one event. Raises ``Expired``, or ``ListAgain`` for what makes no sense."""
    try:
        event = decoded(line)
        kind, obj = event["type"], event["object"]
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = obj = None
    if not isinstance(kind, str) or not isinstance(obj, dict):
        raise ListAgain("the watch sends what is no event", "is that a Kubernetes API server?")
    if kind != "ERROR":
        return kind, obj
    if obj.get("code") == 410:
        raise Expired(str(obj.get("message", ""))[:300])
    raise ListAgain(f"the watch ended with: {str(obj.get('message', ''))[:300]}")


def backoffs(make: Callable[[], Backoff]) -> Backoffs:
    """Back-offs by the class of an error. They are short while no connection can be made."""

    def for_kind(kind: type) -> Backoff:
        backoff = make()
        return replace(backoff, longest=min(backoff.longest, _NO_SERVER)) if kind is NoServer else backoff

    return Backoffs(for_kind)


def is_behind(now: str, known: str) -> bool:
    """Return True if a resource version is lower than another one, as far as both are numbers."""
    return now.isdecimal() and known.isdecimal() and int(now) < int(known)


class NodeWatchMachine:
    """Tells an audience of every node, step by step, over a connection of its own.

    A resource version alone does not tell whether the API server's store was restored from a backup: it may
    have overtaken ours since. So all nodes are listed after each loss of the server that lasted. After a
    short one, and each time a watch has run its time, a request for our own node compares version and uid.

    Of an outage the log has its begin, a line a minute, and its end. ``deliver`` takes what the audience
    makes of it all; ``alive`` is called while a long answer comes in. With ``only`` it is told of the node of
    that name alone.
    """

    def __init__(
        self,
        api: Api,
        reader: NodeReader,
        audience: Audience,
        make_backoff: Callable[[], Backoff],
        deliver: Deliver,
        alive: Callable[[], None],
        *,
        only: str = "",
    ) -> None:
        self._api = api
        self._reader = reader
        self._audience = audience
        self._selector = _selector(only) if only else {}
        self._backoffs = backoffs(make_backoff)
        self._deliver = deliver
        self._alive = alive
        self._hurry = threading.Event()
        self._reread = threading.Event()
        self._not_before = -math.inf
        #: Where to go on from; None when everything has to be read.
        self._version: str | None = None
        #: When a list or a watch last brought something, a watch's regular end included.
        self._heard_at = -math.inf
        #: The watch, what has come of a line, when it began, and at which version.
        self._stream: ApiStream | None = None
        self._lines = Lines()
        self._began = -math.inf
        self._began_at = ""
        self._once = Once()
        self._outage = Outage(
            log,
            "Following the nodes, and keeping what is there meanwhile",
            "Following the nodes: the API server answers again",
        )

    def step(self, now: float) -> float:
        """Begin a watch, or wait for what it brings next; return when to step again.

        Raises ``Cancelled`` after ``cut``.
        """
        if now < self._not_before and not self._hurry.is_set():
            return self._not_before
        self._not_before = now
        try:
            if self._stream is None:
                self._hurry.clear()
                self._begin()
            else:
                self._listen(self._stream)
        except Expired as reason:
            self.close()
            level = logging.WARNING if isinstance(reason, Restored) else V(1)
            log.log(level, "Listing all nodes again: %s", reason)
            self._version = None
            self._pause(self._backoffs.pause(Expired))
        except Retryable as problem:
            self.close()
            if not self._hurry.is_set():  # else we broke the connection ourselves
                self._outage.failed(problem)
            if isinstance(problem, ListAgain | NoAnswer):
                self._version = None
            self._pause(max(problem.retry_after, self._backoffs.pause(type(problem))))
        return self._not_before

    @property
    def listens(self) -> bool:
        """Return True if the next step waits for news, False if it asks for something."""
        return self._stream is not None

    @property
    def problem(self) -> Retryable | None:
        """Why it failed when the API server was asked last, None if it did not. From any thread."""
        return self._outage.problem

    def reread(self) -> None:
        """List all nodes again. May be called from any thread."""
        self._reread.set()
        self.reconnect()

    def reconnect(self) -> None:
        """Go on over a new connection at the next step, which is due. May be called from any thread."""
        self._hurry.set()
        self._api.reconnect()

    def cut(self) -> None:
        """Let ``step`` raise ``Cancelled``, at once. May be called from any thread, repeatedly."""
        self._hurry.set()
        self._api.cut()

    def close(self) -> None:
        """Give up the watch; for the thread that steps."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _begin(self) -> None:
        if self._reread.is_set():
            self._reread.clear()
            self._version = None
        if self._version is None or clock.now() - self._heard_at > _GAP:
            self._version = self._list()
        else:
            self._compare(self._version)
        self._watch(self._version)

    def _list(self) -> str:
        nodes: list[Node] = []
        token = ""
        while True:
            more = {"continue": token} if token else {}
            page = self._api.get(NODES, self._alive, limit=str(PAGE), **self._selector, **more)
            self._alive()
            nodes += self._read(items(page))
            meta = child(page, "metadata")
            token = str(meta.get("continue") or "")
            if not token:
                break
        version = _version_of(page)
        del page
        self._deliver(self._audience.listed(nodes))
        self._outage.answered()
        self._heard_at = clock.now()
        return version

    def _compare(self, version: str) -> None:
        """Raise ``Restored`` if the API server is behind a version, or has another node in place of ours."""
        own = self._audience.own
        selector = _selector(own.name) if own else {}
        page = self._api.get(NODES, self._alive, limit="1", **selector)
        if is_behind(_version_of(page), version):
            raise Restored("the API server is behind what it said before; was its store restored?")
        if own and own.uid not in {node.uid for node in self._read(items(page)) if node.name == own.name}:
            raise Restored(f"the API server has another node {own.name} than before, or none")

    def _read(self, found: list[Any]) -> Iterator[Node]:
        for item in found:
            try:
                yield self._reader.read(item)
            except Refused as reason:
                self._refuse(reason)

    def _watch(self, version: str) -> None:
        seconds = randomness.randint(_SHORTEST, _LONGEST)
        query = {"resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        self._lines, self._began, self._began_at = Lines(), clock.now(), version
        self._stream = self._api.watch(NODES, watch="true", **self._selector, **query)

    def _listen(self, stream: ApiStream) -> None:
        try:
            # A wish that came before there was a connection to drop ends the watch here.
            piece = b"" if self._reread.is_set() else stream.read()
        except BrokenOff as reason:
            log.log(V(1), "Watching again: %s", reason)
        else:
            self._heard_at = clock.now()
            if piece:
                self._hear(self._lines.feed(piece))
                return
        self.close()
        in_vain = self._version == self._began_at and not self._hurry.is_set()
        if in_vain and clock.now() - self._began < _VERY_SHORT:
            raise Retryable("the API server ends each watch at once", "see the API server's log")

    def _hear(self, lines: list[bytes]) -> None:
        events: list[Event] = []
        try:
            for line in lines:
                events += self._take(*decode(line))
        finally:
            if events:
                self._deliver(events)
        if lines:
            self._outage.over()
            self._backoffs.reset()

    def _take(self, kind: str, obj: dict[str, Any]) -> list[Event]:
        version = child(obj, "metadata").get("resourceVersion")
        events: list[Event] = []
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            try:
                node = self._reader.read(obj)
            except Refused as reason:
                self._refuse(reason)
            else:
                events = self._audience.gone(node) if kind == "DELETED" else self._audience.seen(node)
        if isinstance(version, str) and version:
            self._version = version
        return events

    def _pause(self, seconds: float) -> None:
        self._not_before = clock.now() + seconds

    def _refuse(self, reason: Refused) -> None:
        self._once.warn(log, "node", f"Passing over what is no node: {reason}")


def _selector(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _version_of(page: dict[str, Any]) -> str:
    version = child(page, "metadata").get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise Retryable("the list of nodes has no resourceVersion", "is that a Kubernetes API server?")
    return version
