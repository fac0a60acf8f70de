"""Commands of flannelctl for the store of leases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.main import FINE, PROBLEMS, USAGE, run
from flanneld.subnet.embedded.store import open_file
from flanneld.subnet.remote.token import parse_token
from tests.local_etcd import LocalEtcd, running_etcd
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, running_server

RESERVED = [{"subnet": "10.5.9.0/24", "public_ip": "198.18.0.9"}]


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    file = LocalFile(tmp_path / "leases.db")
    file.put(f"{ROOT}/config", CONFIG)
    return file


class Ctl:
    """flannelctl with flags that name a store."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
        self._capsys = capsys
        self._flags = flags

    def __call__(self, *words: str, status: int = FINE) -> Any:
        assert run([*words, "--output=json", *self._flags], {}) == status, self._capsys.readouterr().err
        return json.loads(self._capsys.readouterr().out)


@pytest.mark.parametrize("place", ["file", "remote", "v2", "v3"])
def test_reservation_is_added_listed_and_removed(
    place: str, file: LocalFile, etcd: LocalEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    if place in ("v2", "v3"):
        etcd.keys(place).put(f"{ROOT}/config", CONFIG)
        check_reservations(Ctl(capsys, f"-etcd-endpoints={etcd.url}", f"-etcd-api={place}"))
    elif place == "file":
        check_reservations(Ctl(capsys, f"-store={file.keystore.database.path}"))
    else:
        with running_server(file) as server:
            check_reservations(Ctl(capsys, f"-remote=127.0.0.1:{server.port}"))


def check_reservations(ctl: Ctl) -> None:
    ctl("reservation", "add", "10.5.9.0/24", "198.18.0.9")
    ctl("reservation", "add", "10.5.9.0/24", "198.18.0.9")
    assert ctl("reservation", "list") == {"reservations": RESERVED}
    assert "already taken" in ctl("reservation", "add", "10.5.9.0/24", "198.18.0.8", status=PROBLEMS)["error"]
    assert (
        "mask incompatible"
        in ctl("reservation", "add", "10.5.8.0/23", "198.18.0.8", status=PROBLEMS)["error"]
    )
    ctl("reservation", "remove", "10.5.9.0/24")
    assert ctl("reservation", "list") == {"reservations": []}
    assert "Key not found" in ctl("reservation", "remove", "10.5.7.0/24", status=PROBLEMS)["error"]


def test_reservation_of_a_named_network(file: LocalFile, capsys: pytest.CaptureFixture[str]) -> None:
    file.put(f"{ROOT}/blue/config", CONFIG)
    ctl = Ctl(capsys, f"-store={file.keystore.database.path}")
    ctl("reservation", "add", "10.5.9.0/24", "198.18.0.9", "--name=blue")
    assert ctl("reservation", "list", "--name=blue") == {"reservations": RESERVED}
    assert ctl("reservation", "list") == {"reservations": []}


def test_token_is_created_listed_and_revoked(file: LocalFile, capsys: pytest.CaptureFixture[str]) -> None:
    ctl = Ctl(capsys, f"-store={file.keystore.database.path}")
    made = ctl("token", "create", "--lasts=2h")
    assert parse_token(made["token"], "").id == made["id"]
    assert [each["state"] for each in ctl("token", "list")["tokens"]] == ["valid"]
    ctl("token", "revoke", made["id"])
    assert [each["state"] for each in ctl("token", "list")["tokens"]] == ["revoked"]
    assert "there is no token" in ctl("token", "revoke", "12345678", status=PROBLEMS)["error"]


def test_backup_is_restored_where_no_store_is(
    file: LocalFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, again = str(tmp_path / "copy"), str(tmp_path / "again.db")
    Ctl(capsys, f"-store={file.keystore.database.path}")("store", "backup", copy)
    restored = Ctl(capsys, f"-store={again}")
    restored("store", "restore", copy)
    assert open_file(again).get(f"{ROOT}/config")[0].value == CONFIG
    assert "is there" in restored("store", "restore", copy, status=PROBLEMS)["error"]


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_networks_move_to_etcd_and_back(
    api: str, etcd: LocalEtcd, file: LocalFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.put(f"{ROOT}/blue/config", CONFIG)
    file.put(f"{ROOT}/blue/subnets/10.5.7.0-24", '{"PublicIP":"198.18.0.7"}', 3600)
    file.put(f"{ROOT}/subnets/10.5.8.0-24", '{"PublicIP":"198.18.0.8"}', None)
    there = [f"-etcd-endpoints={etcd.url}", f"-etcd-api={api}", f"-etcd-prefix=/moved-{api}"]
    out = Ctl(capsys, f"-store={file.keystore.database.path}", *there)
    assert "would copy" in out("store", "export", "--dry-run")["done"][0]
    assert out("store", "export")["complete"]
    assert [line.split()[0] for line in out("store", "export")["done"]] == ["kept"] * 4
    back = Ctl(capsys, f"-store={tmp_path / 'back.db'}", *there)
    assert back("store", "import")["complete"]
    nodes, _ = open_file(str(tmp_path / "back.db")).below(ROOT)
    terms = {each.key.removeprefix(f"{ROOT}/"): each.ttl and round(each.ttl, -2) for each in nodes}
    assert terms == {
        "config": None,
        "blue/config": None,
        "blue/subnets/10.5.7.0-24": 3600,
        "subnets/10.5.8.0-24": None,
    }


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["token", "list"], PROBLEMS, "no store is named; give -store="),
        (["token", "create", "--lasts=1y"], USAGE, "such as 24h"),
        (["token"], USAGE, "ACTION"),
        (["reservation", "add", "10.5.9.1/24", "1.2.3.4"], USAGE, "SUBNET"),
        (["store", "backup", "x", "-store=/nowhere/x.db"], PROBLEMS, "there is no store at /nowhere/x.db"),
        (["store", "backup", "x", "-store=a", "-remote=b:1"], USAGE, "two stores"),
    ],
)
def test_wrong_use_is_explained(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, {}) == status
    assert text in capsys.readouterr().err
