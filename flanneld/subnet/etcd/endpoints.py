"""Endpoints, TLS files and credentials of etcd, checked once at startup."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from flanneld.errors import Fatal
from flanneld.option_values import url_parts
from flanneld.runtime.clock import shuffle
from flanneld.runtime.sockets.http_connection import TlsFiles, client_context
from flanneld.subnet.failover import ServerRing

#: Function that reorders a list in place, as ``random.shuffle`` does.
Shuffle = Callable[[list[Any]], None]

_DEFAULT_PORTS = {"http": 80, "https": 443}


class EtcdOptions(Struct, frozen=True, gc=False):
    """Command line options ``-etcd-*``, as given. Its repr shows no password.

    ``transport`` is the protocol for v3: "json", "grpc", or "auto" for JSON with gRPC as fallback.
    """

    endpoints: tuple[str, ...]
    prefix: str = "/coreos.com/network"
    username: str = ""
    password: str = ""
    keyfile: str = ""
    certfile: str = ""
    cafile: str = ""
    transport: str = "auto"

    def __repr__(self) -> str:
        return f"EtcdOptions({self.prefix})"


class Server(Struct, frozen=True, gc=False):
    """One endpoint. ``name`` is its URL without credentials."""

    name: str
    scheme: str
    host: str
    port: int
    path: str
    username: str = ""
    password: str = ""

    def basic_login(self) -> dict[str, str]:
        """Return the header for HTTP basic authentication in v2; none without a user."""
        if not self.username:
            return {}
        token = b64encode(f"{self.username}:{self.password}".encode()).decode()
        return {"Authorization": f"Basic {token}"}

    def __repr__(self) -> str:
        return f"Server({self.name})"


class Servers(ServerRing[Server]):
    """The configured endpoints, shuffled once.

    Endpoints that etcd advertises may be unreachable and are not used.

    Connects to nothing. Raises ``Fatal`` for unusable endpoints or TLS files.
    """

    def __init__(self, options: EtcdOptions, shuffle: Shuffle = shuffle) -> None:
        servers = [_server(url, number, options) for number, url in enumerate(options.endpoints, 1)]
        schemes = {server.scheme for server in servers}
        if len(schemes) != 1:
            problem = "mixes http and https" if schemes else "is empty"
            raise Fatal(
                f"-etcd-endpoints {problem}", "give client URLs of one kind, like https://10.0.0.1:2379"
            )
        files = TlsFiles(options.certfile, options.keyfile, options.cafile, "-etcd")
        context = client_context(files) if files or "https" in schemes else None
        self.tls = context if "https" in schemes else None
        self.options = options
        shuffle(servers)
        remedy = "is that etcd? check -etcd-endpoints"
        super().__init__(servers, "etcd does not answer", "etcd answers, but is unusable", remedy)


def _default_scheme(options: EtcdOptions) -> str:
    """Return the scheme of an endpoint without one.

    In etcd's v3 client the first endpoint decides for all. If it has no scheme either, Go flanneld speaks TLS
    if it has a certificate and its key (clientv3 ``dialWithBalancer``, ``translateEndpoint``).
    """
    scheme, separator, _ = options.endpoints[0].partition("://")
    if separator:
        return scheme.lower()
    return "https" if options.certfile and options.keyfile else "http"


def _server(url: str, number: int, options: EtcdOptions) -> Server:
    parts = url_parts(url)
    host = parts.hostname if parts else None
    if parts is None or not host or not host.isascii():
        # The URL itself is not shown: it may contain a password.
        raise Fatal(
            f"element {number} of -etcd-endpoints is no URL", "give client URLs like http://10.0.0.1:2379"
        )
    scheme, path = parts.scheme or _default_scheme(options), parts.path.rstrip("/")
    port = parts.port or _DEFAULT_PORTS[scheme]
    name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"
    user, password = options.username, options.password
    if not user and parts.username:
        user, password = unquote(parts.username), unquote(parts.password or "")
    return Server(name, scheme, host, port, path, user, password)
