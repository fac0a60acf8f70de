"""Status documents for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from flanneld.diagnostics.describe import described
from flanneld.state.resources import Resource


def object_of(resource: Resource) -> dict[str, Any]:
    """A desired object that the kernel has, as the document tells it."""
    told: dict[str, Any] = msgspec.to_builtins(described(resource, {}))
    return told
