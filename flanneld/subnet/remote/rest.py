"""REST API of v0.6.2: requests and their answers, without a socket."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network
from json import JSONDecodeError, JSONDecoder
from typing import TypeVar
from urllib.parse import parse_qs, quote, unquote

from msgspec import Struct, structs

from flanneld.compat import json as gojson
from flanneld.compat.json import GoJsonError
from flanneld.errors import Cancelled, FlannelError, Refused
from flanneld.model import IPAddress, LeaseKey
from flanneld.subnet.codec import parse_key
from flanneld.subnet.remote import wire
from flanneld.subnet.remote.change_log import ChangeLog, LogEntry, Wanted
from flanneld.subnet.remote.credentials import ADMINISTRATOR, ANOTHER, Caller, Denied
from flanneld.subnet.remote.leases import LeaseStore
from flanneld.subnet.remote.wire import WireLease

T = TypeVar("T")

#: Handlers by method and the path after the network. They return JSON; None is an empty body.
Routes = dict[tuple[str, str], Callable[[], str | None]]

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
#: Not anchored in Go flannel, and an IPv4 length of at most 31.
_LOOSE_KEY = re.compile(r"(\d+\.\d+\.\d+\.\d+)-(\d+)")
#: A public key of 32 bytes in URL-safe base64, and endpoints with commas between them.
_MESH_NAME = re.compile(r"[A-Za-z0-9_-]{43}=")
_ENDPOINTS = re.compile(r"[0-9A-Za-z.:\[\],-]{1,1000}")
_CURSOR = re.compile(r"[0-9]{1,19}")
#: A network's name is a part of a key in etcd.
_LONGEST_NAME = 253
_SPACE = " \t\r\n"


class RestRequest(Struct, frozen=True, gc=False):
    """Request. ``is_there`` returns True while its client waits; ``target`` is the path with the query.

    ``authorization`` is the header of this name, ``secret`` that of the node, ``caller`` the rights of both.
    ``wants_index`` is True for our own client, which distinguishes its writes from others' by the index of a
    lease. ``server`` is the address that the client has connected to.
    """

    method: str
    target: str
    body: bytes = b""
    is_there: Callable[[], bool] = lambda: True
    authorization: str = ""
    secret: str = ""
    wants_index: bool = False
    caller: Caller = ADMINISTRATOR
    server: IPAddress | None = None


class RestAnswer(Struct, frozen=True, gc=False):
    """Answer. An answer without a body has no ``content_type``."""

    status: int
    body: bytes = b""
    content_type: str = ""
    location: str = ""


NOT_FOUND = RestAnswer(404, b"404 page not found\n", TEXT)


class _Wrong(Exception):
    """Error for an invalid request; its text is the answer's."""


