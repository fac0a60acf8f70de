"""Servers that are of no use to a client of etcd, and what is expected of it then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from flanneld.errors import Retryable
from tests.lab.etcd_v3 import V3Keys
from tests.lab.impostor import http
from tests.lab.wait import wait_for
from tests.local_etcd import DEADLINE, LocalEtcd, Relay, Serve, answering, server

#: By name, what a server does that is not etcd, and what is said of it.
OF_HTTP: dict[str, tuple[Serve, str]] = {
    "redirects": (answering(http("307 Away", "", "Location: http://u:pw@else/x")), "redirects to else"),
    "redirects below": (answering(http("399 Away", "", "Location: /x")), "redirects to another path"),
    "redirects to no URL": (answering(http("300 Away", "", "Location: http://[pw")), "redirects to nowhere"),
    "odd success": (answering(http("299 Odd", "[]")), "HTTP 299"),
    "refusal": (answering(http("400 Bad", "[]")), "HTTP 400"),
    "foreign JSON": (answering(http("200 OK", '{"hello": "world"}')), "JSON that is not etcd's"),
    "too deep": (answering(http("200 OK", "[" * 100_000)), "200 with something that is no JSON object"),
    "page": (
        answering(http("200 OK", "<html>", "Content-Type: text/html; charset=utf-8")),
        "HTTP 200 with text/html that is no JSON object",
    ),
}


def each_of(misbehaviour: dict[str, tuple[Serve, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("serve", "sentence"), misbehaviour.values(), ids=misbehaviour.keys())


def complaint_about(serve: Serve, etcd: LocalEtcd, client: Callable[..., Any]) -> str:
    """Ask such a server by itself, then with etcd as the next one; return what was said of it.

    ``client`` makes a client of some endpoints; etcd has "yes" at /failover.
    """
    with server(serve) as url:
        with pytest.raises(Retryable) as caught:
            client(url).fetch("/failover")

        def answer() -> Any:
            with suppress(Retryable):  # etcd may take longer than such a client waits
                return client(url, etcd.url).fetch("/failover")

        reply = wait_for(answer, DEADLINE, "an answer of etcd")
    assert url in str(caught.value)
    assert caught.value.remedy
    assert "pw" not in str(caught.value)
    assert reply.node.value == "yes"
    return str(caught.value)


def check_watch_over_silence(etcd: LocalEtcd, keys: V3Keys, client: Callable[..., Any]) -> None:
    """Have the server of a watch fall silent: the watch goes on at the next one, and misses nothing."""
    relay = Relay(etcd.url)
    with server(relay) as url:
        asker = client(url, etcd.url)
        at = asker.fetch("/dir", recursive=True).at
        watcher = asker.watcher("/dir", recursive=True, contact=lambda: None)
        assert watcher.read(at).replies == ()  # The silence of a server that is well.
        relay.is_silent = True
        keys.put("/dir/a", "1")

        def heard() -> Any:
            with suppress(Retryable):  # Also the other one may take longer.
                return watcher.read(at).replies

        replies = wait_for(heard, DEADLINE, "the change")
        watcher.close()
    assert len(replies) == 1
