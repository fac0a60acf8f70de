"""Leases, reservations and networks in etcd or a file, for the REST API of v0.6.2."""

from __future__ import annotations

import hmac
import posixpath
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from flanneld.config import Config
from flanneld.errors import Cancelled, Refused, Retryable
from flanneld.model import IPAddress, Lease, LeaseAttrs, LeaseKey, is_same_node, name_of, single
from flanneld.runtime import clock
from flanneld.subnet.codec import format_attrs, format_key, parse_attrs
from flanneld.subnet.embedded.store import PREFIX, EmbeddedClient, KeyStore
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.keys import Conflict, KeyClient, KeyReply, NoConfig, NoSuchApi, NotFound, StoredKey
from flanneld.subnet.etcd.leases import node_address
from flanneld.subnet.etcd.store import SUBNET_TTL, TRIES, EtcdStore
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport
from flanneld.subnet.remote.change_log import ChangeLog, expires_ns
from flanneld.subnet.remote.credentials import ADMINISTRATOR, ANOTHER, Caller, Denied
from flanneld.subnet.remote.wire import (
    Acquisition,
    Reservation,
    WireLease,
    check_address,
    check_claim,
    check_fits,
)
from flanneld.subnet.store import LocalFacts

#: Name of the network that lies directly under the prefix.
UNNAMED = "_"
#: Cached stores of networks, at most: a stranger may request any name.
_STORES = 64


