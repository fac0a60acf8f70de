"""Moves of whole networks between the store in a file and etcd."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from flanneld.errors import Retryable
from flanneld.subnet.embedded.client import PREFIX, EmbeddedClient
from flanneld.subnet.embedded.store import KeyStore
from flanneld.subnet.etcd.api_choice import open_client
from flanneld.subnet.etcd.endpoints import EtcdOptions, Servers
from flanneld.subnet.etcd.keys import Client
from flanneld.subnet.etcd.migration import Migration
from flanneld.subnet.etcd.transport import EtcdTimeouts, Transport
from flanneld.subnet.remote.lease_store import LeaseStore


def move(
    file: KeyStore,
    options: EtcdOptions,
    api: str,
    say: Callable[[str], None],
    *,
    into_file: bool,
    dry_run: bool,
) -> bool:
    """Copy every network from the file to etcd, or back; ``api`` is "v2", else v3 is meant.

    Each key is reported in a line. Leases keep their remaining term. Only an earlier copy with too short a
    term is overwritten. Return False if something could not be copied. Raises ``Retryable``.
    """
    etcd = open_client("v2" if api == "v2" else "v3", Transport(Servers(options), EtcdTimeouts()))
    sides: list[tuple[Client, str]] = [(EmbeddedClient(file), PREFIX), (etcd, options.prefix)]
    (old, old_prefix), (new, new_prefix) = reversed(sides) if into_file else sides
    names = _names(old, old_prefix)
    if not names:
        raise Retryable(
            "there is no network to copy", "check -store, -etcd-prefix, -etcd-endpoints and -etcd-api"
        )
    runs = [
        Migration(
            old,
            new,
            posixpath.join(old_prefix, name),
            say,
            dry_run=dry_run,
            new_prefix=posixpath.join(new_prefix, name),
        ).run()
        for name in names
    ]
    return all(runs)


def _names(client: Client, prefix: str) -> list[str]:
    """Return the networks that have a config, the unnamed one as an empty name."""
    store = LeaseStore([client], prefix, "")
    names, _ = store.networks()
    return [*([""] if store.has_unnamed() else []), *names]
