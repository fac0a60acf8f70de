"""Store on Kubernetes: a node's podCIDR is its subnet, its annotations are the lease's attributes.

Requests, annotations and conditions are those of Go flanneld 0.12 and later, so both can share a cluster. A
lease lasts as long as its node. ``docs/kubernetes.md`` lists the intended differences.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from flanneld.config import Config, parse
from flanneld.errors import Cancelled, Fatal, NoAnswer, Refused, Retryable, remembered
from flanneld.model import FAMILIES, Cached, Event, Family, IPAddress, Lease, LeaseAttrs, LeaseKey, Removed
from flanneld.runtime import clock
from flanneld.runtime.logs import Once
from flanneld.runtime.sockets.interruptible import HostAddresses, no_heartbeat
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube.access import Access
from flanneld.subnet.kube.api import NODES, Api, ApiRefusal, ApiTimeouts
from flanneld.subnet.kube.node_table import NodeCache, NodeTable, Saved
from flanneld.subnet.kube.nodes import (
    ENDPOINTS,
    KubeNode,
    NodeReader,
    announced,
    full_prefix,
    items,
    lease_of,
    own_key,
    own_public_ip,
)
from flanneld.subnet.kube.own_node import NodeUpkeep, OwnNode
from flanneld.subnet.kube.watch import NodeSource, WatchMemory, pages
from flanneld.subnet.list_watch import Contact, ListWatch, Watches
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts

log = logging.getLogger(__name__)

#: Seconds for which our node need not be read again during startup.
_FRESH = 10.0


def _ignore(_: object) -> None:
    """Discard events: ``NodeUpkeep`` handles those of our own node."""


class KubeOptions(Struct, frozen=True, gc=False):
    """Command line options of the store in Kubernetes. An empty ``state_dir`` disables the cache."""

    api_url: str
    kubeconfig: str
    annotation_prefix: str
    net_config: str
    state_dir: str


class KubeStore:
    """``Store`` and ``NodeStore`` on the API server.

    The constructor connects to nothing. It raises ``Fatal`` for unusable options.
    """

    def __init__(
        self,
        options: KubeOptions,
        environ: Mapping[str, str],
        timeouts: ApiTimeouts | None = None,
        make_backoff: Callable[[], Backoff] = Backoff,
        open_api: Callable[[Access, ApiTimeouts], Api] = Api,
    ) -> None:
        if not environ.get("NODE_NAME") and not (environ.get("POD_NAME") and environ.get("POD_NAMESPACE")):
            raise Fatal(
                "it is not known which node this is",
                "set NODE_NAME, or POD_NAME and POD_NAMESPACE, through the downward API",
            )
        self._net_config = Path(options.net_config)
        self._state = NodeCache(options.state_dir, environ.get("NODE_NAME", ""))
        self._reader = NodeReader(full_prefix(options.annotation_prefix))
        self._access = Access(options.api_url, options.kubeconfig, environ)
        self._open_api = partial(open_api, self._access, timeouts or ApiTimeouts())
        self._make_backoff = make_backoff
        self._requests = self._open_api()
        self._own_node = OwnNode(self._requests, self._reader, environ)
        self._once = Once()
        self._closed = threading.Event()
        self._watches = Watches()
        #: The watch of nodes.
        self._watch: ListWatch[str] | None = None
        self._config: Config | None = None
        #: Our node, and the time it was read.
        self._read: tuple[float, KubeNode] | None = None
        #: The saved nodes in use while the API server does not answer.
        self._saved: Saved | None = None
        self._unanswered: Retryable | None = None
        self._member: _Member | None = None
        self._hosts = HostAddresses(lambda: filter(None, [self._access.host]))
        self.name = f"Kubernetes at {self._access.name}"

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._hosts.known()

    def network_config(self) -> Config:
        try:
            text = self._net_config.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise Retryable(
                f"cannot read the network config in {self._net_config}: {error.strerror}",
                "mount the ConfigMap there, or correct -net-config-path",
            ) from None
        self._config = parse(text)
        return self._config

    def public_ips(self) -> tuple[IPv4Address | None, IPv6Address | None]:
        node = self._own()
        found: dict[Family, IPAddress | None] = {4: None, 6: None}
        for family in FAMILIES:
            try:
                found[family] = own_public_ip(node, family)
            except Refused as reason:
                self._once.warn(log, family, f"Using our own address: {reason.problem}; correct it")
        ipv4, ipv6 = found[4], found[6]
        assert not isinstance(ipv4, IPv6Address)
        assert not isinstance(ipv6, IPv4Address)
        return ipv4, ipv6

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        del public_ip  # our node is identified by its name
        node = self._own()
        if self._config is None:
            return None
        try:
            return announced(node, self._config)
        except Refused as reason:
            self._once.warn(log, "stored", f"Ignoring our earlier annotation: {reason.problem}")
            return None

    def read_leases(self) -> list[Lease]:
        found: list[Lease] = []
        own = self._own()
        config = self._config or self.network_config()
        nodes: Iterable[KubeNode] = self._saved.peers if self._saved else self._listed()
        for node in nodes:
            with suppress(Refused):
                if node.name != own.name and node.is_managed:
                    found.append(lease_of(node, config))
        return found

    def _listed(self) -> Iterator[KubeNode]:
        for page in pages(partial(self._requests.get, NODES)):
            for each in items(page):
                with suppress(Refused):
                    yield self._reader.read(each)

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        del previous, local  # the podCIDR is the lease, independent of any earlier one
        node = self._own()
        lease = self.foresee(config, attrs)
        if self._saved is None:
            try:
                self._own_node.announce(node, attrs)
            except (NoAnswer, ApiRefusal) as reason:
                self._saved = self._known(reason, node)
        return lease

    def foresee(self, config: Config, attrs: LeaseAttrs) -> Lease:
        node = self._own()
        self._read = None
        lease = Lease(attrs, *own_key(node, config))
        self._member = _Member(node, lease, config, self._own_node, self._state)
        return lease

    def renew(self, lease: Lease) -> Lease:
        member = self._joined()
        member.lease = lease
        node = self._own_node.fetch()
        if own_key(node, member.config) == lease.key:
            self._own_node.announce(node, lease.attrs)
        return lease

    def publish_endpoints(self, name: str, text: str) -> None:
        self._own_node.publish_endpoints(name, text)

    def endpoints(self) -> dict[str, str]:
        found = (each.notes.get(ENDPOINTS, "").partition(" ") for each in self._joined().peers())
        return {name: text for name, _, text in found if name}

    def watch(self, deliver: Deliver, alive: Callable[[], None] = no_heartbeat) -> None:
        self._run(self.node_watch(deliver, alive), deliver, alive)

    def watch_node(self, alive: Callable[[], None]) -> None:
        memory = WatchMemory(self._make_backoff)
        self._run(self._node_watch(_ignore, alive, memory, only=self._joined().name), _ignore, alive)

    def _run(self, watch: ListWatch[str], deliver: Deliver, alive: Callable[[], None]) -> None:
        member = self._joined()

        def beat() -> None:
            member.complain()
            alive()

        log.info("Starting kube subnet manager")
        log.info("Waiting without a limit for node controller to sync")
        self._watches.run(watch, deliver, beat)

    def node_watch(self, deliver: Deliver, alive: Callable[[], None] = no_heartbeat) -> ListWatch[str]:
        """Return the state machine of ``watch``.

        Deliver the saved nodes first, if the API server has not answered yet, or when its first list fails.
        """
        member = self._joined()
        memory = WatchMemory(self._make_backoff)
        watch = self._node_watch(deliver, alive, memory)
        if self._saved is not None:
            deliver(member.saved(self._saved))
            member.upkeep.post(self._saved.own)
        elif self._state.path.exists():
            memory.substitute = self._cached
        return watch

    def _node_watch(
        self, deliver: Deliver, alive: Callable[[], None], memory: WatchMemory, *, only: str = ""
    ) -> ListWatch[str]:
        member = self._joined()

        def open_source(contact: Contact) -> NodeSource:
            return NodeSource(
                self._open_api(), self._reader, member, memory, deliver, alive, contact, only=only
            )

        self._watch = ListWatch(
            open_source, "the nodes", back="the API server answers again", pace=0.0, pause=memory.pause
        )
        return self._watch

    def _cached(self, reason: Retryable) -> list[Event]:
        member = self._joined()
        try:
            return member.saved(self._known(reason, member.own))
        except Retryable:
            return []

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None] = no_heartbeat) -> None:
        del lease  # the member knows the lease acquired or renewed last
        self._joined().upkeep.run(deliver, alive)

    def own_watch_step(self, deliver: Deliver, wake: Callable[[], None]) -> Callable[[float], float]:
        """Return the step function of ``watch_own``; ``wake`` is called when it has something to do."""
        upkeep = self._joined().upkeep
        upkeep.wake = wake
        return partial(upkeep.step, deliver)

    def mark_available(self) -> None:
        self._joined().upkeep.mark_available()

    def report(self, reason: str) -> None:
        self._own_node.record_event(reason)

    @property
    def problem(self) -> Retryable | None:
        """The current failure of the watch, or of the start, or a missing Node object of ours; or None."""
        failure = self._watch.problem if self._watch else self._unanswered
        return failure or (self._member.missing if self._member else None)

    def reread(self) -> None:
        self._watches.reread()

    def reconnect(self) -> None:
        self._requests.reconnect()
        self._watches.reconnect()

    def close(self) -> None:
        self._closed.set()
        self._watches.close()
        self._requests.cancel()
        self._access.clean_up()
        if self._member:
            self._member.upkeep.cancel()

    def _joined(self) -> _Member:
        if self._closed.is_set():
            raise Cancelled
        assert self._member is not None, "there is no lease yet"
        return self._member

    def _own(self) -> KubeNode:
        """Return our node, or its saved copy if the API server fails and has not answered since the start."""
        if self._read and clock.now() - self._read[0] <= _FRESH:
            return self._read[1]
        try:
            node = self._own_node.fetch()
        except (NoAnswer, ApiRefusal) as reason:
            self._saved = self._known(reason)
            node = self._saved.own
        else:
            self._saved = self._unanswered = None
        self._read = (clock.now(), node)
        return node

    def _known(self, reason: Retryable, own: KubeNode | None = None) -> Saved:
        """Return the saved nodes, with ``own`` for ours if the API server has told it.

        Raises ``reason`` if there are none, if the server refuses for good, or if our node was recreated.
        """
        saved = self._saved or self._state.load()
        is_final = isinstance(reason, ApiRefusal) and not reason.is_passing
        if saved is None or is_final or (own is not None and own.uid != saved.own.uid):
            raise reason
        self._unanswered = remembered(reason)
        self._once.warn(log, "saved", f"Using the nodes saved in {self._state.path}: {reason}")
        return replace(saved, own=own or saved.own)


class _Member:
    """This node's membership of the cluster, and the audience of the node watch."""

    def __init__(
        self, own: KubeNode, lease: Lease, config: Config, own_node: OwnNode, state: NodeCache
    ) -> None:
        self.lease = lease
        self.config = config
        self.name = own.name
        self._table = NodeTable(own.name, lease.key, config)
        self._state = state
        self.own: KubeNode | None = own
        self._has_listed = False
        self.upkeep = NodeUpkeep(own_node, config, lambda: self.lease, self._save)

    def saved(self, known: Saved) -> list[Event]:
        snapshot = self._table.replace([known.own, *known.peers], self.lease)
        return [Cached(snapshot.leases, self._state.description)]

    def listed(self, nodes: list[KubeNode]) -> list[Event]:
        own = next((node for node in nodes if node.name == self.name), None)
        if own is None:
            # A server that lost its nodes must not take the network down.
            raise Retryable(
                f"the list of {len(nodes)} nodes lacks our own node {self.name}: it is not acted on",
                "see that kubelet registers it",
            )
        snapshot = self._table.replace(nodes, self.lease)
        if not self._has_listed:
            self._has_listed = True
            log.info("Node controller sync successful")
        self._see_own(own)
        return [snapshot]

    def seen(self, node: KubeNode) -> list[Event]:
        if node.name == self.name:
            self._see_own(node)
            return []
        return self._follow(self._table.put(node))

    def gone(self, node: KubeNode) -> list[Event]:
        if node.name == self.name:
            log.warning("Our node %s was deleted: keeping all objects until it is back", node.name)
            self.own = None
            return []
        return self._follow(self._table.drop(node.name))

    @property
    def missing(self) -> Retryable | None:
        """The reason why other nodes do not know of this one; None if its Node object is there."""
        if self.own is not None:
            return None
        return Retryable(f"the Node object {self.name} is gone", "restart its kubelet, which registers it")

    def _follow(self, events: list[Event]) -> list[Event]:
        """Have the cache written soon if a node is gone: a start without API server would bring it back."""
        if any(isinstance(event, Removed) for event in events):
            self.upkeep.wake()
        return events

    def peers(self) -> tuple[KubeNode, ...]:
        """Return the other nodes as last seen. From any thread."""
        return self._table.nodes()

    def complain(self) -> None:
        self._table.complain()

    def _see_own(self, node: KubeNode) -> None:
        self.own = node
        self.upkeep.post(node)

    def _save(self, own: KubeNode) -> None:
        self._state.save(Saved(own, self._table.nodes()))
