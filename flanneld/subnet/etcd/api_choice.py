"""Choice of etcd's API: the configured one, or the one that has a network config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from urllib.parse import quote

from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.runtime.clock import randrange
from flanneld.subnet.etcd import v2_messages
from flanneld.subnet.etcd.keys import KeyClient, NoConfig, NoSuchApi, NotFound, config_key, read_config
from flanneld.subnet.etcd.store import Choose, EtcdStore
from flanneld.subnet.etcd.transport import (
    EtcdOptions,
    EtcdTimeouts,
    Request,
    Send,
    Server,
    Servers,
    Transport,
)
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.store import Store

log = logging.getLogger(__name__)


def open_etcd(
    options: EtcdOptions,
    api: str = "auto",
    timeouts: EtcdTimeouts | None = None,
    randrange: Callable[[int], int] = randrange,
) -> Store:
    """Return the store for "v2", "v3", "both", or "auto": the API that has the network config.

    Connects to nothing. Raises ``Fatal`` for unusable options.
    """
    transport = Transport(Servers(options), timeouts or EtcdTimeouts())

    def open_api(
        name: str,
        is_elsewhere: Callable[[str], bool] = lambda _: False,
        choose: Choose | None = None,
        on_first_list: Callable[[KeyClient], None] = lambda _: None,
        transport: Transport = transport,
    ) -> EtcdStore:
        return EtcdStore(
            open_client(name, transport),
            options.prefix,
            transport.servers.name,
            pause_time=transport.timeouts.pause,
            randrange=randrange,
            is_elsewhere=is_elsewhere,
            choose=choose,
            on_first_list=on_first_list,
            addresses=transport.servers.addresses.known,
        )

    if api == "both":
        from flanneld.subnet.etcd.both import BothStores

        # Each has its own connection, so that neither waits for the other.
        other = Transport(transport.servers.apart(), transport.timeouts)
        return BothStores(open_api("v3"), open_api("v2", transport=other))
    if api == "auto":
        choose = partial(_choose, transport, options.prefix)
        return open_api("v3", choose=choose, on_first_list=partial(_warn_of_v2, transport, options.prefix))
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


def _choose(transport: Transport, prefix: str, client: KeyClient) -> tuple[KeyClient, Config]:
    """Return v3's client if there is a network config, else one of v2, and the config."""
    try:
        return client, read_config(client, prefix)
    except (NoConfig, NoSuchApi) as nothing:
        return _choose_v2(open_client("v2", transport), prefix, nothing)


def _warn_of_v2(transport: Transport, prefix: str, client: KeyClient) -> None:
    """Warn of a network config in v2 beside that in v3. Peers come first: a proxy may block v2."""
    key = config_key(client, prefix)
    if client.api == "v3" and _is_in_v2(transport, key):
        log.warning(
            "Ignoring the network config at %s in etcd's v2 API: v3 has one, too;"
            " remove it, or set -etcd-api=v2 to use it",
            key,
        )


def _choose_v2(client: KeyClient, prefix: str, nothing_in_v3: Retryable) -> tuple[KeyClient, Config]:
    try:
        return client, read_config(client, prefix)
    except NoSuchApi:
        raise nothing_in_v3 from None
    except NoConfig:
        if isinstance(nothing_in_v3, NoSuchApi):
            raise
        key = config_key(client, prefix)
        raise Retryable(
            f"etcd answers, but has no network config at {key}, in neither of its APIs", nothing_in_v3.remedy
        ) from None
