"""Names of the networks in a store, and notification of changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from flanneld.option_values import is_network_name
from flanneld.runtime.logs import Once
from flanneld.subnet.remote.change_log import ChangeLog
from flanneld.subnet.remote.connection import RemoteAnswer, RemoteClient, accepted, nonsense
from flanneld.subnet.remote.leases import LeaseStore
from flanneld.subnet.remote.store import RemoteOptions

log = logging.getLogger(__name__)


class NetworkNames(Protocol):
    """Networks with a config. Each call may raise ``Retryable``, and ``Cancelled`` after ``close``."""

    def read(self) -> tuple[list[str], str]:
        """Return their names, and the position for ``await_change``."""
        ...

    def await_change(self, after: str, alive: Callable[[], None]) -> None:
        """Block until the names may have changed, or the store has lost the history since ``after``."""
        ...

    def close(self) -> None:
        """End every call. May be called from any thread."""
        ...


class StoreNames:
    """``NetworkNames`` in etcd or a file. ``start`` has the log of changes run."""

    def __init__(self, store: LeaseStore, start: Callable[[ChangeLog], None]) -> None:
        self._store = store
        self._start = start

    def read(self) -> tuple[list[str], str]:
        # The log starts first, so that it has every change after the list.
        self._store.changes(self._start)
        names, index = self._store.networks()
        return names, str(index)

    def await_change(self, after: str, alive: Callable[[], None]) -> None:
        def is_there() -> bool:
            alive()
            return True

        changes = self._store.changes(self._start)
        changes.next_after(int(after), lambda each: each.key is None, is_there, self._store.index)

    def close(self) -> None:
        self._store.close()


class RemoteNames:
    """``NetworkNames`` of a flannel server."""

    def __init__(self, options: RemoteOptions) -> None:
        self._client = RemoteClient(options.open_servers())

    def read(self) -> tuple[list[str], str]:
        return self._ask("/v1/", None)

    def await_change(self, after: str, alive: Callable[[], None]) -> None:
        self._ask(f"/v1/?next={quote(after, safe='')}", alive)

    def close(self) -> None:
        self._client.cancel()

    def _ask(self, target: str, alive: Callable[[], None] | None) -> tuple[list[str], str]:
        return self._client.ask("GET", target, None, alive, understand=_names)


def _names(answer: RemoteAnswer) -> tuple[list[str], str]:
    try:
        said = json.loads(accepted(answer).body)
        return [str(each) for each in said["snapshot"] or ()], str(said["cursor"])
    except (ValueError, LookupError, TypeError):
        raise nonsense("its list of networks is malformed") from None


class Choice:
    """Filter for the networks of the store that this daemon serves."""

    def __init__(self, allowed: tuple[str, ...], most: int) -> None:
        self._allowed = frozenset(allowed)
        self._most = most
        self._served: frozenset[str] = frozenset()
        self._once = Once()

    def of(self, names: list[str]) -> list[str]:
        """Return the names that are allowed and valid as file names; those served before come first.

        Others are logged once, as are those beyond ``most`` unless -networks lists them.
        """
        good = sorted(filter(self._is_good, names), key=lambda name: (name not in self._served, name))
        most = len(self._allowed) or self._most
        for name in good[most:]:
            self._once.warn(log, name, f"Ignoring the network {name}: -max-networks is {most}")
        self._served = frozenset(good[:most])
        return good[:most]

    def _is_good(self, name: str) -> bool:
        if not is_network_name(name):
            self._once.warn(
                log, name, f"Ignoring the network {json.dumps(name[:80])}: its name cannot be a file name"
            )
            return False
        if self._allowed and name not in self._allowed:
            self._once.warn(log, name, f'Network "{name}" is not allowed; -networks lists those that are')
            return False
        return True
