"""Single values as ``flannelctl`` shows them."""

from __future__ import annotations

import pytest

from flanneld.ctl.nodes import _bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1000 * 1024, "1000.0 KiB"),
        (1024 * 1024, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_bytes_are_shown_in_powers_of_1024(number: int, text: str) -> None:
    assert _bytes(number) == text
