"""Peers of the Python data plane: destination lookup and source check."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv4Network

#: Cached destinations. A scan of the network must not fill the memory.
_REMEMBERED = 1 << 16
_SOCKADDR = struct.Struct("=HH4s8x")


class PeerLookup:
    """Peers by subnet, with longest prefix match. One thread may look up while another changes them."""

    def __init__(self, port: int) -> None:
        self._port = socket.htons(port)
        self._endpoints: dict[IPv4Network, IPv4Address] = {}
        #: Per prefix length, longest first: the mask, and the peers' sockaddr_in by network.
        self._tables: tuple[tuple[int, dict[int, bytes]], ...] = ()
        self._remembered: dict[int, bytes | None] = {}
        #: Public IPs of peers as numbers, each with its count of peers.
        self.sources: dict[int, int] = {}

    def set(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        self._forget_source(subnet)
        self._endpoints[subnet] = endpoint
        self.sources[int(endpoint)] = self.sources.get(int(endpoint), 0) + 1
        target = _SOCKADDR.pack(socket.AF_INET, self._port, endpoint.packed)
        self._table(subnet)[int(subnet.network_address)] = target
        # A concurrent lookup stores into the old dict, so its stale result is dropped with it.
        self._remembered = {}

    def drop(self, subnet: IPv4Network) -> None:
        if subnet in self._endpoints:
            self._forget_source(subnet)
            del self._endpoints[subnet]
            del self._table(subnet)[int(subnet.network_address)]
            self._remembered = {}

    def find(self, destination: int) -> bytes | None:
        """Return the sockaddr_in of the peer for a destination, None if there is none."""
        remembered = self._remembered
        if destination in remembered:
            return remembered[destination]
        if len(remembered) >= _REMEMBERED:
            remembered = self._remembered = {}
        found = None
        for mask, table in self._tables:
            found = table.get(destination & mask)
            if found is not None:
                break
        remembered[destination] = found
        return found

    def _table(self, subnet: IPv4Network) -> dict[int, bytes]:
        mask = int(subnet.netmask)
        tables = dict(self._tables)
        if mask not in tables:
            tables[mask] = {}
            self._tables = tuple(sorted(tables.items(), reverse=True))
        return tables[mask]

    def _forget_source(self, subnet: IPv4Network) -> None:
        endpoint = self._endpoints.get(subnet)
        if endpoint is None:
            return
        left = self.sources[int(endpoint)] - 1
        if left:
            self.sources[int(endpoint)] = left
        else:
            del self.sources[int(endpoint)]
