"""The firewall task on kernels that lack x_tables, a match or nf_tables: each boots a machine of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import ROOT
from tests.netns.firewall_host import Host, host
from tests.netns.test_firewall_task import everything, native, remove_everything

SELF = "tests.netns.test_firewall_kernels"


def on_kernel(without: str) -> dict[str, Any]:
    """Return what the task has set and logged in a machine whose kernel lacks a feature."""
    machine = ("tests.vm.machine", "--limit", "300", "--without", without)
    command = (sys.executable, "-m", *machine, sys.executable, "-m", SELF)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("without", ["x_tables", "xt_comment"])
def test_rules_go_to_nftables_where_the_kernel_refuses_those_of_iptables(without: str) -> None:
    seen = on_kernel(without)
    assert seen["native"] == native()
    assert seen["others"] == []
    (told,) = (line for line in seen["log"] if "missing kernel module" in line)
    assert told.startswith("The kernel refuses iptables' rules: ")
    assert "Setting up masking rules with nftables (the kernel refuses iptables' rules)" in seen["log"]
    assert seen["warnings"] == []
    assert seen["again"] == []  # what a second start wrote


def test_rules_go_to_the_legacy_tables_where_the_kernel_has_no_nf_tables() -> None:
    seen = on_kernel("nf_tables")
    assert seen["legacy"] == everything()
    assert any(line.endswith("ip6tables-legacy (the kernel has no nf_tables)") for line in seen["log"])


def test_rules_are_in_iptables_again_on_a_kernel_that_takes_them(tmp_path: Path) -> None:
    with host(tmp_path) as machine:
        machine.set_once(native=True)
        assert machine.state("nftables") == native()
        machine.set_once()
        assert machine.state("nft") == everything()
        assert machine.state("nftables") == []


@pytest.mark.parametrize("style", ["own-chains", "v0.12"])
def test_trial_of_the_rules_leaves_no_trace_and_is_made_once(tmp_path: Path, style: str) -> None:
    with host(tmp_path) as machine:
        environment, notes = machine.spies()
        machine.keep(environment=environment, style=style).stop()
        assert "FLANNEL-TRIAL" not in machine.sh("iptables-nft-save; ip6tables-nft-save")
        tried = notes.read_text().count("-restore")
        notes.write_text("")
        machine.keep(environment=environment, style=style).stop()
        assert tried == 4
        assert "-restore" not in notes.read_text()


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_chain_of_a_trial_that_was_killed_goes_with_the_next_start_and_with_cleanup(
    tmp_path: Path, flavour: str
) -> None:
    with host(tmp_path) as machine:
        words = ("-N FLANNEL-TRIAL", "-A FLANNEL-TRIAL -j RETURN")
        left = "; ".join(f"iptables-{flavour} -t nat {each}" for each in words)
        for wishes in ({"flavour": "nft"}, {"flavour": "legacy"}, {"native": True}):
            machine.sh(left)
            machine.set_once(**wishes)
            assert "FLANNEL-TRIAL" not in machine.chains(flavour)
        machine.sh(left)
        remove_everything(machine, dry_run=False)
        assert machine.chains(flavour) == []


@pytest.mark.parametrize(("refusals", "place"), [(1, "nft"), (2, "nftables")])
def test_only_another_refusal_leads_to_nftables(tmp_path: Path, refusals: int, place: str) -> None:
    with host(tmp_path) as machine:
        environment, notes = machine.spies()
        path = machine.directory / "bin/iptables-nft-restore"
        real = path.read_text().removeprefix("#!/bin/bash\n")
        refusal = (
            f"[ $(wc -l <{notes}) -ge {refusals} ] || {{ echo x >>{notes}; echo No chain >&2; exit 1; }}"
        )
        path.write_text(f"#!/bin/bash\n{refusal}\n{real}")
        machine.keep(environment=environment).stop()
        assert machine.state(place) == (everything() if place == "nft" else native())


def _look(machine: Host) -> dict[str, Any]:
    keeper = machine.keep(without_python_iptables=True)
    keeper.stop()
    again = machine.keep(without_python_iptables=True)
    again.stop()
    tables = machine.sh("nft list tables || true").splitlines()
    return {
        "native": machine.state("nftables"),
        "legacy": machine.state("legacy") if Path("/proc/net/ip_tables_names").exists() else [],
        "others": [table for table in tables if "flannel" not in table],
        "log": keeper.lines("I"),
        "warnings": keeper.lines("WEF"),
        "again": [line for line in again.lines("IWEF") if line.startswith(("Made", "Removed", "Restored"))],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, host(Path(name)) as made:
        print(json.dumps(_look(made)))
