"""The door in front of etcd does to requests what a test orders, and nothing else."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab import Door, Lab, Mishap, wait_for
from tests.lab.door import DOOR


@pytest.fixture(scope="module")
def front() -> Iterator[tuple[Lab, Door]]:
    with Lab() as lab, Door(lab.switch, lab.etcd.address) as door:
        yield lab, door
        door.mend()


@contextmanager
def connected(lab: Lab) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(lab.etcd.address, DOOR, timeout=20)
    with lab.switch.entered():
        connection.connect()
    try:
        yield connection
    finally:
        connection.close()


def ask(lab: Lab, method: str, path: str) -> tuple[int, bytes]:
    with connected(lab) as connection:
        connection.request(method, f"/v2/keys{path}")
        response = connection.getresponse()
        return response.status, response.read()


def put(lab: Lab, key: str) -> int:
    status, body = ask(lab, "PUT", f"{key}?value=x")
    assert status in (200, 201), body
    return int(json.loads(body)["node"]["modifiedIndex"])


def test_proxied_answers_are_those_of_etcd(front: tuple[Lab, Door]) -> None:
    lab, _ = front
    index = put(lab, "/passes")
    found: dict[str, Any] = lab.etcd.get("/passes") or {}
    assert (found["value"], found["modifiedIndex"]) == ("x", index)


def test_a_request_is_refused_once(front: tuple[Lab, Door]) -> None:
    lab, door = front
    door.trouble("refused")
    status, body = ask(lab, "PUT", "/refused?value=x")
    assert status >= 400 or b"html" in body
    assert lab.etcd.get("/refused") is None
    put(lab, "/refused")


@pytest.mark.parametrize(("trouble", "is_done"), [("lost", False), ("unheard", True), ("broken", True)])
def test_a_write_without_an_answer(front: tuple[Lab, Door], trouble: Mishap, is_done: bool) -> None:
    lab, door = front
    door.trouble(trouble)
    with pytest.raises((OSError, http.client.HTTPException, ValueError)):
        put(lab, f"/{trouble}")
    assert (lab.etcd.get(f"/{trouble}") is not None) == is_done


def test_a_watch_is_told_again_what_it_knows(front: tuple[Lab, Door]) -> None:
    lab, door = front
    for _ in range(10):  # so that the indexes have as many digits
        last = put(lab, "/watched")
    door.trouble("repeat")
    status, body = ask(lab, "GET", f"/watched?wait=true&waitIndex={last}")
    assert status == 200
    assert json.loads(body)["node"]["modifiedIndex"] < last


def test_held_answers_arrive_later(front: tuple[Lab, Door]) -> None:
    lab, door = front
    door.hold()
    with connected(lab) as connection:
        connection.request("PUT", "/v2/keys/held?value=x")
        wait_for(lambda: lab.etcd.get("/held"), what="etcd to be told")
        door.mend()
        assert connection.getresponse().status in (200, 201)


def test_a_shut_door_lets_nobody_in_until_it_is_mended(front: tuple[Lab, Door]) -> None:
    lab, door = front
    with connected(lab) as connection:
        connection.request("GET", "/v2/keys/nothing?wait=true")
        door.shut()
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse().read()  # Its head may have come before.
    with pytest.raises((OSError, http.client.HTTPException)):
        put(lab, "/shut")
    door.mend()
    put(lab, "/shut")


def test_slow_answers_arrive(front: tuple[Lab, Door]) -> None:
    lab, door = front
    door.slow_down(0.05)
    for _ in range(3):
        put(lab, "/slow")
    door.mend()
