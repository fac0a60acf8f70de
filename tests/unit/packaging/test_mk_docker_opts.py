"""dist/mk-docker-opts.sh, in every shell that may be a distribution's /bin/sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "dist/mk-docker-opts.sh"
# Debian has dash as /bin/sh, Fedora has bash, which then obeys POSIX.
SHELLS = [pytest.param(("dash",), id="dash"), pytest.param(("bash", "--posix"), id="bash")]

SUBNET_ENV = """\
FLANNEL_NETWORK=10.1.0.0/16
FLANNEL_SUBNET=10.1.74.1/24
FLANNEL_MTU=1472
FLANNEL_IPMASQ=false
"""
EACH = """\
DOCKER_OPT_BIP="--bip=10.1.74.1/24"
DOCKER_OPT_IPMASQ="--ip-masq=true"
DOCKER_OPT_MTU="--mtu=1472"
"""
ALL = '" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472"\n'


class Script:
    """The script in one shell, with its two files in one directory."""

    def __init__(self, shell: tuple[str, ...], directory: Path) -> None:
        self.shell = shell
        self.directory = directory
        self.subnet_file = directory / "subnet.env"
        self.docker_file = directory / "docker.env"
        self.subnet_file.write_text(SUBNET_ENV)

    def run(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.shell, str(SCRIPT), *options],
            env={"PATH": os.environ["PATH"]} | variables,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def output(self, *options: str, **variables: str) -> str:
        """What it writes; it must succeed, and in silence."""
        done = self.run("-f", str(self.subnet_file), "-d", str(self.docker_file), *options, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return self.docker_file.read_text()

    def refusal(self, *options: str, **variables: str) -> str:
        """What it says when it fails."""
        done = self.run("-f", str(self.subnet_file), "-d", str(self.docker_file), *options, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr


@pytest.fixture(params=SHELLS)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Script:
    return Script(request.param, tmp_path)


def test_without_options_both_kinds_of_variables_are_written(script: Script) -> None:
    assert script.output() == f"{EACH}DOCKER_OPTS={ALL}"


def test_i_writes_a_variable_for_each_option(script: Script) -> None:
    assert script.output("-i") == EACH


def test_c_writes_one_variable_with_all_options(script: Script) -> None:
    assert script.output("-c") == f"DOCKER_OPTS={ALL}"


def test_i_and_c_together_write_both(script: Script) -> None:
    assert script.output("-i", "-c") == script.output()


def test_k_names_the_variable_with_all_options(script: Script) -> None:
    assert script.output("-k", "CUSTOM_KEY") == f"{EACH}CUSTOM_KEY={ALL}"


def test_m_leaves_out_ip_masq(script: Script) -> None:
    assert script.output("-m") == (
        'DOCKER_OPT_BIP="--bip=10.1.74.1/24"\n'
        'DOCKER_OPT_MTU="--mtu=1472"\n'
        'DOCKER_OPTS=" --bip=10.1.74.1/24 --mtu=1472"\n'
    )


def test_docker_does_not_masquerade_where_flannel_does(script: Script) -> None:
    script.subnet_file.write_text("FLANNEL_IPMASQ=true\n")
    assert script.output() == 'DOCKER_OPT_IPMASQ="--ip-masq=false"\nDOCKER_OPTS=" --ip-masq=false"\n'


def test_no_subnet_file_means_no_options(script: Script) -> None:
    script.subnet_file.unlink()
    assert script.output() == 'DOCKER_OPTS=""\n'


def test_what_an_earlier_run_wrote_is_replaced(script: Script) -> None:
    assert script.output() == script.output()


def test_the_environment_may_begin_the_combined_variable(script: Script) -> None:
    assert script.output("-c", DOCKER_OPTS="--debug") == (
        'DOCKER_OPTS="--debug  --bip=10.1.74.1/24 --ip-masq=true --mtu=1472"\n'
    )


def test_the_environment_may_add_options(script: Script) -> None:
    script.subnet_file.write_text("FLANNEL_MTU=1472\n")
    assert script.output(DOCKER_OPT_LEVEL="--log-level debug", DOCKER_HOST="unix:///x") == (
        'DOCKER_OPT_LEVEL="--log-level debug"\n'
        'DOCKER_OPT_MTU="--mtu=1472"\n'
        'DOCKER_OPTS=" --log-level debug --mtu=1472"\n'
    )


def test_files_are_taken_from_the_working_directory_too(script: Script) -> None:
    assert script.run("-f", "subnet.env", "-d", "docker.env").returncode == 0
    assert script.docker_file.read_text() == f"{EACH}DOCKER_OPTS={ALL}"


def test_paths_may_have_spaces(script: Script) -> None:
    script.subnet_file = script.subnet_file.rename(script.directory / "a subnet.env")
    script.docker_file = script.directory / "docker options"
    assert script.output("-i") == EACH


def test_an_ip_masq_that_is_neither_true_nor_false_is_refused(script: Script) -> None:
    script.docker_file.write_text("as it was\n")
    script.subnet_file.write_text("FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_IPMASQ=maybe\n")
    assert "FLANNEL_IPMASQ" in (said := script.refusal())
    assert "maybe" in said
    assert script.docker_file.read_text() == "as it was\n"


@pytest.mark.parametrize("option", ["-x", "-?", "-h", "-f"])
def test_an_option_that_is_unknown_or_lacks_its_value_prints_the_usage(script: Script, option: str) -> None:
    done = script.run("-d", str(script.docker_file), option)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Usage: " in done.stderr
    assert "SUBNET-FILE" in done.stderr
    assert not script.docker_file.exists()


@pytest.mark.parametrize("name", ["", "1ST", "A-B", "X;touch evil", "$(touch evil)"])
def test_a_name_that_no_variable_can_have_is_refused(script: Script, name: str) -> None:
    assert "-k" in script.refusal("-k", name)
    assert not (script.directory / "evil").exists()


def stub_ip(directory: Path, answer: str) -> str:
    """Return a PATH with an ``ip`` that knows these routes to our subnet alone."""
    file = directory / "bin/ip"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\n[ \"$*\" = '-4 route show exact 10.1.74.0/24' ] && {answer}\n")
    file.chmod(0o755)
    return f"{file.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("route", ["", "10.1.74.0/24 dev docker0 proto kernel scope link src 10.1.74.1"])
def test_check_for_routes_passes_where_none_leads_through_a_gateway(script: Script, route: str) -> None:
    path = stub_ip(script.directory, f"echo '{route}'")
    assert script.output("-r", "-i", PATH=path) == EACH


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo '10.1.74.0/24 via 192.0.2.9 dev eth0'", "remove it: ip route del 10.1.74.0/24"),
        ("exit 2", "cannot read the routes"),
    ],
)
def test_check_for_routes_refuses_one_through_a_gateway(script: Script, answer: str, said: str) -> None:
    assert said in script.refusal("-r", PATH=stub_ip(script.directory, answer))
    assert not script.docker_file.exists()


def test_route_through_a_gateway_is_not_looked_for_unasked(script: Script) -> None:
    path = stub_ip(script.directory, "echo '10.1.74.0/24 via 192.0.2.9 dev eth0'")
    assert script.output("-i", PATH=path) == EACH


def test_a_file_that_cannot_be_written_is_a_failure(script: Script) -> None:
    script.docker_file.mkdir()
    assert str(script.docker_file) in script.refusal()


def test_the_variables_can_be_read_back_by_a_shell(script: Script) -> None:
    script.output("-k", "DOCKER_NETWORK_OPTIONS")
    line = f'. {script.docker_file}; printf "<%s>" $DOCKER_NETWORK_OPTIONS "$DOCKER_OPT_BIP"'
    done = subprocess.run(
        [*script.shell, "-c", line], capture_output=True, text=True, check=True, env={}, timeout=60
    )
    assert done.stdout == ("<--bip=10.1.74.1/24><--ip-masq=true><--mtu=1472><--bip=10.1.74.1/24>")
