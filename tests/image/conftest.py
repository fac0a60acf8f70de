"""The image that all tests in this folder share; so they run in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.image.built_image import BuiltImage


@pytest.fixture(scope="session")
def image() -> Iterator[BuiltImage]:
    """Building takes minutes."""
    with BuiltImage() as image:
        yield image
