"""Which configurations container runtimes find, and in which order."""

from __future__ import annotations

from pathlib import Path

from flanneld.ctl.checks.others import CniFile
from flanneld.ctl.facts import cni_confs


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
