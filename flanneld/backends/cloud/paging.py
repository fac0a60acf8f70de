"""Paging of lists in a cloud's answers, and batching of lists in calls (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from flanneld.backends.cloud.contract import ApiCall

Item = TypeVar("Item")
Ask = Callable[[ApiCall], Mapping[str, Any]]

#: Objects in one call that every cloud accepts and returns.
BATCH = 100
#: Pages of one list, at most: a cloud that repeats a page for ever must not block the daemon.
_MOST_PAGES = 1000


def by_token(ask: Ask, call: ApiCall, given: str, taken: str) -> Iterator[Mapping[str, Any]]:
    """Yield each page. Field ``given`` of an answer is the token for parameter ``taken`` of the next call."""
    token = ""
    for _ in range(_MOST_PAGES):
        more = {taken: token} if token else {}
        page = ask(replace(call, parameters={**call.parameters, **more}))
        yield page
        following = page.get(given) or ""
        if not following or following == token:
            return
        token = str(following)


def by_offset(ask: Ask, call: ApiCall, listed: str) -> Iterator[Mapping[str, Any]]:
    """Yield each item of the list ``listed``, paged by Offset and Limit."""
    for number in range(_MOST_PAGES):
        part = {"Offset": str(number * BATCH), "Limit": str(BATCH)}
        items = ask(replace(call, parameters={**call.parameters, **part})).get(listed) or ()
        yield from items
        if len(items) < BATCH:
            return


def batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield parts of a list that fit into one call."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
