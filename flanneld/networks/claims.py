"""Registry of ports, devices and address ranges that only one network of a host can use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from flanneld.backends.contract import Backend, claims_of
from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import IPNetwork, overlap


class Claims:
    """Claims of each network; the first claim wins. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, str] = {}
        self._ranges: dict[str, Sequence[IPNetwork]] = {}

    def take(self, network: str, config: Config, backend: Backend) -> None:
        """Claim all that a network needs, or nothing. Raises ``Retryable`` if another has some of it."""
        ranges = [each.network for each in config.ranges]
        wanted = [*claims_of(backend), *(["EnableNFTables"] if config.enable_nftables else [])]
        with self._lock:
            self._drop(network)
            for name, others in self._ranges.items():
                if any(overlap(one, other) for one in ranges for other in others):
                    raise Retryable(
                        f"its range overlaps that of the network {name}", "change one of their configs"
                    )
            for each in wanted:
                if each in self._holders:
                    raise Retryable(
                        f"it wants {each}, which the network {self._holders[each]} has",
                        "give each network its own in the store",
                    )
            self._holders |= dict.fromkeys(wanted, network)
            self._ranges[network] = ranges

    def release(self, network: str) -> None:
        """Release the claims of a network."""
        with self._lock:
            self._drop(network)

    def _drop(self, network: str) -> None:
        self._holders = {each: holder for each, holder in self._holders.items() if holder != network}
        self._ranges.pop(network, None)
