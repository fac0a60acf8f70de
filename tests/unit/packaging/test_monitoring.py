"""Alerts, recording rules and dashboard: each alert fires for its fault, and none in a healthy cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from flanneld.diagnostics.metrics import METRICS
from flanneld.reconcile.counters import TOLD
from flanneld.subnet.remote.rest import NOT_FOUND, RestRequest
from flanneld.subnet.remote.server import LeaseServer

MONITORING = Path(__file__).parents[3] / "dist/monitoring"
RULES = yaml.safe_load((MONITORING / "flannel.rules.yaml").read_text())
RECORDED = [rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule]
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
#: Of Prometheus itself, and of the library.
GIVEN = {"up", "process_resident_memory_bytes"}
#: Labels that Prometheus adds.
ADDED = {"instance", "job", "le"}
#: Minutes of a case: a day and an hour, which is longer than any alert waits, and what is enough for most.
_DAY, _HOURS = 1500, 240
FIRST = 'job="flannel",instance="n1"'
SECOND = 'job="flannel",instance="n2"'

#: What two healthy nodes tell, each minute: series and values in promtool's notation.
HEALTHY: Mapping[str, str] = {
    **{
        series.replace("NODE", node): values
        for node in (FIRST, SECOND)
        for series, values in {
            "up{NODE}": "1x1500",
            'flannel_build_info{NODE,version="1.0",python="3.11.7"}': "1x1500",
            "flannel_ready{NODE}": "1x1500",
            'flannel_condition{NODE,part="store"}': "0x1500",
            'flannel_condition{NODE,part="kernel"}': "0x1500",
            # Renewed an hour before its end: here always a little later than that.
            "flannel_lease_ttl_seconds{NODE}": "86400-60x1379 86400-60x119",
            'flannel_lease_renewals_total{NODE,result="ok"}': "0x1379 1x119",
            'flannel_lease_renewals_total{NODE,result="error"}': "0 2x1499",
            'flannel_firewall_resyncs_total{NODE,backend="nft",cause="unknown"}': "0 2x1499",
            'flannel_peers{NODE,backend="vxlan",state="in-the-kernel"}': "1x1500",
            'flannel_drift_objects{NODE,kind="route"}': "0x1500",
            # Somebody has flushed the routes of 40 peers, once.
            'flannel_heals_total{NODE,kind="route",cause="notification"}': "0x60 40x1439",
            "flannel_last_sync_timestamp_seconds{NODE}": "0+60x1500",
            "flannel_removal_guard_held{NODE}": "0x60 1 0x1438",
            'flannel_mtu_bytes{NODE,dev="flannel.1"}': "1450x1500",
            "flannel_peer_probe_loss_ratio{NODE}": "0.01x1500",
            "flannel_datastore_up{NODE}": "1x10 0x2 1x1487",
            # A restart of the store, a stranger, and nodes that come and go.
            'flannel_server_requests_total{NODE,method="GET",status="200"}': "0+100x1500",
            'flannel_server_requests_total{NODE,method="GET",status="500"}': "0x60 9x1439",
            'flannel_server_requests_total{NODE,method="GET",status="401"}': "0x60 19x1439",
            "flannel_server_connections{NODE}": "300x600 200x899",
            'flannel_event_to_kernel_seconds_bucket{NODE,le="0.01"}': "0+60x1500",
            'flannel_event_to_kernel_seconds_bucket{NODE,le="+Inf"}': "0+60x1500",
        }.items()
    },
    f'flannel_subnet_info{{{FIRST},subnet="10.5.1.0/24"}}': "1x1500",
    f'flannel_subnet_info{{{SECOND},subnet="10.5.2.0/24"}}': "1x1500",
    f'flannel_public_ip_info{{{FIRST},ip="192.0.2.1"}}': "1x1500",
    f'flannel_public_ip_info{{{SECOND},ip="192.0.2.2"}}': "1x1500",
}

#: For each alert what its fault changes of that; None takes a series away.
FAULTS: Mapping[str, Mapping[str, str | None]] = {
    "FlannelDown": {f"up{{{FIRST}}}": "0x1500"},
    "FlannelNotReady": {f"flannel_ready{{{FIRST}}}": "0x1500"},
    "FlannelCondition": {f'flannel_condition{{{FIRST},part="store"}}': "1x1500"},
    "FlannelStoreUnreachable": {f"flannel_datastore_up{{{FIRST}}}": "0x1500"},
    "FlannelLeaseEndsSoon": {f"flannel_lease_ttl_seconds{{{FIRST}}}": "2900x1500"},
    "FlannelRenewalsFail": {f'flannel_lease_renewals_total{{{FIRST},result="error"}}': "0+1x1500"},
    "FlannelDrift": {f'flannel_drift_objects{{{FIRST},kind="route"}}': "3x1500"},
    "FlannelContested": {f'flannel_heals_total{{{FIRST},kind="route",cause="notification"}}': "0+20x1500"},
    "FlannelFirewallContested": {
        f'flannel_firewall_resyncs_total{{{FIRST},backend="nft",cause="unknown"}}': "0+6x1500"
    },
    "FlannelRemovalsHeld": {f"flannel_removal_guard_held{{{FIRST}}}": "1x1500"},
    "FlannelPeersUnreachable": {
        f'flannel_peers{{{FIRST},backend="vxlan",state="in-the-kernel"}}': None,
        f'flannel_peers{{{FIRST},backend="vxlan",state="unsafe"}}': "1x1500",
    },
    "FlannelPeersDiffer": {f'flannel_peers{{{FIRST},backend="vxlan",state="in-the-kernel"}}': "0x1500"},
    "FlannelSubnetTwice": {f'flannel_subnet_info{{{FIRST},subnet="10.5.2.0/24"}}': "1x1500"},
    "FlannelPublicIPTwice": {f'flannel_public_ip_info{{{FIRST},ip="192.0.2.2"}}': "1x1500"},
    "FlannelMTUDiffers": {f'flannel_mtu_bytes{{{FIRST},dev="flannel.1"}}': "8950x1500"},
    "FlannelProbesLost": {f"flannel_peer_probe_loss_ratio{{{FIRST}}}": "0.2x1500"},
    "FlannelSlow": {
        f'flannel_event_to_kernel_seconds_bucket{{{FIRST},le="0.01"}}': "0+50x1500",
        f'flannel_event_to_kernel_seconds_bucket{{{FIRST},le="10"}}': "0+60x1500",
    },
    "FlannelKernelNotRead": {f"flannel_last_sync_timestamp_seconds{{{FIRST}}}": "0x1500"},
    "FlannelServerFails": {f'flannel_server_requests_total{{{FIRST},method="GET",status="500"}}': "0+3x1500"},
    "FlannelServerRefuses": {
        f'flannel_server_requests_total{{{FIRST},method="GET",status="401"}}': "0+1x1500"
    },
    # Less than an hour before each time at which the cases look.
    "FlannelServerLosesNodes": {
        f"flannel_server_connections{{{node}}}": "300x200 100x1259 40x39" for node in (FIRST, SECOND)
    },
    "FlannelVersionsDiffer": {
        f'flannel_build_info{{{FIRST},version="1.0",python="3.11.7"}}': None,
        f'flannel_build_info{{{FIRST},version="0.9",python="3.11.7"}}': "1x1500",
    },
}


def case(name: str, series: Mapping[str, str | None], firing: Iterable[str], minutes: int) -> dict[str, Any]:
    """Return a case for promtool: which alerts there are after so many minutes."""
    held = [{"series": key, "values": values} for key, values in series.items() if values is not None]
    checks = [
        {
            "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
            "eval_time": f"{minutes}m",
            "exp_samples": [{"labels": "{}", "value": 1 if alert in firing else 0}],
        }
        for alert in ALERTS
    ]
    # Whatever fired in between counts as well.
    quiet = {
        "expr": 'count(count_over_time(ALERTS{alertstate="firing"}[1500m])) or vector(0)',
        "eval_time": f"{minutes}m",
        "exp_samples": [{"labels": "{}", "value": len(list(firing))}],
    }
    return {"name": name, "interval": "1m", "input_series": held, "promql_expr_test": [*checks, quiet]}


def test_repairs_in_the_cases_have_causes_that_are_counted() -> None:
    causes = set(re.findall(r'heals_total\{.*cause="(.*?)"', "\n".join(HEALTHY)))
    assert causes == {TOLD}


def test_each_alert_has_a_fault_that_it_is_tried_with() -> None:
    assert FAULTS.keys() == ALERTS.keys()


@pytest.mark.parametrize("usual", [_HOURS, pytest.param(_DAY, marks=pytest.mark.long)])
def test_each_alert_fires_for_its_fault_alone_and_none_in_a_healthy_cluster(
    usual: int, tmp_path: Path
) -> None:
    cases = [case("healthy", HEALTHY, (), _DAY)]
    for alert, changed in FAULTS.items():
        minutes = _DAY if ALERTS[alert].get("for") == "1d" else usual
        cases.append(case(alert, {**HEALTHY, **changed}, (alert,), minutes))
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(MONITORING / "flannel.rules.yaml")],
                "evaluation_interval": "5m",  # every minute takes a minute of CPU
                "tests": cases,
            }
        )
    )
    # Garbage is collected more rarely than usual: that saves a sixth of its CPU time.
    command, variables = ["promtool", "test", "rules", str(tests)], {**os.environ, "GOGC": "400"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:flannel[a-z_:0-9]*|up|process_[a-z_]+)\b(?![\"'.])", expression))


def labels_in(expression: str) -> dict[str, set[str]]:
    """Return the labels that an expression selects by, for each metric."""
    found: dict[str, set[str]] = {}
    for name, selected in re.findall(r"([a-z_:0-9]+)\{([^}]*)\}", expression):
        found.setdefault(name, set()).update(re.findall(r"([a-z_]+)\s*[=!]~?", selected))
    return found


def of_server() -> dict[str, set[str]]:
    """Return the labels of each series of a server of leases, from its page."""
    with socket.socket() as listener:
        server = LeaseServer(listener, None)  # type: ignore[arg-type]
        server.sent(RestRequest("GET", "/"), NOT_FOUND)
        page = server.metrics_text()
    lines = re.findall(r"^(flannel_\w+)(?:\{(.*)\})? ", page, re.MULTILINE)
    return {name: set(re.findall(r"(\w+)=", labels)) for name, labels in lines}


def known() -> dict[str, set[str]]:
    """Return the labels of each series that there is."""
    found = {name: set[str]() for name in (*GIVEN, *RECORDED)} | of_server()
    for metric in METRICS:
        endings = ("_bucket", "_count", "_sum") if metric.type == "histogram" else ("",)
        found |= {metric.name + ending: set(metric.labels) for ending in endings}
    return found


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return content


EXPRESSIONS = [
    *(rule["expr"] for group in RULES["groups"] for rule in group["rules"]),
    *(target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_uses_only_series_and_labels_that_there_are(expression: str) -> None:
    series = known()
    assert names_in(expression) - series.keys() == set()
    assert names_in(expression)
    for name, labels in labels_in(expression).items():
        assert labels - series[name] - ADDED == set(), name


def test_panels_of_the_dashboard_have_numbers_titles_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    for what in ("id", "title"):
        assert len({each[what] for each in panels}) == len(panels)
    places = [each["gridPos"] for each in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_pod_monitor_selects_the_pods_of_the_manifest_and_their_port() -> None:
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())
    manifest = (MONITORING.parent / "kubernetes/kube-flannel.yml").read_text()
    (daemon_set,) = (each for each in yaml.safe_load_all(manifest) if each["kind"] == "DaemonSet")
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "flannel"
    assert monitor["metadata"]["namespace"] == daemon_set["metadata"]["namespace"]
    ports = {
        port["name"]
        for container in daemon_set["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", ())
    }
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports
