"""Stand-ins in place of the kernel, libnftables and programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flanneld.network.firewall import guard, netlink, nftables
from tests.unit.network.firewall.stand_ins import Answer, FakeKernel, FakeLibrary


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    found = FakeKernel()
    monkeypatch.setattr(netlink, "NetlinkSocket", found)
    return found


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    script = f'#!/bin/sh\necho "${{0##*/}} $*" >>{tmp_path}/asked\nexec {shutil.which("cat")} "$0 $*"\n'
    for family in ("", "6"):
        for program in ("nft", "ipset", f"ip{family}tables-nft-save", f"ip{family}tables-legacy-save"):
            (tmp_path / program).write_text(script)
            (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(command: str, text: str) -> None:
        (tmp_path / command).write_text(text)

    return make


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    found = FakeLibrary()
    for user in (nftables, guard):
        monkeypatch.setattr(user, "load", lambda: found)
    return found
