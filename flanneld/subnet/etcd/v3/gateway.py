"""etcd's v3 API over its JSON gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, TypeVar

from flanneld.errors import Cancelled
from flanneld.runtime.interruptible_socket import InterruptibleSocket, Unreachable
from flanneld.subnet.etcd.endpoints import Server, Servers
from flanneld.subnet.etcd.http import NoSuchApi, Request, Useless
from flanneld.subnet.etcd.transport import Send, Timeouts, Transport, unreachable, useless
from flanneld.subnet.etcd.v3 import answers
from flanneld.subnet.etcd.v3.stream import Stream

if TYPE_CHECKING:
    from flanneld.subnet.etcd.v3.carrier import Call

T = TypeVar("T")

#: Where the gateway is in etcd from 3.4 on, in 3.3, and in 3.2.
_ROOTS = ("/v3", "/v3beta", "/v3alpha")
#: A member that has lost its leader ends the watch, instead of being silent.
_REQUIRE_LEADER = {"Grpc-Metadata-hasleader": "true"}

_NO_GATEWAY = "start etcd with --enable-grpc-gateway=true; versions before 3.2 need -etcd-api=v2"


class Gateway:
    """``Carrier`` over JSON."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: By the name of a server.
        self._roots: dict[str, str] = {}

    def ask(self, attempt: Callable[[Server, Call], T]) -> T:
        return self._transport.ask(lambda server, send: attempt(server, partial(self._call, server, send)))

    def stream(self) -> GatewayStream:
        return GatewayStream(self._transport.servers, self._transport.timeouts, self._roots)

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cut(self) -> None:
        self._transport.cut()

    def _call(
        self, server: Server, send: Send, path: str, body: Mapping[str, object], token: str
    ) -> dict[str, Any]:
        text = json.dumps(body)
        known = self._roots.get(server.name, _ROOTS[0])
        for root in dict.fromkeys((known, *_ROOTS)):
            answer = send(Request("POST", root + path, text, _headers(token)))
            if not answers.is_unknown_path(answer):
                self._roots[server.name] = root
                return answers.read(answer)
        raise Useless("it has no JSON gateway to the v3 API", _NO_GATEWAY, kind=NoSuchApi)


class GatewayStream:
    """``etcd_v3_carrier.Stream`` over JSON."""

    def __init__(self, servers: Servers, timeouts: Timeouts, roots: Mapping[str, str]) -> None:
        self._tls = servers.tls
        self._timeouts = timeouts
        self._roots = roots
        self._line = InterruptibleSocket()
        self._stream: Stream | None = None
        self._server: Server | None = None

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        self._server = server
        url = server.name + self._roots.get(server.name, _ROOTS[0]) + "/watch"
        try:
            self._stream = Stream(self._connect(server))
            self._stream.post(url, _headers(token) | _REQUIRE_LEADER, json.dumps(body))
        except (HTTPException, OSError) as error:
            raise useless(error, self._timeouts.read, server) from None
        except Unreachable as error:
            raise unreachable(error) from None
        except Cancelled:
            raise Useless("the connection was given up") from None
        if self._stream.status != 200:
            raise Useless(f"HTTP {self._stream.status} to a watch")

    def next(self, timeout: float) -> dict[str, Any] | None:
        assert self._stream
        assert self._server
        try:
            line = self._stream.line(timeout)
        except (HTTPException, OSError) as error:
            raise useless(error, timeout, self._server) from None
        return None if line is None else answers.stream_object(line, self._server.name)

    def cut(self) -> None:
        self._line.cut()

    def close(self) -> None:
        self.cut()
        if self._stream:
            self._stream.close()

    def _connect(self, server: Server) -> Any:
        sock = self._line.connect(server.host, server.port, self._timeouts.connect)
        sock.settimeout(self._timeouts.read)
        return self._tls.wrap_socket(sock, server_hostname=server.host) if self._tls else sock


def _headers(token: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
