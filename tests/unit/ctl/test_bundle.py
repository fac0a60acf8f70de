"""``flannelctl bundle``: everything that helps is in it, and no secret."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.ctl import bundle
from flanneld.ctl.bundle import MASK, redact, secrets_in
from flanneld.ctl.main import USAGE, run
from flanneld.errors import FlannelError
from flanneld.options import Options
from tests.unit.ctl.test_main import daemon

SECRET = "correct-horse-battery"
PLACES = [
    '{{"etcd-password": "{}"}}',
    'Backend: {{"Type": "ipsec", "PSK": "{}"}}',
    '{{"config": "{{\\"PSK\\": \\"{}\\"}}"}}',
    "FLANNELD_ETCD_PASSWORD={}",
    "-etcd-password={}",
    "--token {0} token={0}",
    "http://root:{}@192.0.2.1:2379",
    "Authorization: Bearer {}",
    "private key: {}",
    "preshared_key = {}",
    "AccessKeySecret: {}",
    "-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----",
]


@pytest.mark.parametrize("place", PLACES)
def test_secret_is_masked_where_its_name_or_form_tells(place: str) -> None:
    text = redact(place.replace("--token {0} ", "").format(SECRET))
    assert SECRET not in text
    assert MASK in text


@given(st.text(min_size=4), st.text(), st.text())
def test_known_secret_is_masked_anywhere(secret: str, before: str, after: str) -> None:
    assert secret == MASK or secret not in redact(f"{before}\0{secret}\0{after}", {secret}).replace(MASK, "")


@pytest.mark.parametrize(
    "text",
    [
        '{"etcd-keyfile": "/etc/etcd/key.pem", "etcd_certfile": "/x"}',
        "10.5.3.0/24 via 192.0.2.3 dev eth0 proto 70",
        "FLANNEL_SUBNET=10.5.3.1/24",
        "http://192.0.2.1:2379",
        "-etcd-keyfile=/etc/key",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_masked_json_is_json() -> None:
    document: Any = {"PSK": 'a"b\\', "nested": {"token": "t", "n": 1}, "list": ["password=abc def"]}
    masked = json.loads(redact(json.dumps(document)))
    assert masked == {"PSK": MASK, "nested": {"token": MASK, "n": 1}, "list": [f"password={MASK} def"]}


def test_variables_with_secret_names_are_secrets() -> None:
    text = f"# x\nFLANNELD_IFACE=eth0\nexport FLANNELD_ETCD_PASSWORD='{SECRET}'\n"
    assert secrets_in(text) == {SECRET}


def test_key_files_tell_what_to_mask(tmp_path: Path) -> None:
    (tmp_path / "wgkey").write_text(f"{SECRET}\n")
    (tmp_path / "wgkey").chmod(0o400)
    (tmp_path / "subnet.env").write_text("FLANNEL_MTU=1450\n")
    (tmp_path / "subnet.env").chmod(0o644)
    (tmp_path / "join").write_text("join-token\n")
    wanted = Options(
        secret_dir=str(tmp_path),
        etcd_password="pass-word",
        token="plain-token",
        token_file=str(tmp_path / "join"),
    )
    found = bundle.known_secrets(wanted)
    assert {SECRET, "pass-word", "plain-token", "join-token"} <= found
    assert "FLANNEL_MTU=1450" not in found


def test_archive_is_its_owners_alone_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    bundle.write(path, [("x", f"key {SECRET}")], {SECRET})
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        member = archive.extractfile("a/x")
        assert member is not None
        assert member.read() == b"key ***"
    with pytest.raises(FlannelError, match="exists"):
        bundle.write(path, [], set())


def test_bundle_holds_answers_kernel_and_config_without_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subnet_file, archive = tmp_path / "subnet.env", tmp_path / "b.tar.gz"
    subnet_file.write_text("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.3.1/24\n")
    said = {"version": "1", "pid": 1, "started": 0.0, "health": {"missing": [], "late": [], "conditions": []}}
    said["events"] = [{"time": 0.0, "severity": "I", "source": "main", "text": f"psk={SECRET}"}]
    words = ["bundle", str(archive), f"--subnet-file={subnet_file}", f"--etcd-password={SECRET}"]
    with daemon(tmp_path, json.dumps(said).encode()):
        run(words, {})
    assert str(archive) in capsys.readouterr().out
    with tarfile.open(archive) as opened:
        files = {member.name.removeprefix("b/"): opened.extractfile(member) for member in opened}
        texts = {name: file.read().decode() for name, file in files.items() if file}
    assert {"status.json", "doctor.json", "routes.json", "kernel/links", f"files{subnet_file}"} <= set(texts)
    assert "lo:" in texts["kernel/links"]
    assert [name for name, text in texts.items() if SECRET in text] == []


def test_archive_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "there"
    path.touch()
    assert run(["bundle", str(path), f"--subnet-file={tmp_path / 'subnet.env'}"], {}) == USAGE
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("secrets", "text", "masked"),
    [
        ({"abcd"}, "x abcd y", "x *** y"),
        ({"abc"}, "x abc y", "x abc y"),
        ({"abcd", "abcdef"}, "abcdef abcd", "*** ***"),
        ({""}, "text", "text"),
    ],
    ids=["four letters", "a short one", "one within another", "none"],
)
def test_known_secrets_are_masked_the_longest_first_unless_short(
    secrets: set[str], text: str, masked: str
) -> None:
    assert redact(text, secrets) == masked


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("PASSWORD=abc", {"abc"}),
        ('export  API_KEY = "a b" ', {"a b"}),
        ("TOKEN", set()),
        ("TOKEN_FILE=/x", set()),
        ("NAME=TOKEN=x", set()),
    ],
)
def test_variable_is_secret_by_its_whole_name(line: str, found: set[str]) -> None:
    assert secrets_in(line) == found


@pytest.mark.parametrize(
    ("name", "folder"), [("a.tar.gz", "a"), ("a.tar", "a"), ("a.gz", "a"), ("a.tgz", "a.tgz"), ("a", "a")]
)
def test_files_lie_in_a_folder_with_the_archives_name(name: str, folder: str, tmp_path: Path) -> None:
    bundle.write(tmp_path / name, [("one", "1"), ("b/two", "\udcff2")], set())
    with tarfile.open(tmp_path / name) as archive:
        assert [(each.name, each.size, each.mode) for each in archive] == [
            (f"{folder}/one", 1, 0o600),
            (f"{folder}/b/two", 7, 0o600),
        ]


def test_archive_that_cannot_be_written_is_told_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FlannelError, match=r"cannot write .*No such file or directory; name another file"):
        bundle.write(tmp_path / "none" / "a.tar.gz", [], set())


def test_files_that_others_may_read_hold_no_secrets(tmp_path: Path) -> None:
    for mode in (0o600, 0o640, 0o604, 0o400):
        (tmp_path / f"{mode:o}").write_text(f"content {mode:o}\n")
        (tmp_path / f"{mode:o}").chmod(mode)
    (tmp_path / "folder").mkdir(0o700)
    found = bundle.known_secrets(Options(secret_dir=str(tmp_path)))
    assert {each for each in found if each.startswith("content")} == {"content 600", "content 400"}
    assert "content" not in str(bundle.known_secrets(Options(secret_dir=str(tmp_path / "none"))))
