"""Which configurations container runtimes find, and what the doctor reads of an uplink."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flanneld.ctl import doctor
from flanneld.ctl.checks.host import CniFile
from flanneld.ctl.doctor import cni_confs
from flanneld.network import interfaces


def test_configs_come_in_the_order_of_their_names_with_the_plug_ins_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "20-other.conf").write_text('{"type": "bridge"}')
    (tmp_path / "10-flannel.conflist").write_text('{"plugins": [{"type": "flannel"}, {"type": "portmap"}]}')
    assert list(cni_confs(tmp_path)) == [
        CniFile(f"{tmp_path}/10-flannel.conflist", ("flannel", "portmap")),
        CniFile(f"{tmp_path}/20-other.conf", ("bridge",)),
    ]


def test_what_is_no_config_is_left_out(tmp_path: Path) -> None:
    for name, text in {
        "00-disabled.conflist.bak": '{"type": "calico"}',
        "01.conf": "no JSON",
        "02.conf": "[]",
        "03.conflist": '{"plugins": 7}',
        "04.conflist": '{"plugins": [{}]}',
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "05.conf").mkdir()
    assert list(cni_confs(tmp_path)) == []


def test_a_host_without_cni_has_none(tmp_path: Path) -> None:
    assert list(cni_confs(tmp_path / "net.d")) == []


@pytest.mark.parametrize(("cpus", "queues"), [(1, (1, 1)), (2, (1, 2)), (8, (1, 4)), (None, (1, 1))])
def test_queues_without_a_cpu_are_of_no_use(
    monkeypatch: pytest.MonkeyPatch, cpus: int | None, queues: tuple[int, int]
) -> None:
    monkeypatch.setattr(interfaces, "channels", lambda _name: (1, 4))
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert doctor._speed("lo") == (False, queues)
