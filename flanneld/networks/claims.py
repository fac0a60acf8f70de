"""Registry of ports, devices and address ranges that only one network of a host can use."""

from __future__ import annotations

import threading

from flanneld.backends.contract import Backend
from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.runtime.instance_lock import HostClaims
from flanneld.startup import claims_to, clash


class Claims:
    """Claims of each network of this daemon; the first claim wins. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, str] = {}
        #: Claims against other daemons, by network.
        self._on_host: dict[str, HostClaims] = {}

    def take(self, network: str, config: Config, backend: Backend) -> None:
        """Claim all that a network needs, or nothing. Raises ``Retryable`` if another has some of it."""
        wanted = claims_to(config, backend)
        with self._lock:
            self._drop(network)
            for each in wanted:
                for held, holder in self._holders.items():
                    if each == held:
                        raise Retryable(
                            f"it wants {each}, which the network {holder} has",
                            "give each network its own in the store",
                        )
                    if clash(each, held):
                        raise Retryable(
                            f"its {each} overlaps the {held} of the network {holder}",
                            "change one of their configs",
                        )
            self._on_host.setdefault(network, HostClaims()).take(wanted, clash)
            self._holders |= dict.fromkeys(wanted, network)

    def release(self, network: str) -> None:
        """Release the claims of a network."""
        with self._lock:
            self._drop(network)

    def drain(self) -> None:
        """Do what ``HostClaims.drain`` does, for each network."""
        with self._lock:
            for each in self._on_host.values():
                each.drain()

    def _drop(self, network: str) -> None:
        self._holders = {each: holder for each, holder in self._holders.items() if holder != network}
        if network in self._on_host:
            self._on_host[network].close()
