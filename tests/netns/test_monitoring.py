"""Alerts on what real daemons tell: two pages of /metrics each, a minute apart for promtool."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab, Node, wait_for
from tests.netns.test_seeing import HEALTH_PORT, PATIENCE, lease, metrics, settled

RULES = Path(__file__).parents[2] / "dist/monitoring/flannel.rules.yaml"
SERVED = f"--healthz-port={HEALTH_PORT}"
#: Longer than any of these alerts waits.
_MINUTES = 45
_COUNTERS = ("_total", "_bucket", "_count", "_sum")


def series(node: Node, before: dict[str, float], after: dict[str, float]) -> Iterator[dict[str, str]]:
    """Yield each series as if it went on as it did between the two pages."""
    for name, value in after.items():
        metric, _, labels = name.rstrip("}").partition("{")
        step = max(0.0, value - before.get(name, value)) if metric.endswith(_COUNTERS) else 0
        more = f"{labels}," if labels else ""
        yield {
            "series": f'{metric}{{{more}job="flannel",instance="{node.name}"}}',
            "values": f"{value:f}+{step:f}x{_MINUTES}",
        }


def promtool(directory: Path, told: list[dict[str, str]], firing: set[str]) -> None:
    """Fail unless exactly these alerts fire."""
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": told,
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{_MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in firing],
            }
        ],
    }
    tests = directory / "tests.yaml"
    tests.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]})
    )
    command = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def nothing(_lab: Lab, _node: Node, _peer: Node) -> None:
    pass


def stop_store(lab: Lab, node: Node, _peer: Node) -> None:
    lab.etcd.stop()
    wait_for(lambda: metrics(node)["flannel_datastore_up"] == 0, PATIENCE, "the outage to be told")


def contest(_lab: Lab, node: Node, peer: Node) -> None:
    for _ in range(8):
        node.namespace.ip(f"route del {peer.subnet()}")
        node.wait_for_route(peer.subnet())


def claim_twice(lab: Lab, node: Node, _peer: Node) -> None:
    for number in (201, 202):
        lab.etcd.put_lease(f"10.5.{number}.0/24", lease(f"198.18.0.{number}"))
    contested = 'flannel_peers{backend="vxlan",state="contested"}'
    wait_for(lambda: metrics(node).get(contested), PATIENCE, "a contested peer")


def remove_config(lab: Lab, node: Node, _peer: Node) -> None:
    node.stop()
    node.subnet_file.unlink()
    lab.etcd.delete("config")
    node.start(SERVED)
    node.wait_for_log("Couldn't fetch network config")


@pytest.mark.parametrize(
    ("harm", "firing"),
    [
        (nothing, set()),
        (stop_store, {"FlannelStoreUnreachable", "FlannelCondition"}),
        (contest, {"FlannelContested", "FlannelCondition"}),
        (claim_twice, {"FlannelPeersUnreachable"}),
        (remove_config, {"FlannelNotReady", "FlannelCondition"}),
    ],
)
def test_alerts_fire_for_real_faults_alone(
    harm: Callable[[Lab, Node, Node], None], firing: set[str], lab: Lab, tmp_path: Path
) -> None:
    node, peer = settled(lab, SERVED)
    before = metrics(node)
    harm(lab, node, peer)
    promtool(tmp_path, list(series(node, before, metrics(node))), firing)
