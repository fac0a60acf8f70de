"""The image for other processors, built and started under emulation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flanneld import __version__
from tests.image.built_image import Architecture, BuiltImage
from tests.image.emulation import emulated
from tests.lab import Lab
from tests.lab.lab import NETWORK

pytestmark = pytest.mark.long

#: Architectures of upstream's image, by QEMU's name of the processor. Debian 12 has no riscv64.
ARCHITECTURES = {
    "aarch64": Architecture("arm64", "linux/arm64"),
    "arm": Architecture("armhf", "linux/arm/v7"),
    "ppc64le": Architecture("ppc64el", "linux/ppc64le"),
    "s390x": Architecture("s390x", "linux/s390x"),
    "riscv64": Architecture("riscv64", "linux/riscv64", suite="trixie"),
}
#: Processors to try, since each one takes a quarter of an hour.
CHOSEN = os.environ.get("FLANNELD_TEST_PROCESSORS", "aarch64").split()


@pytest.fixture(scope="module", params=CHOSEN)
def foreign_image(request: pytest.FixtureRequest) -> Iterator[tuple[str, BuiltImage]]:
    with emulated(request.param), BuiltImage(ARCHITECTURES[request.param]) as image:
        yield request.param, image


def test_image_of_another_processor_starts(foreign_image: tuple[str, BuiltImage]) -> None:
    processor, image = foreign_image
    assert image.run("/opt/bin/flanneld", "-version") == f"{__version__}\n"
    assert image.run("uname", "-m").strip() in (processor, "armv7l")


def test_image_of_another_processor_plans_a_start(lab: Lab, foreign_image: tuple[str, BuiltImage]) -> None:
    _, image = foreign_image
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes(1)
    command = image.contained(
        "/opt/bin/flanneld",
        "-plan",
        f"-etcd-endpoints={lab.etcd.endpoint}",
        f"-iface={node.address}",
        "-subnet-file=/run/flannel/subnet.env",
        mounts={"/run/flannel": node.directory},
    )
    plan = node.run(*command, timeout=120).stdout
    assert "ip link add" in plan
    assert "flannel.1" in plan