class RestApi:
    """Handler of requests from any thread. The first watch runs the log of changes with ``start``.

    ``check`` returns the rights by a header ``Authorization`` and a node's secret, or raises ``Denied``.
    """

    def __init__(
        self,
        store: LeaseStore,
        start: Callable[[ChangeLog], None],
        check: Callable[[str, str], Caller] = lambda _header, _secret: ADMINISTRATOR,
    ) -> None:
        self._store = store
        self._start = start
        self._check = check

    def answer(self, request: RestRequest) -> RestAnswer:
        """Answer one request. A watch blocks until there is a change. Never raises on purpose."""
        try:
            caller = self._check(request.authorization, request.secret)
            request = structs.replace(request, caller=caller)
        except Denied as refusal:
            return _text(401, str(refusal))
        except FlannelError as failure:
            return _text(500, str(failure))
        raw_path, _, query = request.target.partition("?")
        path = unquote(raw_path)
        if clean := _cleaned(path):
            return RestAnswer(301, location=quote(clean) + (f"?{query}" if query else ""))
        handler = self._route(request, path.split("/"), query)
        if handler is None:
            return NOT_FOUND
        if not caller.may_join and not _is_of_a_node(request.method, path):
            return _text(403, f"the token has ended; {ANOTHER}")
        try:
            text = handler()
        except Denied as refusal:
            return _text(403, str(refusal))
        except (_Wrong, Refused) as wrong:
            return _text(400, str(wrong))
        except Cancelled:
            return _text(500, "context canceled")
        except FlannelError as failure:
            return _text(500, str(failure))
        return RestAnswer(200, f"{text}\n".encode(), JSON) if text is not None else RestAnswer(200)

    def _route(self, request: RestRequest, path: list[str], query: str) -> Callable[[], str | None] | None:
        match path:
            case ["", "v1", ""] if request.method == "GET":
                return partial(self._networks, request, query)
            case ["", "v1", network, kind] if _is_name(network):
                return self._of_network(request, network, query).get((request.method, kind))
            case ["", "v1", network, kind, name] if _is_name(network) and name:
                return self._of_key(request, network, name, query).get((request.method, kind))
        return None

    def _of_network(self, request: RestRequest, network: str, query: str) -> Routes:
        store = self._store
        return {
            ("GET", "config"): lambda: wire.format_config(store.config(network)),
            ("GET", "leases"): partial(self._leases, request, network, query),
            ("POST", "leases"): partial(self._acquire, request, network),
            ("GET", "endpoints"): lambda: gojson.compact(store.endpoints(network)),
            ("GET", "reservations"): lambda: wire.format_reservations(store.reservations(network)),
            ("POST", "reservations"): partial(self._reserve, request, network),
        }

    def _of_key(self, request: RestRequest, network: str, name: str, query: str) -> Routes:
        store = self._store
        return {
            ("GET", "leases"): partial(self._lease, request, network, name, query),
            ("PUT", "leases"): partial(self._renew, request, network, name),
            ("PUT", "endpoints"): partial(self._publish, request, network, name),
            ("DELETE", "leases"): lambda: store.revoke(
                network, _key(name, "failed to parse subnet"), request.caller
            ),
            ("DELETE", "reservations"): lambda: store.release(
                network, _key(name, "bad subnet"), request.caller
            ),
        }

    def _acquire(self, request: RestRequest, network: str) -> str:
        wanted = _understood(wire.parse_acquisition, request.body)
        lease = self._store.acquire(network, wanted, request.caller, request.server)
        return wire.format_lease(_shown(lease, request))

    def _renew(self, request: RestRequest, network: str, name: str) -> str:
        lease, former = _understood(wire.parse_renewal, request.body)
        if not any(lease.key):
            raise _Wrong("bad subnet")
        named: LeaseKey = (None, None)
        with suppress(_Wrong):
            named = _key(name, "bad subnet")
        renewed = self._store.renew(network, lease, former, named, request.caller)
        return wire.format_lease(_shown(renewed, request))

    def _publish(self, request: RestRequest, network: str, name: str) -> None:
        text = request.body.decode(errors="replace")
        if not _MESH_NAME.fullmatch(name) or not _ENDPOINTS.fullmatch(text):
            raise _Wrong("bad endpoints")
        self._store.publish_endpoints(network, name, text, request.caller)

    def _reserve(self, request: RestRequest, network: str) -> None:
        wanted = _understood(wire.parse_reservation, request.body)
        try:
            self._store.reserve(network, wanted, request.caller)
        except (Denied, Refused):
            raise
        except FlannelError as failure:
            raise FlannelError(f"internal error: {failure}") from None

    def _leases(self, request: RestRequest, network: str, query: str) -> str:
        entries = self._wait(request, query, lambda each: each.network == network and each.key is not None)
        if entries is not None:
            return _events(entries, request)
        leases, index = self._store.leases(network)
        return wire.format_snapshot([_shown(each, request) for each in leases], index)

    def _lease(self, request: RestRequest, network: str, name: str, query: str) -> str:
        key = _key(name, "bad subnet")
        entries = self._wait(request, query, lambda each: each.network == network and each.key == key)
        if entries is not None:
            return _events(entries, request)
        lease, index = self._store.lease(network, key)
        return wire.format_snapshot([_shown(lease, request)], index)

    def _networks(self, request: RestRequest, query: str) -> str:
        entries = self._wait(request, query, lambda each: each.key is None)
        if entries is not None:
            return _events(entries, request)
        return wire.format_networks(*self._store.networks())

    def _wait(self, request: RestRequest, query: str, wanted: Wanted) -> list[LogEntry] | None:
        """Wait for changes after the query's cursor. Return None if the client needs a snapshot."""
        values = parse_qs(query, keep_blank_values=True).get("next")
        if values is None:
            return None
        if not _CURSOR.fullmatch(values[0]):
            shown = gojson.compact(values[0][:40])
            raise FlannelError(f"failed to parse cursor: strconv.ParseUint: parsing {shown}: invalid syntax")
        changes = self._store.changes(self._start)
        return changes.next_after(int(values[0]), wanted, request.is_there, self._store.index)


