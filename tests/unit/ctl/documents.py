"""Status documents for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flanneld.diagnostics.describe import described
from flanneld.diagnostics.status import Status
from flanneld.state.resources import Resource


def object_of(resource: Resource) -> dict[str, Any]:
    """A desired object that the kernel has, as the document tells it."""
    told: dict[str, Any] = msgspec.to_builtins(described(resource, {}))
    return told


def status_of(document: Mapping[str, Any]) -> Status:
    """A document as flannelctl reads it."""
    return msgspec.convert(document, Status)
