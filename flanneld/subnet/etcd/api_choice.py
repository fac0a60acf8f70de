"""Choice of etcd's API: the configured one, or the one that has a network config."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from urllib.parse import quote

from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import IPAddress, Lease, LeaseAttrs, LeaseKey
from flanneld.runtime import randomness
from flanneld.subnet.etcd import v2_messages
from flanneld.subnet.etcd.endpoints import EtcdOptions, Server, Servers
from flanneld.subnet.etcd.http import NoSuchApi, Request, ServerFailed
from flanneld.subnet.etcd.keys import KeyClient, NoConfig, NotFound
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.etcd.transport import EtcdTimeouts, Send, Transport
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts, Store

log = logging.getLogger(__name__)


def open_etcd(
    options: EtcdOptions,
    api: str = "auto",
    timeouts: EtcdTimeouts | None = None,
    randrange: Callable[[int], int] = randomness.randrange,
) -> Store:
    """Return the store for "v2", "v3", "both", or "auto": the API that has the network config.

    Connects to nothing. Raises ``Fatal`` for unusable options.
    """
    transport = Transport(Servers(options), timeouts or EtcdTimeouts())

    def open_api(
        name: str, is_elsewhere: Callable[[str], bool] = lambda _: False, transport: Transport = transport
    ) -> EtcdStore:
        return EtcdStore(
            open_client(name, transport),
            options.prefix,
            transport.servers.name,
            pause_time=transport.timeouts.pause,
            randrange=randrange,
            is_elsewhere=is_elsewhere,
            addresses=transport.servers.addresses.known,
        )

    if api == "both":
        from flanneld.subnet.etcd.both import BothStores

        # Each has its own connection, so that neither waits for the other.
        return BothStores(
            open_api("v3"), open_api("v2", transport=Transport(Servers(options), transport.timeouts))
        )
    if api == "auto":
        return EitherStore(transport, options.prefix, open_api)
    return open_api(api, partial(_is_in_v2 if api == "v3" else _is_in_v3, transport))


def open_client(api: str, transport: Transport) -> KeyClient:
    """Return a client of "v2" or "v3". Only that one is imported: v2's is heavy."""
    if api == "v2":
        from flanneld.subnet.etcd.v2 import V2Client as ClientV2

        return ClientV2(transport)
    from flanneld.subnet.etcd.v3 import V3Client as ClientV3

    return ClientV3(transport)


def _is_in_v2(transport: Transport, key: str) -> bool:
    """Return True if a key can be read in v2. Does without v2's client, which is heavy."""
    target = "/v2/keys/" + quote(key.lstrip("/"))

    def attempt(server: Server, send: Send) -> bool:
        try:
            v2_messages.read(send(Request("GET", target, headers=server.basic_login())))
        except NotFound:
            return False
        except ServerFailed as lack:
            if lack.kind is NoSuchApi:
                return False  # Asking another server would only cost the connection.
            raise
        return True

    try:
        return transport.ask(attempt)
    except Retryable:
        return False


def _is_in_v3(transport: Transport, key: str) -> bool:
    try:
        open_client("v3", transport).fetch(key)
    except Retryable:
        return False
    return True


class EitherStore:
    """``Store`` on the first API that has a network config: v3, then v2.

    ``network_config`` makes the choice, so it must be called first. ``open_api`` returns the store for an
    API, on the same connection.
    """

    def __init__(self, transport: Transport, prefix: str, open_api: Callable[[str], EtcdStore]) -> None:
        self._transport = transport
        self._open_api = open_api
        self._lock = threading.Lock()
        self._is_closed = False
        self._v3 = open_api("v3")
        self._chosen: EtcdStore | None = None
        self._name = f"etcd at {transport.servers.name} under {prefix}"

    @property
    def name(self) -> str:
        return self._chosen.name if self._chosen else self._name

    @property
    def problem(self) -> Retryable | None:
        """The current failure of the watch, or None."""
        return (self._chosen or self._v3).problem

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._v3.addresses

    def network_config(self) -> Config:
        if self._chosen is not None:
            return self._chosen.network_config()
        try:
            config = self._v3.network_config()
        except (NoConfig, NoSuchApi) as nothing:
            return self._from_v2(nothing)
        if _is_in_v2(self._transport, self._v3.config_key):
            log.warning(
                "Ignoring the network config at %s in etcd's v2 API: v3 has one, too;"
                " remove it, or set -etcd-api=v2 to use it",
                self._v3.config_key,
            )
        self._choose(self._v3)
        return config

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        return self._manager().stored(public_ip)

    def read_leases(self) -> Iterable[Lease]:
        return self._manager().read_leases()

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        return self._manager().acquire(config, attrs, previous, local)

    def renew(self, lease: Lease) -> Lease:
        return self._manager().renew(lease)

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        self._manager().watch(deliver, alive)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        self._manager().watch_own(lease, deliver, alive)

    def reread(self) -> None:
        self._manager().reread()

    def reconnect(self) -> None:
        (self._chosen or self._v3).reconnect()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._v3.close()
            if self._chosen is not None:
                self._chosen.close()

    def _from_v2(self, nothing_in_v3: Retryable) -> Config:
        manager = self._open_api("v2")
        try:
            config = manager.network_config()
        except NoSuchApi:
            raise nothing_in_v3 from None
        except NoConfig:
            if isinstance(nothing_in_v3, NoSuchApi):
                raise
            raise Retryable(
                f"etcd answers, but has no network config at {manager.config_key}, in neither of its APIs",
                nothing_in_v3.remedy,
            ) from None
        self._choose(manager)
        return config

    def _choose(self, manager: EtcdStore) -> None:
        with self._lock:
            self._chosen = manager
            if self._is_closed:
                manager.close()
        log.info("The network config is in %s", manager.name)

    def _manager(self) -> EtcdStore:
        if self._chosen is None:
            raise Retryable("it is not known yet which API of etcd to use", "read the network config first")
        return self._chosen
