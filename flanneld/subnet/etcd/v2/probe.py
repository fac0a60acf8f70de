"""Looks for a key in etcd's v2 API, at no more cost than the request."""

from __future__ import annotations

from base64 import b64encode
from urllib.parse import quote

from flanneld.errors import Retryable
from flanneld.subnet.etcd.endpoints import Server
from flanneld.subnet.etcd.http import NoSuchApi, Request, Useless
from flanneld.subnet.etcd.keys import NotFound
from flanneld.subnet.etcd.transport import Send, Transport
from flanneld.subnet.etcd.v2 import answers


def is_in_v2(transport: Transport, key: str) -> bool:
    """Whether a key can be read there. Where the API is switched off or closed to us, none can."""
    target = "/v2/keys/" + quote(key.lstrip("/"))

    def attempt(server: Server, send: Send) -> bool:
        try:
            answers.read(send(Request("GET", target, headers=basic_login(server))))
        except NotFound:
            return False
        except Useless as lack:
            if lack.kind is NoSuchApi:
                return False  # The next one would only cost us the connection.
            raise
        return True

    try:
        return transport.ask(attempt)
    except Retryable:
        return False


def basic_login(server: Server) -> dict[str, str]:
    """The header that names our user in v2."""
    if not server.username:
        return {}
    token = b64encode(f"{server.username}:{server.password}".encode()).decode()
    return {"Authorization": f"Basic {token}"}
