"""Namespaces of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld.network import host
from flanneld.network.host import named_namespaces


def test_a_namespace_with_two_names_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of Docker that an operator has linked into /run/netns."""
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("/proc/thread-self/ns/net")
    (tmp_path / "d").symlink_to("nowhere")
    monkeypatch.setattr(host, "_PLACES", (str(tmp_path),))
    assert list(named_namespaces()) == [tmp_path / "a"]
