"""The service for calls that may block, without a thread or a time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def at_once(what: str, act: Callable[[], Result], timeout: float, /) -> Result:
    """Call the function and return its result."""
    del what, timeout
    return act()
