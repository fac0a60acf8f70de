"""The measuring itself works; how fast anything is, no test says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.bench import page, pods
from tests.bench.__main__ import main
from tests.bench.bed import make_bed
from tests.bench.cluster import Peer
from tests.bench.figures import Figure, Goal, Samples, Subject, percentile
from tests.bench.report import Results
from tests.lab.forks import FORKS, ROOT, can_fork


@pytest.mark.long
def test_a_run_in_miniature_yields_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLANNELD_PEER", raising=False)
    file = tmp_path / "figures.json"
    sizes = ["--peers=50", "--rounds=1", "--events=5", "--idle-seconds=1", "--flow-seconds=1"]
    assert main(["--backend=vxlan", f"--json={file}", *sizes]) == 0
    rows = json.loads(file.read_text())["figures"]
    assert {row["figure"] for row in rows} == {figure.value for figure in Figure} - {Figure.DRAIN}
    assert all(len(row["ours"]) == 1 and row["peer"] == [] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("store", "name", "arguments", "figures"),
    [
        (
            "kube",
            "vxlan in Kubernetes",
            ("--idle-seconds=1", "--burst=20"),
            {Figure.READY, Figure.BULK, Figure.PEAK, Figure.IDLE, Figure.BURST_CPU, Figure.LOST},
        ),
        (
            "etcd3",
            "vxlan on etcd v3",
            ("--events=5", "--only=bulk,latency,rss,among,restart,drain"),
            {
                *(Figure.BULK, Figure.ADD, Figure.REMOVE_P99, Figure.PEAK),
                *(Figure.RESTART, Figure.LOST, Figure.DRAIN),
            },
        ),
        ("dual", "vxlan, both families", ("--events=5", "--only=bulk,among"), {Figure.BULK, Figure.ADD}),
        (
            "server",
            "vxlan through a server",
            ("--events=5", "--only=bulk,latency,rss"),
            {Figure.BULK, Figure.ADD, Figure.REMOVE_P99, Figure.PEAK},
        ),
    ],
    ids=["kube", "etcd3", "dual", "server"],
)
def test_a_run_with_another_store_yields_its_figures(
    store: str,
    name: str,
    arguments: tuple[str, ...],
    figures: set[Figure],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLANNELD_PEER", raising=False)
    file = tmp_path / "figures.json"
    sizes = ["--peers=50", "--rounds=1", *arguments]
    assert main([f"--store={store}", "--backend=vxlan", f"--json={file}", *sizes]) == 0
    rows = json.loads(file.read_text())["figures"]
    assert {row["backend"] for row in rows} == {name}
    assert figures <= {row["figure"] for row in rows}


@pytest.mark.long
@pytest.mark.needs_kernel("wireguard")
def test_a_run_with_wireguard_yields_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLANNELD_PEER", raising=False)
    file = tmp_path / "figures.json"
    sizes = ["--peers=50", "--rounds=1", "--flow-seconds=1", "--only=bulk,rss,latency,flow"]
    assert main(["--backend=wireguard", f"--json={file}", *sizes]) == 0
    rows = json.loads(file.read_text())["figures"]
    assert {row["backend"] for row in rows} == {"wireguard", "wireguard, peer by hand"}
    assert Figure.BULK in {row["figure"] for row in rows}
    assert all(row["peer"] for row in rows if row["backend"] != "wireguard")


def test_daemon_is_started_as_an_operator_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORKS, "1")
    command = [str(ROOT / ".venv/bin/flanneld")]
    assert can_fork(command, os.environ)
    with make_bed("vxlan", 1):
        assert not can_fork(command, os.environ)


@pytest.mark.long
def test_pods_of_both_ways_yield_a_table() -> None:
    columns, *rows = page.cells(pods.table(pods.measure(1), "a test"))
    assert columns == ["", *pods.WAYS, "Ratio"]
    assert all(float(each) > 0 for _, *figures in rows for each in figures)


@pytest.mark.long
def test_a_daemon_that_fails_makes_the_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLANNELD_COMMAND", "/bin/false")
    assert main(["--backend=vxlan", "--only=start", "--rounds=1"]) == 1
    assert "BROKEN: the daemon ended with 1" in capsys.readouterr().err


@pytest.mark.parametrize(("ours", "verdict"), [(1.3, "met"), (1.31, "missed")])
def test_a_ratio_at_its_limit_meets_the_goal(ours: float, verdict: str) -> None:
    assert Goal(1.3).verdict(Samples([ours], [1.0])) == verdict


@pytest.mark.parametrize(("ours", "verdict"), [(10, "met"), (9.9, "missed")])
def test_a_goal_can_be_to_reach_at_least_so_much(ours: float, verdict: str) -> None:
    assert Goal(10, at_least=True).verdict(Samples([ours], [1.0])) == verdict


def test_an_absolute_goal_needs_no_peer() -> None:
    assert Goal(36, absolute=True).verdict(Samples([35, 37, 36], [])) == "met"


def test_a_ratio_without_a_peer_is_neither_met_nor_missed() -> None:
    assert Goal(0.7).verdict(Samples([1.0], [])) == ""


def test_the_ratio_is_that_of_the_medians() -> None:
    assert Samples([1, 2, 90], [4, 4, 70]).ratio() == 0.5


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (76, 4), (99, 4), (0, 1)])
def test_a_percentile_is_one_of_the_values(percent: int, value: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == value


def test_a_row_shows_medians_spread_ratio_and_verdict() -> None:
    results = Results({Subject("vxlan", 5000, Figure.BULK): Samples([0.5, 0.4, 0.6], [1.0, 1.0, 1.0])})
    row = results.table().splitlines()[1]
    assert row.split() == [
        *("exec", "to", "all", "routes,", "s", "0.500", "(0.400..0.600)", "1.00", "(1.00..1.00)"),
        *("0.500", "ratio", "<=", "0.35", "missed"),
    ]


def test_a_lease_is_written_as_the_go_daemon_writes_it() -> None:
    data = '"BackendData":{"VtepMAC":"02:be:00:00:01:02"}'
    assert Peer(258).value("vxlan") == f'{{"PublicIP":"198.18.17.2","BackendType":"vxlan",{data}}}'
    key = "AgrxVl9fvQ7QAB5jvchkHMAJrNYLJwyG7dvc+v6nt/A="
    assert (
        Peer(0)
        .value("wireguard")
        .endswith(f'"BackendType":"wireguard","BackendData":{{"PublicKey":"{key}"}}}}')
    )
    assert Peer(0).value("host-gw") == '{"PublicIP":"198.18.16.0","BackendType":"host-gw"}'


def test_run_changes_the_rows_of_the_page_that_it_has_a_ratio_for() -> None:
    rows: list[page.Row] = [
        {
            "what": "a",
            "subject": ["vxlan", Figure.BULK.value],
            "peers": 5000,
            "ours": 1,
            "theirs": 2,
            "unit": "s",
        },
        {"what": "b", "subject": ["vxlan", Figure.BULK.value], "peers": 15000},
        {"what": "c", "peers": 5000},
    ]
    tables: list[page.Table] = [
        {"peer": peer, "rows": [row | {"ratio": 0.5} for row in rows]} for peer in ("Go 1", "Go 2")
    ]
    tables.append({"columns": ["What"], "rows": [["d"]]})
    samples = {
        Subject("vxlan", 5000, Figure.BULK): Samples([0.4, 0.31, 0.2], [6.0, 5.123, 4.0]),
        Subject("vxlan", 15000, Figure.BULK): Samples([1.0], []),
        Subject("host-gw", 5000, Figure.BULK): Samples([1.0], [1.0]),
    }
    found = page.merged(tables, samples, "Go 2", "this run")
    changed = {**tables[1]["rows"][0], "ours": 0.31, "theirs": 5.12, "ratio": 0.061, "from": "this run"}
    assert found == [tables[0], {**tables[1], "rows": [changed, *tables[1]["rows"][1:]]}, tables[2]]
    assert page.cells(found[1])[1] == ["a: 0.31 s and 5.12 s", "5,000", "0.061", "", ""]
    assert json.loads(page.written(found))["tables"] == found
