"""Commands of flannelctl for the store of leases."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flanneld.config import parse
from flanneld.ctl.main import FINE, PROBLEMS, USAGE, run
from flanneld.ctl.store_commands import checked, consequences, read_options
from flanneld.subnet.embedded.store import open_file
from flanneld.subnet.etcd.keys import Conflict
from flanneld.subnet.remote.credentials import parse_token
from flanneld.subnet.remote.leases import over_file
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
    assert (
        ctl("reservation", "add", "10.5.9.0/24", "198.18.0.8", status=PROBLEMS)["error"]
        == "lease already taken; choose another: flannelctl lease list has all"
    )
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


# ---- the network config, and leases ---------------------------------------------------------------

BACKEND = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}'
IPV6 = '{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fc00::/48"}'
DUAL_STACK = '{"EnableIPv6":true,"Network":"10.5.0.0/16","IPv6Network":"fc00::/48","Backend":{"Type":"%s"}}'
ALSO = '{"Network":"10.5.0.0/16","Backend":{"Type":"%s","Also":{"Type":"%s"}}}'
CLOUD = '{"Network":"10.5.0.0/16","Backend":{"Type":"aws-vpc","RouteTableID":["a"]}}'


@pytest.mark.parametrize("place", ["file", "v2", "v3"])
def test_config_is_written_checked_and_read(
    place: str, file: LocalFile, etcd: LocalEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"-store={file.keystore.database.path}"]
    if place != "file":
        flags = [f"-etcd-endpoints={etcd.url}", f"-etcd-api={place}", f"-etcd-prefix=/config-{place}"]
    ctl, new = Ctl(capsys, *flags), tmp_path / "config.json"
    if place != "file":
        assert "no network config" in ctl("config", "get", status=PROBLEMS)["error"]
        new.write_text(CONFIG)
        assert ctl("config", "set", str(new))["todo"] == [
            "flanneld takes it at its next try: nothing is to be restarted"
        ]
    assert ctl("config", "get") == {"config": CONFIG}
    new.write_text(BACKEND)
    assert ctl("config", "set", str(new))["done"] == "wrote the network config"
    assert ctl("config", "get") == {"config": BACKEND}
    new.write_text(BACKEND.replace(":{", ": {"))
    assert ctl("config", "set", str(new)) == {"done": "the network config is this one already"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "this is no JSON"),
        ('{"Network":"10.5.0.0/16","SubnetLan":24}', 'did you mean "SubnetLen"?'),
        (
            BACKEND.replace("MTU", "MTV"),
            "Unknown key MTV in Backend of the network config; did you mean MTU?",
        ),
        (BACKEND.replace("1400", '"1400"'), "MTU must be a whole number"),
        (BACKEND.replace("vxlan", "vxlam"), "unknown backend type"),
        (IPV6, "udp carries IPv4 only; set EnableIPv4 to true and EnableIPv6 to false"),
        (IPV6.replace("}", ',"Backend":{"Type":"vxlan","Also":{"Type":"ipip"}}}'), "ipip carries IPv4 only"),
        (DUAL_STACK % "gce", "gce carries IPv4 only"),
        (DUAL_STACK % "ipsec", "ipsec carries IPv4 only"),
        (ALSO % ("vxlan", "udp"), "udp cannot run beside another one"),
        (ALSO % ("alloc", "vxlan"), "alloc cannot run beside another one"),
        (ALSO % ("vxlan", "VXLAN"), "are both vxlan"),
        (ALSO % ("vxlan", 'wireguard","ListenPort":8472,"PSK":"'), "both use UDP port 8472"),
        (CLOUD.replace("ID", "IDs"), "did you mean RouteTableID?"),
        (CLOUD.replace('["a"]', "7"), "Unexpected RouteTableID type. Must be string or array of strings"),
    ],
)
def test_config_that_no_daemon_would_take_is_not_written(
    text: str, said: str, file: LocalFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl, new = Ctl(capsys, f"-store={file.keystore.database.path}"), tmp_path / "config.json"
    new.write_text(text)
    assert said in ctl("config", "set", str(new), status=PROBLEMS)["error"]
    new.unlink()
    assert str(new) in ctl("config", "set", str(new), status=PROBLEMS)["error"]
    assert ctl("config", "get") == {"config": CONFIG}


@pytest.mark.parametrize(
    "text",
    [
        CLOUD,
        IPV6.replace("}", ',"Backend":{"Type":"vxlan"}}'),
        DUAL_STACK % "udp",
        BACKEND.replace("1400", '1400,"Also":{"Type":"ipip","AllowUnencryptedPeers":true}'),
    ],
)
def test_config_that_a_daemon_takes_is_accepted(text: str) -> None:
    assert checked(text) == parse(text)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (CONFIG.replace("10.5", "10.6"), ["restart", "takes another"]),
        (BACKEND, ["restart", "Backend.Also", "containers keep their MTU"]),
        (CONFIG.replace('"}}', '","Learning":true}}'), ["restart", "former settings"]),
        (CONFIG.replace('"}}', '","MTU":1300}}'), ["restart", "containers keep their MTU"]),
    ],
)
def test_change_of_config_says_what_is_to_be_done(new: str, words: list[str]) -> None:
    todo = list(consequences(CONFIG, parse(new)))
    assert len(todo) == len(words)
    assert all(word in line for word, line in zip(words, todo, strict=True))


def test_commands_of_a_config_are_asked_for(
    file: LocalFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl, new = Ctl(capsys, f"-store={file.keystore.database.path}"), tmp_path / "config.json"
    new.write_text(
        '{"Network":"10.5.0.0/16","Backend":{"Type":"extension","SubnetAddCommand":"ip route add"}}'
    )
    said = ctl("config", "set", str(new), status=PROBLEMS)["error"]
    assert said == "each node runs these commands of the config as root: ip route add; if so, give --yes"
    assert ctl("config", "get") == {"config": CONFIG}
    ctl("config", "set", str(new), "--yes")
    assert ctl("config", "get") == {"config": new.read_text()}


def test_config_of_another_writer_is_not_overwritten(file: LocalFile) -> None:
    store = over_file(file.keystore)
    text, index = store.config_text("_")
    file.put(f"{ROOT}/config", BACKEND)
    with pytest.raises(Conflict):
        store.write_config("_", text, index)
    assert store.config_text("_")[0] == BACKEND


def test_config_in_kubernetes_is_printed_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "config.json"
    new.write_text(BACKEND)
    ctl = Ctl(capsys, "-kube-subnet-mgr", f"-net-config-path={new}")
    assert ctl("config", "get") == {"config": BACKEND}
    done = ctl("config", "set", str(new))
    patch = shlex.split(done["done"])
    assert patch[:5] == ["kubectl", "-n", "kube-flannel", "patch", "configmap"]
    assert json.loads(json.loads(patch[-1])["data"]["net-conf.json"]) == json.loads(BACKEND)
    assert done["todo"] == ["kubectl -n kube-flannel rollout restart daemonset kube-flannel-ds"]


#: An address of this host, which answers, and one of RFC 5737, which does not.
HERE, SILENT = "127.0.0.2", "192.0.2.99"


@pytest.mark.parametrize("place", ["file", "v2", "v3"])
def test_lease_is_listed_and_deleted(
    place: str, file: LocalFile, etcd: LocalEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"-store={file.keystore.database.path}"]
    there: LocalFile | Any = file
    root = ROOT if place == "file" else f"/leases-{place}"
    if place != "file":
        flags = [f"-etcd-endpoints={etcd.url}", f"-etcd-api={place}", f"-etcd-prefix={root}"]
        there = etcd.keys(place)
        there.put(f"{root}/config", CONFIG)
    for number, address in (("7", SILENT), ("8", HERE)):
        there.put(f"{root}/subnets/10.5.{number}.0-24", f'{{"PublicIP":"{address}"}}', 3600)
    ctl = Ctl(capsys, *flags)
    assert {(each["subnet"], each["public ip"]) for each in ctl("lease", "list")["leases"]} == {
        ("10.5.7.0/24", SILENT),
        ("10.5.8.0/24", HERE),
    }
    asked = ctl("lease", "delete", "10.5.7.0/24", status=PROBLEMS)["error"]
    assert asked == f"delete the lease 10.5.7.0/24 of {SILENT}; if so, give --yes"
    ctl("lease", "delete", "10.5.7.0/24", "--yes")
    asked = ctl("lease", "delete", "10.5.8.0/24", "--yes", status=PROBLEMS)["error"]
    assert asked.startswith(f"{HERE} answers: its containers lose the network.")
    assert asked.endswith("give --yes --yes")
    assert [each["subnet"] for each in ctl("lease", "list")["leases"]] == ["10.5.8.0/24"]
    ctl("lease", "delete", "10.5.8.0/24", "--yes", "--yes")
    assert ctl("lease", "list") == {"leases": []}
    assert (
        "there is no lease of 10.5.8.0/24" in ctl("lease", "delete", "10.5.8.0/24", status=PROBLEMS)["error"]
    )


@pytest.mark.parametrize(("typed", "is_deleted"), [("y", True), ("n", False), ("", False)])
def test_answer_on_a_terminal_decides(
    typed: str, is_deleted: bool, file: LocalFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.put(f"{ROOT}/subnets/10.5.7.0-24", f'{{"PublicIP":"{SILENT}"}}', 3600)
    code = "import sys; from flanneld.ctl.main import main; main()"
    flag = f"-store={file.keystore.database.path}"
    master, slave = pty.openpty()
    os.write(master, f"{typed}\n".encode())
    command = [sys.executable, "-c", code, "lease", "delete", "10.5.7.0/24", flag]
    done = subprocess.run(command, stdin=slave, capture_output=True, text=True, timeout=60, check=False)
    os.close(slave)
    os.close(master)
    assert "[y/N]" in done.stderr
    assert (done.returncode == FINE) is is_deleted
    assert (Ctl(capsys, flag)("lease", "list")["leases"] == []) is is_deleted


def test_store_is_found_by_the_daemons_options_file(tmp_path: Path) -> None:
    file = tmp_path / "flanneld"
    file.write_text(
        f'# FLANNELD_STORE=/no\nFLANNELD_STORE="{tmp_path}/leases.db"\nPATH=/nowhere\nFLANNELD_V=1\n'
    )
    found = read_options([], {"FLANNELD_V": "2"}, (tmp_path / "none", file))
    assert (found.store, found.v) == (f"{tmp_path}/leases.db", 2)
    assert read_options(["-remote=192.0.2.1:8888"], {}, (file,)).store == ""


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
