"""HTTP requests and responses common to etcd's v2 and v3 APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from flanneld.subnet.etcd.keys import Position
from flanneld.subnet.failover import ServerFailed

NO_ACCESS = "check -etcd-username, -etcd-password and the rights of that user"


class Answer(Struct, frozen=True):
    """An HTTP response; ``body`` is None for a watch that ended without a change.

    ``at`` is taken from the headers, which only v2 sends.
    """

    server: str
    status: int
    at: Position
    content_type: str = ""
    location: str = ""
    body: bytes | None = None

    def __repr__(self) -> str:
        return f"Answer({self.server}, {self.status})"


class Request(Struct, frozen=True):
    """An HTTP request.

    ``poll_timeout`` is the limit of a watch in seconds, counted from its response headers; None for other
    requests. ``on_head`` is called with the response once its headers are there; an exception ends the
    request. With ``is_stream`` the response has no end: its body are the lines that have come. As long as it
    goes on, the next request with ``is_stream`` is not sent, but answered with the next lines.
    """

    method: str
    target: str
    body: str | None = None
    headers: Mapping[str, str] = {}
    poll_timeout: float | None = None
    is_stream: bool = False
    on_head: Callable[[Answer], object] = lambda _: None

    def __repr__(self) -> str:
        return f"Request({self.method} {self.target})"


#: Words of etcd's errors (api/v3rpc/rpctypes/error.go), and what helps.
_REMEDIES = {
    "space exceeded": "its alarm is NOSPACE: etcdctl compact REVISION && etcdctl defrag --cluster && etcdctl"
    " alarm disarm, with the revision that etcdctl endpoint status -w fields shows",
    **dict.fromkeys(
        ("no leader", "leader changed", "leader failure", "request timed out"),
        "it has no quorum: most of its members have to run and to reach each other, as etcdctl endpoint"
        " status --cluster shows",
    ),
}


def remedy_for(text: str) -> str:
    """Return the remedy for an error of etcd with this text."""
    return next((remedy for words, remedy in _REMEDIES.items() if words in text), "see the log of etcd")


def json_object(answer: Answer) -> dict[str, Any] | None:
    """Return the JSON object of a response, or None if it is something else.

    Raises ``ServerFailed`` on a redirect.
    """
    if 300 <= answer.status < 400:
        raise ServerFailed(f"it redirects to {_host(answer.location)}", "name etcd itself in -etcd-endpoints")
    return parsed_object(answer.body or b"")


def parsed_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if it is something else."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def not_etcd(answer: Answer) -> ServerFailed:
    """Return the error for a response that is not etcd's."""
    return ServerFailed(
        f"HTTP {answer.status} with {answer.content_type or 'something'} that is no JSON object"
    )


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or "another path"
    except ValueError:
        return "nowhere"
