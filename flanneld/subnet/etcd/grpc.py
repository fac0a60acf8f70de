"""Carrier for etcd's v3 API over gRPC, which needs grpcio.

Responses are converted to those of the JSON gateway.
"""

from __future__ import annotations

import os
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.errors import Cancelled, NoAnswer, Retryable
from flanneld.runtime.sockets.interruptible import WITHIN
from flanneld.runtime.waits import StreamReader
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.keys import NoSuchApi
from flanneld.subnet.etcd.protobuf import METHODS, MalformedProtobuf, decode, encode
from flanneld.subnet.etcd.transport import (
    NO_NAME,
    NO_SERVER,
    NO_TLS,
    OUTDATED,
    EtcdOptions,
    EtcdTimeouts,
    Server,
    Servers,
    server_failed,
)
from flanneld.subnet.etcd.v3_messages import BATCH, CallServer, GatewayMessage
from flanneld.subnet.failover import Failover, ServerFailed

# Set before the import: grpc would write to our log in its own format, and install fork handlers.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc

T = TypeVar("T")
#: Function that opens a channel. The channel connects when it is used.
_Open = Callable[[Server], grpc.Channel]

#: Authority bundles in the order of Go's TLS: Debian, Fedora, openSUSE, Alpine.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
#: Keepalive in milliseconds: a server that vanished is noticed within 30 s. etcd closes connections that ping
#: more often than every 5 s.
_PING_EVERY, _PING_LIMIT = 15_000, 10_000
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", _PING_EVERY),
    ("grpc.keepalive_timeout_ms", _PING_LIMIT),
    ("grpc.http2.ping_timeout_ms", _PING_LIMIT),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
)
#: Keys in the first part of a list, and in each further one. gRPC tells nothing of an answer that runs, so
#: each part has a time limit of its own. Over 100 kbit/s it keeps that: a lease takes some 200 bytes.
_FIRST, _PAGE = 100, 500
#: Makes a member that lost its leader end the watch instead of staying silent.
_REQUIRE_LEADER = (("hasleader", "true"),)
_SPEAKS_NOT = "it does not speak gRPC"
#: gRPC's wording of connection errors, our problem text, which stays the same when it recurs, and the remedy.
_TROUBLES = (
    ("connection refused", "connection refused", NO_SERVER),
    ("no route to host", "no route to host", NO_SERVER),
    ("network is unreachable", "network is unreachable", NO_SERVER),
    ("resolving", "its name cannot be resolved", NO_NAME),
    ("resolution", "its name cannot be resolved", NO_NAME),
    ("certificate has expired", "certificate verify failed: certificate has expired", OUTDATED),
    ("not yet valid", "certificate verify failed: certificate is not yet valid", OUTDATED),
    ("certificate_verify_failed", "certificate verify failed", NO_TLS),
    ("hostname verification", "certificate verify failed: it is for another name", NO_TLS),
    ("failed parsing http/2", _SPEAKS_NOT, NO_SERVER),
    ("http1.x", _SPEAKS_NOT, NO_SERVER),
)
#: Codes of gRPC's own connection errors. etcd's errors with these codes have a recognisable text.
_OF_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


class Rpc(Struct, frozen=True):
    """A request: the gateway's path and body, and a token or ""."""

    path: str
    body: Mapping[str, object]
    token: str

    def __repr__(self) -> str:
        return f"Rpc({self.path})"


class Grpc:
    """``Carrier`` over gRPC."""

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts) -> None:
        self._open = _opener(servers, timeouts)
        self._timeouts = timeouts
        self._requests = Failover(servers, GrpcConnection(self._open, timeouts), timeouts.idle)

    def ask(self, attempt: Callable[[Server, CallServer], T]) -> T:
        return self._requests.ask(lambda server, send: attempt(server, lambda *call: send(Rpc(*call))))

    def stream(self) -> GrpcStream:
        return GrpcStream(self._open, self._timeouts)

    def reconnect(self) -> None:
        self._requests.reconnect()

    def cancel(self) -> None:
        self._requests.cancel()


