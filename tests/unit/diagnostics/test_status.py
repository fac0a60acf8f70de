"""Parts of the status document as JSON."""

from __future__ import annotations

import json

import pytest

from flanneld.diagnostics.status import encoded


@pytest.mark.parametrize("text", ["vxlan", "\u00e9", '"\n\0', "\ud800"])
def test_any_text_out_of_a_lease_is_encoded(text: str) -> None:
    assert json.loads(encoded({"reason": text, "expires": None})) == {"reason": text, "expires": None}
