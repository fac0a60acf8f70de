"""Listening sockets for ``-listen``: of an address, or passed by systemd."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

from flanneld.errors import Fatal, cause_of

#: The first descriptor that systemd passes (sd_listen_fds(3)).
_FIRST = 3
#: Backlog of connections to accept.
_QUEUE = 1024


def open_listener(text: str, environ: Mapping[str, str]) -> socket.socket:
    """Return the listening socket for ``host:port``, ``tcp://host:port``, ``fd://`` or ``fd://N``.

    Raises ``Fatal`` with Go flannel's text; Go flannel goes on without a listener.
    """
    scheme, separator, rest = text.rpartition("://")
    try:
        if scheme == "fd":
            return _activated(rest, environ)
        if separator and scheme != "tcp":
            raise _failed(text, "bad listener scheme", "give host:port, tcp://host:port or fd://")
        return _bound(text, rest)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _failed(
            text, cause_of(error).lower(), "give a free port and an address of this host with -listen"
        ) from None


def _bound(text: str, address: str) -> socket.socket:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise _failed(text, "missing port in address", "give -listen=host:port, or :port for all addresses")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        return _everywhere(int(port))
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_QUEUE)
    except BaseException:
        listener.close()
        raise
    return listener


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_QUEUE, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_QUEUE)


def _activated(text: str, environ: Mapping[str, str]) -> socket.socket:
    """Return a socket passed by systemd; the first if none is named."""
    count = _passed(environ)
    shown = f"fd://{text}"
    remedy = "start flanneld through its .socket unit, and name one of its sockets with -listen=fd://N"
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _failed(shown, "fd index is not a number", "give fd:// or fd://3")
    number = int(text) if text else _FIRST
    if not _FIRST <= number < _FIRST + count:
        raise _failed(shown, f"fd {text} is out of range ({_FIRST + count})", remedy)
    try:
        is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        raise _failed(shown, f"fd {text} was not socket activated", remedy)
    listener = socket.socket(fileno=number)
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        listener.detach()
        raise _failed(shown, f"fd {text} was not socket activated", remedy)
    listener.setblocking(True)
    os.set_inheritable(number, False)
    return listener


def _passed(environ: Mapping[str, str]) -> int:
    """Return the number of sockets that systemd has passed to this process."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID", "") != str(os.getpid()):
        return 0
    return int(count) if count.isascii() and count.isdigit() and len(count) < 5 else 0


def _failed(text: str, problem: str, remedy: str) -> Fatal:
    shown = text if text.isprintable() else repr(text)
    return Fatal(f"Error listening on {shown}: {problem}", remedy)
