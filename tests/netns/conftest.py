"""The backends that every test of a whole cluster is run with."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["vxlan", "host-gw"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The ``Backend`` part of the network config."""
    return {"Type": request.param}