def _events(entries: list[LogEntry], request: RestRequest) -> str:
    """Return the answer: all changes for a client of ours, else the first as Go flannel's server does."""
    if not request.wants_index:
        entries = [each for each in entries if each.index == entries[0].index]
    events = [
        structs.replace(each.event, lease=_shown(each.event.lease, request))
        if each.event.lease
        else each.event
        for each in entries
    ]
    return wire.format_events(events, entries[-1].index)


def _shown(lease: WireLease, request: RestRequest) -> WireLease:
    """Return the lease without its index and order unless the client asks for the index."""
    return lease if request.wants_index else structs.replace(lease, index=0, created=0)


def _text(status: int, text: str) -> RestAnswer:
    return RestAnswer(status, text.encode(errors="backslashreplace"), TEXT)


def _cleaned(path: str) -> str | None:
    """Return the path without ``//``, ``.`` and ``..``, to which Go's router redirects; None if clean."""
    clean = posixpath.normpath("/" + path.lstrip("/"))
    if path.endswith("/") and clean != "/":
        clean += "/"
    return clean if clean != path else None


def _is_of_a_node(method: str, path: str) -> bool:
    """Return True for a request that a running node makes."""
    return method == "GET" or (method in ("POST", "PUT") and ("/leases" in path or "/endpoints" in path))


def _is_name(network: str) -> bool:
    return bool(network) and len(network) <= _LONGEST_NAME and network.isprintable()


def _key(name: str, otherwise: str) -> LeaseKey:
    """Read a lease key from a path. Raises ``_Wrong``."""
    with suppress(Refused):
        return parse_key(name)
    found = _LOOSE_KEY.search(name)
    if found is not None and 0 < int(found[2][:4]) < 32:
        with suppress(ValueError):
            return IPv4Network(f"{found[1]}/{found[2]}", strict=False), None
    raise _Wrong(otherwise)


def _understood(read: Callable[[object], T], body: bytes) -> T:
    """Read the first JSON value of a body, as Go's decoder does. Raises ``_Wrong`` in Go's words."""
    text = body.decode(errors="replace").lstrip(_SPACE)
    if not text:
        raise _Wrong("JSON decoding error: EOF")
    try:
        end = JSONDecoder().raw_decode(text)[1]
        return read(gojson.parse(text[:end]))
    except JSONDecodeError as error:
        reason = "unexpected EOF" if error.pos >= len(text.rstrip(_SPACE)) - 1 else str(error)
        raise _Wrong(f"JSON decoding error: {reason}") from None
    except (GoJsonError, ValueError, RecursionError) as error:
        raise _Wrong(f"JSON decoding error: {error}") from None
    except Refused as refusal:
        raise _Wrong(f"JSON decoding error: {refusal.problem}") from None
