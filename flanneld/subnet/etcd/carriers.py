"""Carriers of requests to etcd's v3 API: the JSON gateway, with gRPC in its place where etcd refuses JSON."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from typing import Protocol, TypeVar

from flanneld.errors import Cancelled, Fatal, Retryable, install_command
from flanneld.runtime.sockets.http_connection import LineStream, LiveBody
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.keys import NoSuchApi
from flanneld.subnet.etcd.transport import (
    EtcdConnection,
    EtcdTimeouts,
    Request,
    Send,
    Server,
    Servers,
    Transport,
    server_failed,
)
from flanneld.subnet.etcd.v3_messages import BATCH, CallServer, GatewayMessage, GatewayRefused
from flanneld.subnet.failover import ServerFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

_INSTALL = install_command("grpc", "python3-grpcio")


class Stream(Protocol):
    """One watch of one server."""

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        """Connect and request the watch. Raises ``ServerFailed``; other errors may follow from ``read``."""
        ...

    def read(self, timeout: float, most: int = BATCH) -> list[GatewayMessage]:
        """Return the messages that have come or come next, at most ``most``; none after ``timeout`` seconds.

        Raises the error that ended the stream, after the messages before it.
        """
        ...

    def cancel(self) -> None:
        """End the stream; a waiting ``read`` raises ``ServerFailed``.

        May be called repeatedly, from any thread.
        """
        ...

    def close(self) -> None:
        """End the stream. Only for the thread that calls ``read``."""
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
    from flanneld.subnet.etcd.grpc import Grpc  # heavy, so imported on demand

    return Grpc(transport.servers, transport.timeouts)


#: Paths of the gateway in etcd 3.4 and later, in 3.3, and in 3.2.
_ROOTS = ("/v3", "/v3beta", "/v3alpha")
#: Makes a member that lost its leader end the watch instead of staying silent.
_REQUIRE_LEADER = {"Grpc-Metadata-hasleader": "true"}

_NO_GATEWAY = "start etcd with --enable-grpc-gateway=true; versions before 3.2 need -etcd-api=v2"


class Gateway:
    """``Carrier`` over JSON."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: Gateway path by server name.
        self._roots: dict[str, str] = {}

    def ask(self, attempt: Callable[[Server, CallServer], T]) -> T:
        return self._transport.ask(lambda server, send: attempt(server, partial(self._call, server, send)))

    def stream(self) -> GatewayStream:
        return GatewayStream(self._transport.servers, self._transport.timeouts, self._roots)

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cancel(self) -> None:
        self._transport.cancel()

    def _call(
        self, server: Server, send: Send, path: str, body: Mapping[str, object], token: str
    ) -> GatewayMessage:
        text = json.dumps(body)
        known = self._roots.get(server.name, _ROOTS[0])
        for root in dict.fromkeys((known, *_ROOTS)):
            answer = send(Request("POST", root + path, text, _headers(token)))
            if not v3_messages.is_unknown_path(answer):
                self._roots[server.name] = root
                return v3_messages.read(answer)
        raise ServerFailed("it has no JSON gateway to the v3 API", _NO_GATEWAY, kind=NoSuchApi)


class GatewayStream:
    """``Stream`` over JSON."""

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts, roots: Mapping[str, str]) -> None:
        self._roots = roots
        self._connection = EtcdConnection(servers, timeouts)
        self._limit = timeouts.read
        self._stream: LineStream | None = None
        #: Lines read and not returned yet.
        self._lines: list[bytes] = []
        self._server: Server | None = None
        self.cancel = self._connection.cancel

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        self._server = server
        target = self._roots.get(server.name, _ROOTS[0]) + "/watch"
        request = Request("POST", target, json.dumps(body), _headers(token) | _REQUIRE_LEADER)
        try:
            response = self._connection.begin(server, request)
        except Cancelled:
            raise ServerFailed("the connection was given up") from None
        if response.status != 200:
            raise ServerFailed(f"HTTP {response.status} to a watch")
        self._stream = LineStream(LiveBody(response))

    def read(self, timeout: float, most: int = BATCH) -> list[GatewayMessage]:
        assert self._stream
        assert self._server
        try:
            lines = self._lines or self._stream.read(timeout) or []
        except (HTTPException, OSError) as error:
            raise server_failed(error, self._limit, self._server) from None
        messages: list[GatewayMessage] = []
        self._lines = lines[most:]
        for line in lines[:most]:
            try:
                messages.append(v3_messages.stream_object(line, self._server.name))
            except (ServerFailed, Retryable):
                if not messages:
                    raise
                self._lines = [line]
                break
        return messages

    def close(self) -> None:
        self.cancel()
        self._connection.reset()


def _headers(token: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
