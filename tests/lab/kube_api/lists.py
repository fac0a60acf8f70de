"""Lists of nodes: selectors, pages, and which version of the cluster they show."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.lab.kube_api import refusals
from tests.lab.kube_api.store import Items, Store, dump

Query = Mapping[str, str]

INCONSISTENT = -1  # the version in a token that goes on with whatever there is


def node_list(store: Store, query: Query, patience: float) -> Iterator[bytes]:
    """The JSON of a NodeList in pieces. ``patience``: seconds to wait for a version that is yet to come."""
    selected = selector(query)
    start, version, items = _items(store, query, patience)
    left = [(name, item) for name, item in items if name >= start and selected(name, item)]
    # A list out of the cache, which version 0 asks for, is never cut into pages.
    limit = 0 if query.get("resourceVersion") == "0" else int(query.get("limit", "0") or "0")
    metadata: dict[str, Any] = {"resourceVersion": str(version)}
    if limit and len(left) > limit:
        store.keep("nodes", version, items)
        metadata["continue"] = _token(version, f"/{left[limit - 1][0]}")
        if not is_selective(query):
            metadata["remainingItemCount"] = len(left) - limit
        left = left[:limit]
    return _written(metadata, left)


def selector(query: Query) -> Callable[[str, bytes], bool]:
    """Does an object match labelSelector and fieldSelector? Only equality is known. Raises ``Refusal``."""
    labels = _equalities(query.get("labelSelector", ""))
    fields = _equalities(query.get("fieldSelector", ""))
    for field in fields:
        if field[0] not in ("metadata.name", "spec.unschedulable"):
            raise refusals.bad_request(f"field label not supported: {field[0]}")

    def selected(name: str, item: bytes) -> bool:
        if any((name == value) is not equal for field, equal, value in fields if field == "metadata.name"):
            return False
        there = json.loads(item)["metadata"].get("labels", {}) if labels else {}
        return all((there.get(label) == value) is equal for label, equal, value in labels)

    return selected


def is_selective(query: Query) -> bool:
    return bool(query.get("labelSelector") or query.get("fieldSelector"))


def version_of(query: Query, *, watch: bool = False) -> int:
    """The resourceVersion asked for, 0 without one. Raises ``Refusal``."""
    text = query.get("resourceVersion", "")
    if text and not text.isdecimal():
        raise refusals.bad_version(text, watch=watch)
    return int(text or "0")


def wait_for_version(store: Store, version: int, patience: float) -> None:
    with store.lock:
        if not store.lock.wait_for(lambda: store.version >= version, patience):
            raise refusals.too_large_version(version, store.version)


def _items(store: Store, query: Query, patience: float) -> tuple[str, int, Items]:
    """Where to start, the version of the list, and all items of that version."""
    if token := query.get("continue"):
        return _resumed(store, token)
    version = version_of(query)
    wait_for_version(store, version, patience)
    with store.lock:
        if query.get("resourceVersionMatch") == "Exact":
            items = store.items_at("nodes", version)
            if items is None:
                raise refusals.too_old_list()
            return "", version, items
        return "", store.version, store.items("nodes")


def _resumed(store: Store, token: str) -> tuple[str, int, Items]:
    version, start = _read_token(token)
    with store.lock:
        if version == INCONSISTENT:
            return start, store.version, store.items("nodes")
        items = store.items_at("nodes", version)
    if items is None:
        raise refusals.too_old_page(_token(INCONSISTENT, start.removesuffix("\0")))
    return start, version, items


def _token(version: int, last: str) -> str:
    text = dump({"v": "meta.k8s.io/v1", "rv": version, "start": f"{last}\0"})
    return urlsafe_b64encode(text).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, str]:
    try:
        content = json.loads(urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(content["rv"]), str(content["start"]).removeprefix("/")
    except (ValueError, KeyError, TypeError):
        problem = "invalid character '\\x81' looking for beginning of value"
        raise refusals.bad_request(f"invalid continue token: continue key is not valid: {problem}") from None


def _written(metadata: Mapping[str, Any], items: Items) -> Iterator[bytes]:
    yield b'{"kind":"NodeList","apiVersion":"v1","metadata":%b,"items":[' % dump(metadata)
    for number, (_, item) in enumerate(items):
        yield b"," + item if number else item
    yield b"]}\n"


def _equalities(text: str) -> list[tuple[str, bool, str]]:
    """``a=b,c!=d`` as (name, equal, value)."""
    found = []
    for part in filter(None, text.split(",")):
        name, sign, value = part.partition("!=") if "!=" in part else part.replace("==", "=").partition("=")
        found.append((name.strip(), sign == "=", value.strip()))
    return found
