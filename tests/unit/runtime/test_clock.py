"""Times as texts."""

from __future__ import annotations

import pytest

from flanneld.runtime import clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(82799.9, "23h0m0s"), (3661, "1h1m1s"), (60, "1m0s"), (59, "59s"), (0.2, "0s"), (-3000, "0s")],
)
def test_time_span_is_as_go_prints_it(seconds: float, text: str) -> None:
    assert clock.go_duration(seconds) == text


def test_time_is_as_go_prints_it() -> None:
    assert clock.go_text(1763973307.9) == "2025-11-24 08:35:07 +0000 UTC"
