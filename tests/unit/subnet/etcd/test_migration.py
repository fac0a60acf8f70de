"""What ``-migrate-etcd-v2-to-v3`` copies, what it leaves alone and what it says, on a real etcd."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from flanneld.errors import Retryable
from flanneld.main import run
from flanneld.subnet.copy import Migration, migrate
from flanneld.subnet.etcd.keys import KeyReply
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport
from flanneld.subnet.etcd.v2 import V2Client as OldClient
from flanneld.subnet.etcd.v3 import V3Client as NewClient
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import LocalEtcd, make_certificates, running_etcd

CONFIG = '{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}'
_numbers = itertools.count()


def value(number: int, mac: str = "02:00:00:00:00:01", *, names_ipv6: bool = False) -> str:
    attrs = {"PublicIP": f"192.0.2.{number}", "PublicIPv6": None, "BackendType": "vxlan"}
    if not names_ipv6:
        del attrs["PublicIPv6"]
    return json.dumps(attrs | {"BackendData": {"VtepMAC": mac}}, separators=(",", ":"))


class Cluster:
    """A network in v2, and the keys of v3 under the same prefix."""

    def __init__(self, etcd: LocalEtcd) -> None:
        self.etcd = etcd
        self.prefix = f"/moved-{next(_numbers)}"
        self.v3 = V3Keys(etcd.post)
        etcd.put(f"{self.prefix}/config", CONFIG)

    def path(self, third: int) -> str:
        return f"{self.prefix}/subnets/10.5.{third}.0-24"

    def migrate(self, *, dry_run: bool = False) -> tuple[bool, list[str]]:
        """Whether all is copied, and what was said, without the prefix."""
        said: list[str] = []
        done = migrate(EtcdOptions((self.etcd.url,), self.prefix), said.append, dry_run=dry_run)
        return done, [line.replace(f"{self.prefix}/", "") for line in said]

    def in_v3(self) -> dict[str, str]:
        return {node["key"]: node["value"] for node in self.v3.children(self.prefix)}

    def ttl(self, third: int) -> int | None:
        node = self.v3.get(self.path(third))
        assert node
        ttl: int | None = node.get("ttl")
        return ttl


@pytest.fixture
def cluster(etcd: LocalEtcd) -> Cluster:
    return Cluster(etcd)


def test_config_leases_and_reservations_are_copied_with_what_is_left_of_their_ttl(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    cluster.etcd.put(cluster.path(2), value(2))
    done, lines = cluster.migrate()
    assert done
    copied, reserved, config = lines
    assert copied.startswith("copied subnets/10.5.1.0-24, ")
    assert reserved == "copied subnets/10.5.2.0-24, a reservation"
    assert config == "copied config"
    assert cluster.in_v3() == {
        f"{cluster.prefix}/config": CONFIG,
        cluster.path(1): value(1, names_ipv6=True),
        cluster.path(2): value(2, names_ipv6=True),
    }
    assert 4900 < (cluster.ttl(1) or 0) <= 5000
    assert cluster.ttl(2) is None


def test_a_dry_run_says_the_same_and_writes_nothing(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1))
    done, announced = cluster.migrate(dry_run=True)
    assert done
    assert cluster.in_v3() == {}
    assert [line.replace("would copy", "copied") for line in announced] == cluster.migrate()[1]


def test_run_again_it_copies_only_what_is_new(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    cluster.migrate()
    before = cluster.v3.get(cluster.path(1))
    cluster.etcd.put(cluster.path(2), value(2))
    assert cluster.migrate() == (
        True,
        ["kept subnets/10.5.1.0-24", "copied subnets/10.5.2.0-24, a reservation", "kept config"],
    )
    assert (cluster.v3.get(cluster.path(1)) or {})["modifiedIndex"] == (before or {})["modifiedIndex"]


def test_migration_prolongs_leases_renewed_or_reserved_since(cluster: Cluster) -> None:
    for third in (1, 2):
        cluster.etcd.put(cluster.path(third), value(third), ttl=1000)
    cluster.migrate()
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    cluster.etcd.put(cluster.path(2), value(2))
    first, second, _ = cluster.migrate()[1]
    assert first.startswith("prolonged subnets/10.5.1.0-24")
    assert second == "prolonged subnets/10.5.2.0-24, a reservation"
    assert (cluster.ttl(1) or 0) > 4800
    assert cluster.ttl(2) is None


def test_a_reservation_in_v3_stays_one(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    cluster.v3.put(cluster.path(1), value(1, names_ipv6=True))
    assert cluster.migrate()[1][0] == "kept subnets/10.5.1.0-24"
    assert cluster.ttl(1) is None


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (value(9), "v3 has another lease there, of 192.0.2.9"),
        (value(1, "02:00:00:00:00:99"), "v3 has another lease there, of the same node, with other data"),
        ("{", "in v3 there is something else"),
    ],
)
def test_migration_keeps_different_keys_in_v3(cluster: Cluster, there: str, why: str) -> None:
    cluster.etcd.put(cluster.path(1), value(1))
    cluster.etcd.put(cluster.path(2), value(2))
    cluster.v3.put(cluster.path(1), there)
    done, (first, second, config) = cluster.migrate()
    assert not done
    assert first.startswith(f"could not copy subnets/10.5.1.0-24: {why}")
    assert second.startswith("copied")
    assert config.startswith("could not copy config: it comes last")
    assert cluster.in_v3() == {cluster.path(1): there, cluster.path(2): value(2, names_ipv6=True)}


def test_a_lease_that_overlaps_one_of_v3_is_not_copied(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1))
    cluster.v3.put(f"{cluster.prefix}/subnets/10.5.0.0-22", value(9))
    done, lines = cluster.migrate()
    assert not done
    assert lines[0] == "could not copy subnets/10.5.1.0-24: it overlaps 10.5.0.0/22, which is in v3"


def test_a_lease_without_sense_is_not_copied_and_shows_in_the_status(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), "nonsense")
    done, lines = cluster.migrate()
    assert not done
    assert lines[0].startswith("could not copy subnets/10.5.1.0-24")


@pytest.mark.parametrize(
    ("there", "done", "line"),
    [
        (CONFIG.replace(" ", ""), True, "kept config"),
        (CONFIG.replace("10.5", "10.6"), False, "could not copy config: v3 has another config there"),
        ("{", False, "could not copy config: v3 has another config there"),
    ],
)
def test_a_config_in_v3_has_to_say_the_same(cluster: Cluster, there: str, done: bool, line: str) -> None:
    cluster.v3.put(f"{cluster.prefix}/config", there)
    assert cluster.migrate() == (done, [line])
    assert cluster.in_v3() == {f"{cluster.prefix}/config": there}


def test_without_a_config_in_v2_nothing_is_done(cluster: Cluster) -> None:
    cluster.etcd.delete(cluster.prefix)
    with pytest.raises(Retryable, match=f"no network config at {cluster.prefix}/config in v2"):
        cluster.migrate()


def transport(cluster: Cluster) -> Transport:
    return Transport(Servers(EtcdOptions((cluster.etcd.url,), cluster.prefix)), EtcdTimeouts())


class Rushed(NewClient):
    """A client that others are quicker than, once."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(transport(cluster))
        self._cluster = cluster
        self._is_due = True

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        if self._is_due:
            self._is_due = False
            self._cluster.v3.put(key, value, ttl)
        return super().create(key, value, ttl)