class LeaseStore:
    """Store for any thread. Requests are serialized, so that concurrent joins get different subnets.

    Of several clients the first one with a network config below ``prefix`` is used. A failed watch is
    restarted after ``pause`` seconds. ``addresses`` are those of the store behind this one. ``owned`` is the
    client of a store that knows the owner of each lease.
    """

    def __init__(
        self,
        clients: Sequence[KeyClient],
        prefix: str,
        name: str,
        pause: float = 1.0,
        addresses: Callable[[], frozenset[IPAddress]] = frozenset,
        owned: EmbeddedClient | None = None,
    ) -> None:
        self._clients = clients
        self._owned = owned
        self._prefix = prefix
        self._pause = pause
        self._addresses = addresses
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._is_closed = False
        self._chosen: KeyClient | None = clients[0] if len(clients) == 1 else None
        self._stores: dict[str, EtcdStore] = {}
        self._changes: ChangeLog | None = None
        self.name = name

    def close(self) -> None:
        """End every request. From any thread."""
        with self._lock:
            self._is_closed = True
            for client in self._clients:
                client.cancel()
            if self._changes is not None:
                self._changes.close()

    @property
    def problem(self) -> str:
        """Reason why etcd cannot be watched now; empty if it can."""
        return self._changes.problem if self._changes else ""

    def changes(self, start: Callable[[ChangeLog], None]) -> ChangeLog:
        """Return the log of changes. The first call runs it with ``start``."""
        with self._turn:
            client = self._client()
            if self._chosen is None:
                raise Retryable("there is no network config in etcd yet", "write it")
        with self._lock:
            if self._is_closed:
                raise Cancelled
            if self._changes is None:
                self._changes = ChangeLog(client, self._prefix, self._pause)
                start(self._changes)
            return self._changes

    def index(self) -> int:
        """Return etcd's index, as its majority knows it."""
        with self._asking() as client:
            try:
                return client.fetch(self._path(UNNAMED, "config")).at.index
            except NotFound as missing:
                return missing.at.index

    # ---- networks ------------------------------------------------------------------------------

    def config(self, network: str) -> Config:
        with self._asking():
            return self._config(network)

    def config_text(self, network: str) -> tuple[str, int]:
        """Return a network's config as it is stored, and the index of its last change; 0 without one."""
        with self._asking() as client:
            try:
                node = client.fetch(self._path(network, "config")).node
            except NotFound:
                return "", 0
            assert node is not None
            return node.value, node.modified

    def write_config(self, network: str, text: str, index: int) -> None:
        """Write a config whose last change is at ``index``, 0 for a new one. Raises ``Conflict``."""
        with self._asking() as client:
            path = self._path(network, "config")
            if index:
                client.replace(path, text, None, index)
            else:
                client.create(path, text, None)

    def networks(self) -> tuple[list[str], int]:
        """Return the names of the networks with a config, and the index of the read."""
        with self._asking() as client:
            root = client.root(self._prefix)
            try:
                reply = client.fetch(root, recursive=client.api != "v2")
            except NotFound as missing:
                return [], missing.at.index
            if client.api != "v2":
                paths = [posixpath.relpath(each.key, root).split("/") for each in reply.children]
                return [path[0] for path in paths if path[1:] == ["config"]], reply.at.index
            names = [posixpath.basename(each.key) for each in reply.children if each.is_dir]
            return [name for name in names if self._has_config(client, name)], reply.at.index

    def has_unnamed(self) -> bool:
        """Return True if there is a network directly under the prefix."""
        with self._asking() as client:
            return self._has_config(client, "")

    # ---- leases --------------------------------------------------------------------------------

    def acquire(
        self,
        network: str,
        wanted: Acquisition,
        caller: Caller = ADMINISTRATOR,
        server: IPAddress | None = None,
    ) -> WireLease:
        """Return a node's lease; a new one only for who may join. Raises ``Denied``, ``Refused``.

        A new one avoids the addresses of the store, and the one of this ``server`` that the node knows.
        """
        with self._asking(caller):
            store = self._store_of(network)
            try:
                check_address(wanted.attrs)
            except Refused:
                leases = store.listing(fresh=True).leases.values()
                if all(each.attrs != wanted.attrs for each in leases):
                    raise
            addresses = self._addresses().union([server] if server else ())
            facts = LocalFacts(connected=tuple(map(single, addresses)))
            if wanted.strangers or caller.owner is not None:
                leases = store.listing(fresh=True).leases.values()
                strangers = [each.attrs for each in leases if each.key in wanted.strangers]
                facts = replace(facts, is_self=lambda one, us: is_same_node(one, us) and one not in strangers)
                own = [each for each in leases if facts.is_self(each.attrs, wanted.attrs)]
                for each in own:
                    self._check_owner(network, each.key, caller, is_changed=each.attrs != wanted.attrs)
                # An expired token is valid for a node with a lease.
                if not caller.may_join:
                    _check_known(wanted.attrs, bool(own))
            lease = store.acquire(self._config(network), wanted.attrs, wanted.previous, facts)
            self._claim(network, lease.key, caller)
            return _wire(lease)

    def publish_endpoints(self, network: str, name: str, text: str, caller: Caller = ADMINISTRATOR) -> None:
        """Write where a node may be reached. Raises ``Denied`` if another has written it, or may."""
        with self._asking(caller):
            is_own = caller.may_join or self._has_key(network, name, caller)
            self._check_owner(network, f"endpoints/{name}", caller, is_changed=not is_own)
            self._store_of(network).publish_endpoints(name, text)

    def _has_key(self, network: str, name: str, caller: Caller) -> bool:
        """Return True if a lease of the caller has this public key: it may write without joining."""
        key = name.translate(str.maketrans("-_", "+/"))
        leases = self._store_of(network).listing(fresh=True).leases.values() if caller.owner else ()
        found = (each.key for each in leases if key in format_attrs(each.attrs, with_ipv6=True))
        return any(self._owner(network, each) == caller.owner for each in found)

    def _owner(self, network: str, key: LeaseKey | str) -> str:
        return self._owned.store.owner(self._path(network, key)) if self._owned else ""

    def endpoints(self, network: str) -> dict[str, str]:
        """Return what all nodes published, by name."""
        with self._asking():
            return self._store_of(network).endpoints()

    def renew(
        self,
        network: str,
        wanted: WireLease,
        former: LeaseAttrs | None,
        named: LeaseKey,
        caller: Caller = ADMINISTRATOR,
    ) -> WireLease:
        """Renew a lease. Only ``former`` or the same node's attributes are overwritten.

        A missing lease is written again only for who may join. ``named`` is the lease in the request's path.
        Raises ``Denied``, and ``Refused`` for a new or changed lease that no node would follow.
        """
        with self._asking(caller):
            store = self._store_of(network)
            found = self._found(network, wanted.key)
            if not caller.may_join:
                _check_known(wanted.attrs, found is not None)
            is_changed = found is None or found.attrs != wanted.attrs
            self._check_owner(network, wanted.key, caller, is_changed=is_changed)
            if is_changed:
                check_claim(self._config(network), wanted, named)
            store.forget()
            asof = found.asof if found is not None and found.attrs == former else 0
            lease = Lease(wanted.attrs, *wanted.key, expires=clock.now(), asof=asof)
            renewed = store.renew(lease)
            self._claim(network, lease.key, caller)
            return _wire(renewed)

    def revoke(self, network: str, key: LeaseKey, caller: Caller = ADMINISTRATOR) -> None:
        """Remove a lease. Raises ``Denied`` if it is another node's."""
        self._change(network, key, caller, lambda client, path, node: client.remove(path, node.modified))

    def leases(self, network: str) -> tuple[list[WireLease], int]:
        with self._asking():
            listing = self._store_of(network).listing(fresh=True)
            # etcd's v2 API has no order.
            return [_wire(each) for _, each in listing.of(lambda _attrs: True)], listing.at.index

    def lease(self, network: str, key: LeaseKey) -> tuple[WireLease, int]:
        """Return one lease and etcd's index. Raises ``Retryable`` if it is missing or unreadable."""
        with self._asking():
            reply = self._fetch(self._path(network, key))
            node = reply.node
            assert node is not None
            try:
                attrs = parse_attrs(node.value)
            except Refused as reason:
                raise Retryable(reason.problem, reason.remedy) from None
            lease = WireLease(attrs, key, expires_ns(node.ttl), node.modified, node.created)
            return lease, reply.at.index

    # ---- reservations --------------------------------------------------------------------------

    def reservations(self, network: str) -> list[Reservation]:
        leases, _ = self.leases(network)
        return [
            Reservation(each.key[0], each.attrs.public_ip)
            for each in leases
            if each.expires_ns is None and each.key[0] and each.attrs.public_ip
        ]

    def reserve(self, network: str, wanted: Reservation, caller: Caller = ADMINISTRATOR) -> None:
        """Reserve a subnet for a node permanently: a free one, or its lease. Raises ``Denied``, ``Refused``.

        By an administrator it is free for the node's next secret, for instance after a reinstallation.
        """
        with self._asking(caller) as client:
            self._check_owner(network, (wanted.subnet, None), caller)
            check_fits(self._config(network), wanted.subnet)
            found = self._found(network, (wanted.subnet, None))
            if found is None or found.attrs.public_ip != wanted.public_ip:
                check_address(LeaseAttrs(wanted.public_ip))
            path = self._path(network, (wanted.subnet, None))
            for _ in range(TRIES):
                try:
                    self._reserve_once(client, path, wanted)
                except (Conflict, NotFound):
                    continue
                self._claim(network, (wanted.subnet, None), caller)
                return
            raise Retryable("subnet: no more tries")

    def release(self, network: str, key: LeaseKey, caller: Caller = ADMINISTRATOR) -> None:
        """Turn a reservation into a lease, which ends in a day unless its node renews it."""
        self._change(
            network,
            key,
            caller,
            lambda client, path, node: client.replace(path, node.value, SUBNET_TTL, node.modified),
        )

    def _change(
        self,
        network: str,
        key: LeaseKey,
        caller: Caller,
        write: Callable[[KeyClient, str, StoredKey], object],
    ) -> None:
        """Write a lease as it was read. If it has changed meanwhile, read it again."""
        with self._asking(caller) as client:
            path = self._path(network, key)
            for _ in range(TRIES):
                node = self._fetch(path).node
                assert node is not None
                self._check_owner(network, key, caller)
                with suppress(Conflict):
                    write(client, path, node)
                    return
            raise Retryable("subnet: no more tries")

    @staticmethod
    def _reserve_once(client: KeyClient, path: str, wanted: Reservation) -> None:
        value = format_attrs(LeaseAttrs(public_ip=wanted.public_ip), with_ipv6=client.names_ipv6)
        try:
            client.create(path, value, None)
        except Conflict:
            node = client.fetch(path).node
            assert node is not None
            try:
                owner = parse_attrs(node.value).public_ip
            except Refused:
                owner = None
            if owner != wanted.public_ip:
                raise Retryable("subnet: lease already taken") from None
            if node.ttl is not None:
                client.replace(path, node.value, None, node.modified)

    def _found(self, network: str, key: LeaseKey) -> Lease | None:
        """Return a lease as it is stored; None if it is missing or unreadable."""
        with suppress(NotFound, Refused):
            if node := self._client().fetch(self._path(network, key)).node:
                return Lease(parse_attrs(node.value), *key, asof=node.modified)
        return None

    # ---- owners --------------------------------------------------------------------------------

    def _check_owner(
        self, network: str, key: LeaseKey | str, caller: Caller, *, is_changed: bool = True
    ) -> None:
        """Raise ``Denied`` unless the caller may change a lease: it is its own, or has no owner yet.

        A lease of an earlier version has none. With an ended token its node may renew it as it is.
        """
        if self._owned is None or caller.owner is None:
            return
        owner = self._owner(network, key)
        what = key if isinstance(key, str) else f"the lease {name_of(key)}"
        if owner and not hmac.compare_digest(owner, caller.owner):
            raise Denied(
                f"{what} belongs to a node with another secret",
                "if its node was reinstalled, add a reservation for it where the file is",
            )
        if not owner and is_changed and not caller.may_join:
            raise Denied(f"the token has ended, and {what} has no secret yet", ANOTHER)

    def _claim(self, network: str, key: LeaseKey, caller: Caller) -> None:
        """Note the caller as the owner of a lease, which it may have renewed without a write."""
        path, owner = self._path(network, key), caller.owner or ""
        if self._owned is not None and self._owned.store.owner(path) != owner:
            self._owned.store.claim(path, owner)

    # ---- etcd ----------------------------------------------------------------------------------

    @contextmanager
    def _asking(self, caller: Caller = ADMINISTRATOR) -> Iterator[KeyClient]:
        with self._turn:
            if self._is_closed:
                raise Cancelled
            if self._owned is not None:
                self._owned.owner = caller.owner or ""
            yield self._client()

    def _client(self) -> KeyClient:
        """Return the client of the API that has a network, else of the first existing API."""
        if self._chosen is not None:
            return self._chosen
        usable, lacking = [], []
        for client in self._clients:
            try:
                if self._has_config(client, "") or self._has_networks(client):
                    self._chosen = client
                    return client
                usable.append(client)
            except NoSuchApi as lack:
                lacking.append(lack)
        if not usable:
            raise lacking[0]
        return usable[0]

    def _has_config(self, client: KeyClient, name: str) -> bool:
        try:
            client.fetch(posixpath.join(client.root(self._prefix), name, "config"))
        except NotFound:
            return False
        return True

    def _has_networks(self, client: KeyClient) -> bool:
        try:
            children = client.fetch(client.root(self._prefix), recursive=True).children
        except NotFound:
            return False
        return any(each.is_dir or each.key.endswith("/config") for each in children)

    def _config(self, network: str) -> Config:
        try:
            return self._store_of(network).network_config()
        except NoConfig:
            self._fetch(self._path(network, "config"))  # raises the same error in the words that clients know
            raise

    def _store_of(self, network: str) -> EtcdStore:
        client = self._client()
        if self._chosen is None or network not in self._stores:
            if len(self._stores) >= _STORES:
                self._stores.pop(next(iter(self._stores)))
            self._stores[network] = EtcdStore(
                client,
                self._prefix if network == UNNAMED else posixpath.join(self._prefix, network),
                self.name,
                pause_time=self._pause,
            )
        return self._stores[network]

    def _path(self, network: str, last: LeaseKey | str) -> str:
        root = self._client().root(self._prefix)
        base = root if network == UNNAMED else posixpath.join(root, network)
        return posixpath.join(base, last if isinstance(last, str) else f"subnets/{format_key(last)}")

    def _fetch(self, path: str) -> KeyReply:
        """Read a key, in the words of etcd's v2 API if it is not there: clients know them."""
        try:
            return self._client().fetch(path)
        except NotFound as missing:
            raise Retryable(f"100: Key not found ({path}) [{missing.at.index}]") from None


def over_etcd(options: EtcdOptions, api: str, timeouts: EtcdTimeouts | None = None) -> LeaseStore:
    """Open the leases in etcd: "v2", "v3", or "auto" for the first, v3 before v2, with a network config."""
    timeouts, servers = timeouts or EtcdTimeouts(), Servers(options)
    names = ("v3", "v2") if api == "auto" else (api,)
    clients = [open_client(name, Transport(servers.apart(), timeouts)) for name in names]
    name = f"etcd at {servers.name} under {options.prefix}"
    return LeaseStore(clients, options.prefix, name, timeouts.pause, servers.addresses.known)


def over_file(store: KeyStore) -> LeaseStore:
    """Serve the leases in a file of this host."""
    client = EmbeddedClient(store)
    return LeaseStore([client], PREFIX, store.name, owned=client)


def _wire(lease: Lease) -> WireLease:
    left = None if lease.expires is None else lease.expires - clock.now()
    return WireLease(lease.attrs, lease.key, expires_ns(left), lease.asof, lease.created)


def _check_known(attrs: LeaseAttrs, is_known: bool) -> None:
    if not is_known:
        raise Denied(f"the token has ended, and node {node_address(attrs)} has no lease here", ANOTHER)