class GrpcConnection:
    """``ServerConnection`` through grpcio, with a channel to one server at a time."""

    def __init__(self, open_channel: _Open, timeouts: EtcdTimeouts) -> None:
        self._open = open_channel
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._channel: grpc.Channel | None = None

    def channel(self, server: Server) -> grpc.Channel:
        """Return the open channel, or a new one. Raises ``Cancelled`` after ``cancel``."""
        with self._lock:
            self.check()
            if self._channel is None:
                self._channel = self._open(server)
            return self._channel

    def exchange(self, server: Server, request: Rpc) -> GatewayMessage:
        if "range_end" not in request.body or request.path != "/kv/range":
            return self._exchange(server, request, self._timeouts.read)
        body = {**request.body, "limit": _FIRST}
        answer = page = self._exchange(server, replace(request, body=body), self._timeouts.read)
        found = list(page.kvs or ())
        body |= {"limit": _PAGE, "revision": str(answer.header.revision if answer.header else 0)}
        while page.more and page.kvs:
            body["key"] = b64encode(page.kvs[-1].key + b"\0").decode()
            page = self._exchange(server, replace(request, body=body), WITHIN)
            found += page.kvs or ()
        return replace(answer, kvs=found)

    def _exchange(self, server: Server, request: Rpc, seconds: float) -> GatewayMessage:
        method = METHODS[request.path]
        call = self.channel(server).unary_unary(server.path + method.name)
        data = encode(method.request, request.body)
        try:
            answer = call(data, timeout=seconds, metadata=_login(request.token))
        except grpc.RpcError as error:
            raise failure(error, server, seconds) from None
        except ValueError:
            raise _given_up() from None
        return understood(method.response, answer)

    def disconnect(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def reset(self) -> None:
        self.disconnect()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
        self.disconnect()

    def check(self) -> None:
        if self._is_cancelled:
            raise Cancelled


class GrpcStream:
    """``Stream`` over gRPC."""

    def __init__(self, open_channel: _Open, timeouts: EtcdTimeouts) -> None:
        self._connection = GrpcConnection(open_channel, timeouts)
        self._timeouts = timeouts
        self._reader: StreamReader[GatewayMessage] | None = None

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        method = METHODS["/watch"]
        data = encode(method.request, body)
        try:
            call = self._connection.channel(server).unary_stream(server.path + method.name)
            messages = call(data, metadata=_login(token) + _REQUIRE_LEADER)
        except (ValueError, Cancelled):
            raise _given_up() from None
        self._reader = StreamReader("watch", self._hear(messages, server))

    def read(self, timeout: float, most: int = BATCH) -> list[GatewayMessage]:
        assert self._reader
        return self._reader.read(timeout, most)

    def cancel(self) -> None:
        self._connection.cancel()

    def close(self) -> None:
        self._connection.cancel()

    def _hear(self, messages: Iterable[bytes], server: Server) -> Iterator[GatewayMessage]:
        kind = METHODS["/watch"].response
        try:
            for message in messages:
                yield v3_messages.watch_object(understood(kind, message), server.name)
        except grpc.RpcError as error:
            raise failure(error, server, self._timeouts.read) from None
        raise ServerFailed("it has ended the watch")


def understood(kind: Any, data: bytes) -> GatewayMessage:
    """Return the decoded message. Raises ``ServerFailed``."""
    try:
        return v3_messages.understood(decode(kind, data))
    except MalformedProtobuf:
        raise ServerFailed("it answers with a message that is not etcd's") from None


def failure(error: grpc.RpcError, server: Server, seconds: float) -> Exception:
    """Return the exception for a call that failed within ``seconds``: etcd's error or a connection error."""
    code, text = error.code(), str(error.details() or "")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        remedy = "versions before 3.0 need -etcd-api=v2"
        return ServerFailed("it has no v3 API over gRPC", remedy, kind=NoSuchApi)
    if "etcdserver: " not in text:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return server_failed(TimeoutError(), seconds, server)
        if code in _OF_CONNECTION:
            return _no_connection(text.lower(), server, seconds)
    return v3_messages.refusal(server.name, {"code": code.value[0], "message": text}, 0)


def _no_connection(text: str, server: Server, seconds: float) -> ServerFailed:
    if "timed out" in text:
        return server_failed(TimeoutError(), seconds, server)
    for words, problem, remedy in _TROUBLES:
        if words in text:
            return ServerFailed(problem, remedy, kind=NoSuchApi if problem is _SPEAKS_NOT else NoAnswer)
    return server_failed(ConnectionError(text), seconds, server)


def _given_up() -> ServerFailed:
    return ServerFailed("the connection was given up")


def _login(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def _opener(servers: Servers, timeouts: EtcdTimeouts) -> _Open:
    # gRPC counts a connection as made once the server answered, so a busy server needs the read timeout.
    milliseconds = round(1000 * timeouts.read)
    options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", milliseconds))
    credentials = _credentials(servers.options) if servers.tls else None

    def open_channel(server: Server) -> grpc.Channel:
        host = f"[{server.host}]" if ":" in server.host else server.host
        target = f"dns:///{host}:{server.port}"
        if credentials is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, credentials, options)

    return open_channel


def _credentials(options: EtcdOptions) -> grpc.ChannelCredentials:
    """Return the TLS credentials from the files that ``Servers`` has checked."""
    system = (ssl.get_default_verify_paths().cafile, *_BUNDLES)
    authorities = options.cafile or next((path for path in system if path and Path(path).exists()), None)
    return grpc.ssl_channel_credentials(_read(authorities), _read(options.keyfile), _read(options.certfile))


def _read(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise Retryable(f"cannot read {path}: {error.strerror}", "put it back, or restart") from None
