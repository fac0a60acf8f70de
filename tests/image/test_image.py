"""The container image: what is in it, and that two nodes run from it are a network."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from flanneld import __version__
from tests.image.built_image import BuiltImage
from tests.kubernetes_objects import daemon, init_containers, manifest
from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.lab import NETWORK
from tests.lab.namespace import run

pytestmark = pytest.mark.long

MIB = 1 << 20
DOCS = (ROOT / "docs/kubernetes.md").read_text()
#: Updates of Debian and of what Python packages depend on, in MiB.
TOLERANCE = 10
# linux/capability.h
NET_ADMIN_AND_NET_RAW = 1 << 12 | 1 << 13

PACKAGES = """
from importlib.metadata import distributions
for each in distributions():
    print(f"{each.name}=={each.version}")
"""


def cluster(lab: Lab, image: BuiltImage, **config: Any) -> list[Node]:
    """Two nodes whose daemons run in containers of the image, with the flags of the manifest."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}, **config})
    nodes = lab.add_nodes(2)
    for node in nodes:
        command = image.contained(
            *daemon(manifest())["command"],
            mounts={"/run/flannel": node.directory},
            environment={"NOTIFY_SOCKET": "/run/flannel/notify"},
        )
        node.start(
            "--subnet-file=/run/flannel/subnet.env", "--ip-masq", "--healthz-port=8081", command=command
        )
    for node in nodes:
        node.wait_ready(20)
    return nodes


def in_image(image: BuiltImage, path: str) -> Path:
    """A file of the image, a link followed as in there."""
    found = image.root / path.lstrip("/")
    return in_image(image, str(found.readlink())) if found.is_symlink() else found


def answer(node: Node, path: str) -> bytes:
    """What the health server says, nothing if it does not say that all is well."""
    with node.namespace.entered():
        try:
            found = build_opener(ProxyHandler({})).open(f"http://{node.address}:8081{path}", timeout=5)
            return bytes(found.read())
        except OSError:
            return b""


def test_two_nodes_are_one_network(lab: Lab, image: BuiltImage) -> None:
    first, second = cluster(lab, image)
    first.container().wait_for_reply(second.container())
    rules = first.run("iptables-nft-save", "-t", "nat").stdout
    assert "-A FLANNEL-POSTRTG" in rules
    assert not [line for node in (first, second) for line in node.log().splitlines() if line[0] in "WEF"]


def test_nftables_can_be_used(lab: Lab, image: BuiltImage) -> None:
    first, second = cluster(lab, image, EnableNFTables=True)
    first.container().wait_for_reply(second.container())
    assert "masquerade fully-random" in first.run("nft", "list", "table", "ip", "flannel-ipv4").stdout


def test_two_capabilities_are_enough(lab: Lab, image: BuiltImage) -> None:
    node, _ = cluster(lab, image)
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    found = dict(line.split(":\t") for line in lines)
    assert found["Uid"].split() == ["0"] * 4
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert int(found[kind], 16) == NET_ADMIN_AND_NET_RAW, kind


def test_the_probes_of_the_manifest_are_answered(lab: Lab, image: BuiltImage) -> None:
    node, _ = cluster(lab, image)
    for probe in ("livenessProbe", "readinessProbe"):
        path = daemon(manifest())[probe]["httpGet"]["path"]
        wait_for(partial(answer, node, path), 10, f"an answer to {path}")


def test_there_are_metrics(lab: Lab, image: BuiltImage) -> None:
    node, _ = cluster(lab, image)
    assert b"flannel_build_info" in answer(node, "/metrics")


def test_the_daemon_stops_at_once(lab: Lab, image: BuiltImage) -> None:
    node, _ = cluster(lab, image)
    assert node.stop(5).status == 0


def test_image_starts_flanneld_as_root(image: BuiltImage) -> None:
    config = image.config()
    assert config["Entrypoint"] == ["/opt/bin/flanneld"]
    assert config.get("User", "") == ""
    assert image.run(*config["Entrypoint"], "--version") == f"{__version__}\n"
    assert image.run("flannelctl", "--version") == f"{__version__}\n"


def test_the_commands_of_the_manifest_are_there(image: BuiltImage) -> None:
    for container in (daemon(manifest()), init_containers(manifest())["install-cni"]):
        assert in_image(image, container["command"][0]).stat().st_mode & 0o111


def test_the_cni_plug_in_is_where_upstreams_image_has_it(image: BuiltImage) -> None:
    assert (image.root / "flannel").read_bytes() == (ROOT / "dist/cni/flannel").read_bytes()
    assert (image.root / "flannel").stat().st_mode & 0o777 == 0o755


def test_the_scripts_run(image: BuiltImage) -> None:
    (image.root / "tmp/subnet.env").write_text("FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1450\n")
    image.run("/opt/bin/mk-docker-opts.sh", "-c", "-f", "/tmp/subnet.env", "-d", "/tmp/docker")
    assert (image.root / "tmp/docker").read_text() == 'DOCKER_OPTS=" --bip=10.1.74.1/24 --mtu=1450"\n'
    image.run("/opt/bin/install-conf", "/tmp/docker", "/tmp/copy")
    assert (image.root / "tmp/copy").read_text() == (image.root / "tmp/docker").read_text()


@pytest.mark.parametrize("name", ["cc", "gcc", "g++", "c++", "cpp", "as", "ld", "make", "pip", "pip3", "git"])
def test_image_has_no_build_tools(image: BuiltImage, name: str) -> None:
    places = ("usr/bin", "usr/sbin", "usr/local/bin", "opt/flanneld/bin", "opt/bin")
    assert [place for place in places if (image.root / place / name).exists()] == []


def test_every_package_has_the_version_it_is_pinned_to(image: BuiltImage) -> None:
    pinned = (ROOT / "dist/image/constraints.txt").read_text().splitlines()
    installed = set(image.run("/opt/flanneld/bin/python", "-c", PACKAGES).splitlines())
    assert "pyroute2" in str(installed)
    assert installed - {f"flanneld=={__version__}"} <= set(pinned)


def test_image_is_as_small_as_its_docs_say(image: BuiltImage) -> None:
    size, base = round(image.size / MIB), round(image.base_size / MIB)
    print(f"{size} MiB, of which {base} MiB are the base")
    (told,) = re.findall(r"^The daemon and its dependencies.*?(?=\n\n)", DOCS, re.MULTILINE | re.DOTALL)
    figures = [int(each) for each in re.findall(r"(\d+) MiB", told)]
    assert figures[1] == pytest.approx(base, abs=TOLERANCE)
    assert sum(figures) == pytest.approx(size, abs=TOLERANCE)


def test_plug_ins_run_on_a_host_that_has_nothing(image: BuiltImage, tmp_path: Path) -> None:
    plugins = sorted((image.root / "opt/cni/bin").iterdir())
    (names,) = re.findall(r"the plug-ins (`.*`), static", " ".join(DOCS.split()))
    assert [plugin.name for plugin in plugins] == sorted(re.findall("`(.*?)`", names))
    for plugin in plugins:
        shutil.copy(plugin, tmp_path)
        question = ("env", "CNI_COMMAND=VERSION", "chroot", str(tmp_path), f"/{plugin.name}")
        assert (
            "1.0.0" in json.loads(run(*question, stdin='{"cniVersion": "1.0.0"}').stdout)["supportedVersions"]
        )


def test_plug_ins_come_with_their_licence(image: BuiltImage) -> None:
    text = (image.root / "usr/share/doc/containernetworking-plugins/copyright").read_text()
    assert "License: Apache-2.0" in text
