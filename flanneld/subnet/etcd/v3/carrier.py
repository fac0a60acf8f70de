"""Carriers of requests to etcd's v3 API: the JSON gateway or gRPC."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Protocol, TypeVar

from flanneld.errors import Fatal, Retryable, install_command
from flanneld.subnet.etcd.endpoints import Server
from flanneld.subnet.etcd.http import NoSuchApi
from flanneld.subnet.etcd.transport import Transport
from flanneld.subnet.etcd.v3.answers import CallServer, GatewayMessage, GatewayRefused
from flanneld.subnet.etcd.v3.gateway import Gateway

log = logging.getLogger(__name__)

T = TypeVar("T")

_INSTALL = install_command("grpc", "python3-grpcio")


class Stream(Protocol):
    """One watch of one server."""

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        """Connect and request the watch. Raises ``Useless``; other errors may follow from ``next``."""
        ...

    def next(self, timeout: float) -> GatewayMessage | None:
        """Return the next message, or None after ``timeout`` seconds.

        Raises the error that ended the stream.
        """
        ...

    def cancel(self) -> None:
        """End the stream; a waiting ``next`` raises ``Useless``.

        May be called repeatedly, from any thread.
        """
        ...

    def close(self) -> None:
        """End the stream. Only for the thread that calls ``next``."""
        ...


class Carrier(Protocol):
    """Requests of one thread at a time. Bodies and responses are the JSON gateway's objects."""

    def ask(self, attempt: Callable[[Server, CallServer], T]) -> T:
        """Return the result of ``attempt`` with the first server that works.

        Raises ``Retryable`` if none does.
        """
        ...

    def stream(self) -> Stream:
        """Return a stream that is not open yet."""
        ...

    def reconnect(self) -> None: ...

    def cancel(self) -> None: ...


def open_carrier(transport: Transport) -> Carrier:
    """Return the carrier for the configured transport. Raises ``Fatal`` for gRPC without grpcio."""
    wanted = transport.servers.options.transport
    if wanted == "grpc":
        if not _has_grpc():
            raise Fatal("-etcd-transport=grpc needs grpcio, which is not installed", _INSTALL)
        return _grpc(transport)
    gateway = Gateway(transport)
    return gateway if wanted == "json" else JsonFirst(gateway, transport)


class JsonFirst:
    """``Carrier`` over JSON, with gRPC as fallback if etcd refuses JSON."""

    def __init__(self, gateway: Gateway, transport: Transport) -> None:
        self._gateway = gateway
        self._transport = transport
        self._used: Carrier = gateway
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._grpc: Carrier | None = None

    def ask(self, attempt: Callable[[Server, CallServer], T]) -> T:
        carrier = self._used
        try:
            return carrier.ask(attempt)
        except (GatewayRefused, NoSuchApi) as refusal:
            if carrier is not self._gateway:
                raise
            return self._ask_instead(attempt, refusal)

    def stream(self) -> Stream:
        return self._used.stream()

    def reconnect(self) -> None:
        self._used.reconnect()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            self._gateway.cancel()
            if self._grpc is not None:
                self._grpc.cancel()

    def _ask_instead(self, attempt: Callable[[Server, CallServer], T], refusal: Retryable) -> T:
        if not _has_grpc():
            remedy = f"{refusal.remedy}; or {_INSTALL}, which etcd may take"
            raise type(refusal)(refusal.problem, remedy) from None
        carrier = self._open_grpc()
        try:
            result = carrier.ask(attempt)
        except NoSuchApi:
            raise refusal from None
        self._used = carrier
        log.info("Using gRPC for etcd: JSON failed: %s", refusal.problem)
        return result

    def _open_grpc(self) -> Carrier:
        with self._lock:
            if self._grpc is None:
                self._grpc = _grpc(self._transport)
                if self._is_cancelled:
                    self._grpc.cancel()
            return self._grpc


def _has_grpc() -> bool:
    return find_spec("grpc") is not None


def _grpc(transport: Transport) -> Carrier:
    from flanneld.subnet.etcd.v3.grpc import Grpc  # heavy, so imported on demand

    return Grpc(transport.servers, transport.timeouts)
