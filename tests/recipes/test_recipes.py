"""Each recipe of docs/containers.md, command by command, on two nodes that start with nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address, ip_network

import pytest

from tests.lab import CommandError, Lab, wait_for
from tests.recipes.host import Host
from tests.recipes.page import PAGE, Step, recipes

pytestmark = pytest.mark.long

RECIPES = recipes(PAGE.read_text())
#: Values of the page that a reader replaces: the first host's address, and the other container's.
FIRST_ADDRESS, CONTAINER = "192.0.2.20", "10.5.34.2"
TOKEN = "etc/flannel/token"
#: Stands for the service of Debian's package. No systemd runs that would make control groups for it.
DOCKER_SERVICE = """
dockerd --exec-opt=native.cgroupdriver=cgroupfs >/var/log/docker.log 2>&1 &
until docker version >/dev/null 2>&1; do sleep 0.1; kill -0 $!; done
"""


class Fleet:
    """Two hosts and what a reader of the page carries from one to the other."""

    def __init__(self, first: Host, other: Host) -> None:
        self.first, self.other = self.hosts = first, other
        self.address = ""
        self._places = {"the first host": [first], "the other host": [other], "both hosts": [first, other]}

    def follow(self, *titles: str) -> None:
        """Run the commands of these sections. A ping is repeated: a peer's lease may just be on its way."""
        for step in (step for title in titles for step in RECIPES[title]):
            if CONTAINER in step.commands:
                wait_for(partial(self._succeeds, step), 20, f"success of {step.commands}")
            else:
                self._run(step)

    def _succeeds(self, step: Step) -> bool:
        try:
            self._run(step)
        except CommandError as failure:
            print(failure)
            return False
        return True

    def _run(self, step: Step) -> None:
        commands = step.commands.replace(FIRST_ADDRESS, self.first.node.address)
        for host in self._places[step.place]:
            said = host.shell(commands.replace(CONTAINER, self.address))
            if host is self.other:
                self.address = said.rpartition("\n")[2]
        if TOKEN in commands and self._places[step.place] == [self.first]:
            self.other.path(TOKEN).parent.mkdir()
            shutil.copy(self.first.path(TOKEN), self.other.path(TOKEN))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two hosts in one network, with an image."""
    with Lab(nodes=2, has_etcd=False) as lab, ExitStack() as hosts:
        fleet = Fleet(*(hosts.enter_context(Host(node)) for node in lab.nodes))
        try:
            fleet.follow("The network", "An image")
            yield fleet
        finally:
            for host in fleet.hosts:
                print(*(host.log(name) for name in ("flanneld", "docker", "box")), sep="\n")


def assert_crossed(fleet: Fleet) -> None:
    """Assert that the address that was pinged is in the other host's subnet."""
    subnets = [ip_network(host.node.env()["FLANNEL_SUBNET"], strict=False) for host in fleet.hosts]
    assert [ip_address(fleet.address) in subnet for subnet in subnets] == [False, True]


def test_recipe_for_docker_connects_containers(fleet: Fleet) -> None:
    for host in fleet.hosts:
        host.shell(DOCKER_SERVICE)
    fleet.follow("Docker")
    assert_crossed(fleet)


@pytest.mark.parametrize(
    "titles", [["Podman"], ["A bridge", "systemd-nspawn"], ["A bridge", "LXC"]], ids="-".join
)
def test_recipe_connects_containers(fleet: Fleet, titles: list[str]) -> None:
    fleet.follow(*titles)
    assert_crossed(fleet)
