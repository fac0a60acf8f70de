"""What was right once and has been tampered with, for tests of what readers do with foreign input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, 0.5, "", "0", "1" * 400, "\0", "\ud800"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
#: Any JSON value, though not a large one.
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tampered_bytes(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    """One of them with some bytes changed, or some moved, doubled or lost."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 16]))
        other = draw(st.binary(max_size=length) | st.sampled_from([b"\0\0", b"\xff\xff", b"\0\0\0\0"]))
        data[place : place + length] = draw(st.sampled_from([other, other.ljust(length, b"\0"), b""]))
    return bytes(data[: draw(st.integers(0, len(data)) | st.just(len(data)))])


@st.composite
def tampered_json(draw: st.DrawFn, originals: Sequence[Any]) -> Any:
    """One of them with some of the values in it replaced, added or left out."""
    value = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, 3))):
        value = _with_another(value, draw)
    return value


def _with_another(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(list(value)))
        if not draw(st.integers(0, 5)):
            return {key: each for key, each in value.items() if key != name}
        return value | {name: _with_another(value[name], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], _with_another(value[place], draw), *value[place + 1 :]]
    return draw(JSON)
