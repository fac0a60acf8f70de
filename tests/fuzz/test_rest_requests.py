"""Requests of any shape to the server of leases: answered or cut off, and it goes on."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.local_etcd import LocalEtcd, running_etcd
from tests.unit.subnet.remote.servers import CONFIG, ROOT, Running, running_server

METHODS = st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "PATCH", ""]) | st.text(max_size=9)
WORDS = st.sampled_from(
    [
        "v1",
        "_",
        "leases",
        "reservations",
        "config",
        "10.5.1.0-24",
        "10.5.1.0-24&fd00::-64",
        "..",
        "%2e",
        "%00",
        "",
    ]
)
PATHS = st.lists(WORDS | st.text(max_size=9), max_size=6).map(lambda words: "/" + "/".join(words))
QUERIES = st.sampled_from(
    ["", "?next=", "?next=x", "?next=-1", "?next=99999999999999999999", "?&&=", "?next=1"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Subnet", "PublicIP", "Attrs", "Expiration", "BackendData", "Former", "Strangers", "Index"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)
BODIES = VALUES.map(repr).map(str.encode) | VALUES.map(str).map(str.encode) | st.binary(max_size=99)


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with running_etcd() as etcd:
        etcd.put(f"{ROOT}/config", CONFIG)
        yield etcd


@pytest.fixture(scope="module")
def server(etcd: LocalEtcd) -> Iterator[Running]:
    with running_server(etcd, "v2") as server:
        yield server


def exchange(server: Running, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(65536):
                answer += data
        return answer


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(method=METHODS, path=PATHS, query=QUERIES, body=BODIES)
def test_request_of_any_shape_is_answered(
    server: Running, caplog: pytest.LogCaptureFixture, method: str, path: str, query: str, body: bytes
) -> None:
    caplog.clear()
    headers = f"Host: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    head = f"{method} {path}{query} HTTP/1.1\r\n{headers}\r\n\r\n"
    answer = exchange(server, head.encode("utf-8", "replace") + body)
    assert not answer or answer[:9] == b"HTTP/1.1 "
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@FUZZ
@given(request_bytes=st.binary(max_size=400))
def test_bytes_of_any_kind_do_no_harm(
    server: Running, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    caplog.clear()
    exchange(server, request_bytes)
    assert server.ask("GET", "/v1/_/config").status == 200
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
