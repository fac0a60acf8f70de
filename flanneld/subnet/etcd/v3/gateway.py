"""Carrier for etcd's v3 API over its JSON gateway."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from typing import TypeVar

from urllib3 import Timeout
from urllib3.exceptions import HTTPError

from flanneld.errors import Cancelled
from flanneld.runtime.sockets.connection_pools import LiveBody
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable
from flanneld.subnet.etcd.endpoints import Server, Servers
from flanneld.subnet.etcd.http import NoSuchApi, Request, ServerFailed
from flanneld.subnet.etcd.transport import (
    EtcdTimeouts,
    LineStream,
    Send,
    Transport,
    pool_to,
    server_failed,
    unreachable,
)
from flanneld.subnet.etcd.v3 import answers
from flanneld.subnet.etcd.v3.answers import CallServer

T = TypeVar("T")

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
    ) -> answers.GatewayMessage:
        text = json.dumps(body)
        known = self._roots.get(server.name, _ROOTS[0])
        for root in dict.fromkeys((known, *_ROOTS)):
            answer = send(Request("POST", root + path, text, _headers(token)))
            if not answers.is_unknown_path(answer):
                self._roots[server.name] = root
                return answers.read(answer)
        raise ServerFailed("it has no JSON gateway to the v3 API", _NO_GATEWAY, kind=NoSuchApi)


class GatewayStream:
    """``carrier.Stream`` over JSON."""

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts, roots: Mapping[str, str]) -> None:
        self._tls = servers.tls
        self._timeouts = timeouts
        self._roots = roots
        self._socket = InterruptibleSocket()
        self._stream: LineStream | None = None
        #: Lines read and not returned yet.
        self._lines: deque[bytes] = deque()
        self._server: Server | None = None

    def open(self, server: Server, body: Mapping[str, object], token: str) -> None:
        self._server = server
        try:
            response = pool_to(server, self._tls, self._socket).urlopen(
                "POST",
                server.path + self._roots.get(server.name, _ROOTS[0]) + "/watch",
                body=json.dumps(body),
                headers=_headers(token) | _REQUIRE_LEADER,
                retries=False,
                redirect=False,
                preload_content=False,
                timeout=Timeout(connect=self._timeouts.connect, read=self._timeouts.read),
            )
        except Unreachable as error:
            raise unreachable(error) from None
        except (HTTPError, HTTPException, OSError) as error:
            raise server_failed(error, self._timeouts.read, server) from None
        except Cancelled:
            raise ServerFailed("the connection was given up") from None
        if response.status != 200:
            response.close()
            raise ServerFailed(f"HTTP {response.status} to a watch")
        self._stream = LineStream(LiveBody(response))

    def next(self, timeout: float) -> answers.GatewayMessage | None:
        assert self._stream
        assert self._server
        if not self._lines:
            try:
                self._lines.extend(self._stream.read(timeout) or ())
            except (HTTPError, HTTPException, OSError) as error:
                raise server_failed(error, timeout, self._server) from None
        return answers.stream_object(self._lines.popleft(), self._server.name) if self._lines else None

    def cancel(self) -> None:
        self._socket.cancel()

    def close(self) -> None:
        self.cancel()
        if self._stream is not None:
            self._stream.close()


def _headers(token: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
