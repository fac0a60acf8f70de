"""Requests to etcd and the answers to them, as far as both of its APIs have them in common (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from flanneld.errors import NoAnswer, Retryable
from flanneld.subnet.etcd.keys import Position

NO_ACCESS = "check -etcd-username, -etcd-password and the rights of that user"


class Answer(Struct, frozen=True):
    """An HTTP answer; ``body`` is None for a long poll that brought no news.

    ``at`` is what the headers say, which only those of v2 do.
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
    """``patience`` is how long a long poll may last once its answer has begun, None for others.

    ``on_head`` sees an answer when its head has come; what it raises ends the request.
    """

    method: str
    target: str
    body: str | None = None
    headers: Mapping[str, str] = {}
    patience: float | None = None
    on_head: Callable[[Answer], object] = lambda _: None

    def __repr__(self) -> str:
        return f"Request({self.method} {self.target})"


class NoSuchApi(Retryable):
    """The servers that answer do not have this API of etcd."""


class Useless(Exception):
    """A server cannot answer, another one may. ``sent``: it may have the request nevertheless.

    ``kind`` is what to raise when no server can.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "is that etcd? check -etcd-endpoints",
        *,
        sent: bool = True,
        kind: type[Retryable] = NoAnswer,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.sent = sent
        self.kind = kind


def json_object(answer: Answer) -> dict[str, Any] | None:
    """The JSON object that an answer is; None if it is something else. Raises ``Useless`` if it redirects."""
    if 300 <= answer.status < 400:
        raise Useless(f"it redirects to {_host(answer.location)}", "name etcd itself in -etcd-endpoints")
    return parsed_object(answer.body or b"")


def parsed_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is something else."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def nonsense(answer: Answer) -> Useless:
    """What to raise for an answer that is not etcd's."""
    return Useless(f"HTTP {answer.status} with {answer.content_type or 'something'} that is no JSON object")


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or "another path"
    except ValueError:
        return "nowhere"
