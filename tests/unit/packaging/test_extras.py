"""The optional packages: the set-up and each package bring what a flag or a key of the config asks for."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from flanneld.errors import install_command
from tests.kubernetes_objects import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: For -kube-subnet-mgr, for EnableNFTables, and for hosts with iptables-legacy.
NEEDED = {"kubernetes", "nftables", "iptables-legacy"}


def installed_by(file: str) -> set[str]:
    """Return the extras that a script or recipe installs."""
    found = re.findall(r"\.\[([a-z,-]+)\]|extras='\[(all)\]'", (ROOT / file).read_text())
    assert found, file
    return {extra for words in found for word in words for extra in word.split(",") if extra}


def test_all_names_each_extra_but_aws() -> None:
    """botocore and kubernetes refuse each other's python-dateutil."""
    (requirement,) = EXTRAS["all"]
    assert Requirement(requirement).extras == set(EXTRAS) - {"all", "aws", "dev", "metrics"}


@pytest.mark.parametrize("file", ["dist/setup", "Dockerfile", "dist/snap/snapcraft.yaml", "dist/deb"])
def test_package_brings_what_flags_and_config_ask_for(file: str) -> None:
    extras = installed_by(file)
    if file == "dist/deb":
        recommended = (ROOT / "dist/debian/control").read_text().partition("Recommends:")[2].splitlines()[0]
        extras |= {name.strip().removeprefix("python3-") for name in recommended.split(",")}
    assert extras == {"all"} or extras >= NEEDED


@pytest.mark.parametrize("version", ["22.6.0", "37.0.2"])
def test_client_of_debian_12_and_of_the_image_will_do(version: str) -> None:
    (requirement,) = EXTRAS["kubernetes"]
    assert Requirement(requirement).specifier.contains(version)


def test_error_names_the_command_for_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("grpc", "python3-grpcio") == f"{sys.executable} -m pip install 'flanneld[grpc]'"
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert install_command("grpc", "python3-grpcio") == "apt-get install python3-grpcio"
    assert install_command("gce").endswith(" -m pip install 'flanneld[gce]'")