def test_a_daemon_that_writes_its_lease_meanwhile_is_no_error(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    said: list[str] = []
    new = Rushed(cluster)
    assert Migration(OldClient(transport(cluster)), new, cluster.prefix, said.append, dry_run=False).run()
    assert said[0] == f"kept {cluster.path(1)}"


class Unanswered(NewClient):
    """A client whose reads of single keys are not answered."""

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        if recursive:
            return super().fetch(key, recursive=True)
        raise Retryable(f"no answer about {key}", "see that etcd runs")


def test_key_that_could_not_be_read_is_not_taken_for_missing(cluster: Cluster) -> None:
    cluster.etcd.put(cluster.path(1), value(1), ttl=5000)
    said: list[str] = []
    new = Unanswered(transport(cluster))
    migration = Migration(OldClient(transport(cluster)), new, cluster.prefix, said.append, dry_run=False)
    with pytest.raises(Retryable, match=f"no answer about {cluster.path(1)}"):
        migration.run()
    assert said == []
    assert cluster.in_v3() == {}


def test_as_a_command_it_lists_its_work_and_ends(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"-etcd-endpoints={cluster.etcd.url}",
        f"-etcd-prefix={cluster.prefix}",
        "-migrate-etcd-v2-to-v3",
    ]
    assert run(words, {}) == 0
    assert capsys.readouterr().out == f"copied {cluster.prefix}/config\n"
    cluster.v3.put(f"{cluster.prefix}/config", "{}")
    assert run(words, {}) == 1
    assert run([*words, "-etcd-endpoints=http://127.0.0.1:1"], {}) == 1
    assert "etcd does not answer" in capsys.readouterr().err


def test_it_goes_over_tls_and_logs_in_and_says_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path)
    with running_etcd("--bcrypt-cost=4", tls=tmp_path) as etcd:
        cluster = Cluster(etcd)
        cluster.etcd.put(cluster.path(1), value(1))
        words = [
            f"-etcd-endpoints={etcd.url}",
            f"-etcd-prefix={cluster.prefix}",
            f"-etcd-cafile={tmp_path / 'ca.crt'}",
            f"-etcd-certfile={tmp_path / 'client.crt'}",
            f"-etcd-keyfile={tmp_path / 'client.key'}",
            "-migrate-etcd-v2-to-v3",
        ]
        assert run(words, {}) == 0
        assert len(cluster.in_v3()) == 2
    with running_etcd("--bcrypt-cost=4") as etcd:
        cluster = Cluster(etcd)
        cluster.v3.require_login("flannel", "s3cret", cluster.prefix, writable="")
        words = [
            f"-etcd-endpoints={etcd.url}",
            f"-etcd-prefix={cluster.prefix}",
            "-etcd-username=flannel",
            "-migrate-etcd-v2-to-v3",
        ]
        assert run([*words, "-etcd-password=s3cret"], {}) == 0
        assert run([*words, "-etcd-password=wr0ng"], {}) == 1
        output = capsys.readouterr()
        assert "s3cret" not in output.out + output.err
        assert "wr0ng" not in output.out + output.err
