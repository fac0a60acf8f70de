"""The lab's Kubernetes API server against a real one: kube-apiserver 1.36.2, recorded over HTTP/1.1.

The recordings hold tokens of a server that is no more. The lab's one does the same with the same versions.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lab.wait import wait_for
from tests.local_kube import LocalKube, Reply, ask, parse_reply, running_kube

GOLDEN = Path(__file__).parents[2] / "golden" / "kube-apiserver-1.36.2.json"
RECORDED: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
NAMES = [entry["name"] for entry in RECORDED]
WATCH = "watch-events-bookmarks"  # it saw what the requests before it in the recording did
#: Resource versions that were used up by others before a request.
VERSIONS = {"list-empty": 209, "watch-rv0-initial": 220, "watch-410": 224}


@pytest.fixture(scope="module")
def replies() -> list[Reply]:
    """All recorded requests made once more, in their order."""
    found = []
    with running_kube() as kube, ThreadPoolExecutor() as pool:
        kube.control.set_patience(0.1)
        for name, entry in zip(NAMES, RECORDED, strict=True):
            kube.control.jump(max(0, VERSIONS.get(name, 0) - kube.control.version()))
            if name == "patch-annotations":
                watch = pool.submit(send_again, kube, RECORDED[NAMES.index(WATCH)])
                wait_for(kube.control.watches, what="the watch to begin")
            if name == "watch-410":
                kube.control.compact()
            if name == WATCH:
                kube.control.expire_watches()
            found.append(watch.result() if name == WATCH else send_again(kube, entry))
    return found


def send_again(kube: LocalKube, entry: dict[str, Any]) -> Reply:
    """Make a recorded request, with less patience in short watches than the recorder had."""
    target = re.sub(r"timeoutSeconds=8", "timeoutSeconds=600", entry["target"])
    target = re.sub(r"timeoutSeconds=[12]", "timeoutSeconds=0.2", target)
    token = entry["headers"].get("Authorization", "").removeprefix("Bearer ")
    headers = {name: value for name, value in entry["headers"].items() if name != "Authorization"}
    return ask(kube, entry["method"], target, entry["body"], headers, token)


def documents(reply: Reply) -> list[Any]:
    """What the body says, line by line, without what is different each time."""
    text = reply.body.decode()
    text = re.sub(r'"(uid|creationTimestamp)":"[^"]+"', r'"\1":"?"', text)
    if not text.startswith("{"):
        return [text]
    lines = text.split("\n")[:-1] if "\n{" in text else [text]
    # Written again, so that the order of the members counts.
    return [json.dumps(without_managers(json.loads(line))) for line in lines]


def without_managers(value: Any) -> Any:
    if isinstance(value, list):
        return [without_managers(member) for member in value]
    if not isinstance(value, dict):
        return value
    return {key: without_managers(member) for key, member in value.items() if key != "managedFields"}


@pytest.mark.parametrize("number", range(len(RECORDED)), ids=NAMES)
def test_an_answer_is_the_real_servers(replies: list[Reply], number: int) -> None:
    there, here = parse_reply(RECORDED[number]["answer"].encode()), replies[number]
    framing = ("Content-Length", "Transfer-Encoding")
    assert here.status == there.status
    assert [name for name in here.headers if name not in framing] == [
        name for name in there.headers if name not in framing
    ]
    assert here.headers["Content-Type"] == there.headers["Content-Type"]
    assert here.complete
    if NAMES[number] == "list-empty":  # recorded when nothing had been written yet
        there.chunks.clear()
        assert documents(here) == [document.replace('"1"', '"209"') for document in documents(there)]
    else:
        assert in_order(documents(here)) == in_order(documents(there))
    assert here.body[-1:] == there.body[-1:]


def in_order(lines: list[Any]) -> tuple[list[Any], list[Any]]:
    """A watch's changes, and its last bookmark: when the others come, and how many, is a matter of time."""
    marks = [line for line in lines if str(line).startswith('{"type": "BOOKMARK"')]
    return [line for line in lines if line not in marks], marks[-1:]
