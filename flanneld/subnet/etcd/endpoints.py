"""Endpoints, TLS files and credentials of etcd, checked once at startup."""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from flanneld.errors import Fatal
from flanneld.option_values import url_parts
from flanneld.runtime import randomness
from flanneld.runtime.sockets.http_connection import failure_text
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

    def __init__(self, options: EtcdOptions, shuffle: Shuffle = randomness.shuffle) -> None:
        servers = [_server(url, number, options) for number, url in enumerate(options.endpoints, 1)]
        schemes = {server.scheme for server in servers}
        if len(schemes) != 1:
            problem = "mixes http and https" if schemes else "is empty"
            raise Fatal(
                f"-etcd-endpoints {problem}", "give client URLs of one kind, like https://10.0.0.1:2379"
            )
        context = _tls_context(options) if _mentions_tls(options, schemes) else None
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


def _mentions_tls(options: EtcdOptions, schemes: set[str]) -> bool:
    return "https" in schemes or any((options.keyfile, options.certfile, options.cafile))


def _tls_context(options: EtcdOptions) -> ssl.SSLContext:
    """Return the TLS settings. Without ``-etcd-cafile`` the system's authorities are trusted, as in Go."""
    if bool(options.certfile) != bool(options.keyfile):
        raise Fatal("only one of -etcd-certfile and -etcd-keyfile is set", "set both, or none")
    for flag in ("cafile", "certfile", "keyfile"):
        _check_readable(getattr(options, flag), flag)
    # Not create_default_context: since Python 3.13 it refuses authorities that Go accepts.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.cafile:
        with _refusing(
            f"{options.cafile} holds no certificates",
            "set -etcd-cafile to the authority's certificate in PEM format",
        ):
            context.load_verify_locations(options.cafile)
    else:
        context.load_default_certs()
    if options.certfile:
        with _refusing(
            f"{options.certfile} and {options.keyfile} do not hold a certificate and its key",
            "set -etcd-certfile and -etcd-keyfile to a matching pair in PEM format",
        ):
            context.load_cert_chain(options.certfile, options.keyfile, lambda: _no_passphrase(options))
    return context


def _check_readable(file: str, flag: str) -> None:
    if not file:
        return
    try:
        Path(file).open("rb").close()
    except OSError as error:
        raise Fatal(f"cannot read {file}: {error.strerror}", f"correct -etcd-{flag} or the file") from None


@contextmanager
def _refusing(problem: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise Fatal(f"{problem}: {failure_text(error, 0)}", remedy) from None


def _no_passphrase(options: EtcdOptions) -> str:
    raise Fatal(
        f"the key in {options.keyfile} is encrypted", "set -etcd-keyfile to a key without a passphrase"
    )
