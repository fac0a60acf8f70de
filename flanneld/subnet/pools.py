"""urllib3's connections, made over a line that another thread can cut."""

from __future__ import annotations

from socket import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from flanneld.subnet.line import Line


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, line: Line, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_line = line

    def _new_conn(self) -> socket:
        return self._on_line.connect(self._dns_host, self.port or 0, float(self.timeout or 0))


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class Pool(HTTPConnectionPool):
    """Takes the keyword ``line``; so does ``TlsPool``."""

    ConnectionCls = _Connection


class TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
