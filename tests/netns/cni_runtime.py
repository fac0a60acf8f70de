"""What a container runtime does with a list of CNI plug-ins, for the pods of one node."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from tests.lab import Container, Namespace, Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.namespace import batch

CNI_PATH = f"{ROOT}/dist/cni:/usr/lib/cni"  # the latter is Debian's containernetworking-plugins
#: The network that containerd adds to each pod before those of net.d.
LOOPBACK = {"name": "cni-loopback", "cniVersion": "0.3.1"}
#: Runs a program in another root, which has some directories of this one. ``ip netns exec`` hides the mounts.
IN_ROOT = """
for place in $1; do
    mkdir -p "$0/$place"
    mount --rbind "/$place" "$0/$place"
done
shift
exec chroot "$0" "$@"
"""
#: The kernel's file systems, and the pods' namespaces.
KERNEL = ("proc", "sys", "dev", "run/netns")


def documented() -> dict[str, Any]:
    """The configuration list that docs/containers.md tells to install."""
    page = (ROOT / "docs/containers.md").read_text()
    found = re.search(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found
    conflist: dict[str, Any] = json.loads(found[1])
    return conflist


def kept_conf_flags(node: Node, version: str = "0.3.1") -> list[str]:
    """Write a template beside the node's files. Return the flags for the daemon to keep a configuration."""
    flannel, *others = documented()["plugins"]
    ipam = {"ipam": {"dataDir": str(node.directory / "cni-networks")}}
    conf = documented() | {"cniVersion": version, "plugins": [flannel | ipam, *others]}
    template = node.directory / "cni-conf.json"
    template.write_text(json.dumps(conf))
    return [f"-cni-conf={kept_conf_file(node)}", f"-cni-template={template}", "-cni-bin=/usr/lib/cni"]


def kept_conf_file(node: Node) -> Path:
    return node.directory / "net.d/10-flannel.conflist"


def kept_conf(node: Node) -> dict[str, Any]:
    """Wait for the configuration that the daemon writes, and return it."""
    wait_for(kept_conf_file(node).exists, 20, "the CNI configuration")
    conf: dict[str, Any] = json.loads(kept_conf_file(node).read_text())
    return conf


class Runtime:
    """Adds, checks and deletes pods by their number, with files of the node's own.

    Each raises ``CommandError`` with what the plug-in answered when a command fails.
    """

    def __init__(
        self,
        node: Node,
        programs: str = CNI_PATH,
        root: Path = Path("/"),
        shared: Sequence[str] = (),
        **changes: Any,
    ) -> None:
        """``changes`` replace parts of the documented configuration, such as ``cniVersion``.

        ``use`` takes another one later, as a runtime does when the file in net.d changes. ``programs`` are
        the directories of the plug-ins. They run in the file system ``root``, which has this machine's
        directories ``shared``.
        """
        self.node = node
        self._programs = programs
        self._root = root
        has_own = root != Path("/")
        self._elsewhere = ("sh", "-ec", IN_ROOT, str(root), " ".join((*KERNEL, *shared))) if has_own else ()
        self.data_dir = node.directory / "cni-flannel"
        self.reservations = root / "var/lib/cni/networks" if has_own else node.directory / "cni-networks"
        self._conflist = documented() | changes
        self._cached: dict[int, dict[str, Any]] = {}

    def use(self, conflist: dict[str, Any]) -> None:
        self._conflist = conflist

    def add(self, number: int, **runtime_config: Any) -> Container:
        inside = self._namespace(number)
        batch(f"netns add {inside.name}")
        self._call("ADD", LOOPBACK, {"type": "loopback"}, number, CNI_IFNAME="lo")
        result: dict[str, Any] = {}
        for plugin in self._conflist["plugins"]:
            more = {"prevResult": result, "runtimeConfig": runtime_config}
            result = json.loads(self._call("ADD", self._conflist, plugin | more, number))
        # libcni caches both. Plug-ins before 0.4.0 get no result but at ADD.
        cached = {"prevResult": result if self._conflist["cniVersion"] >= "0.4.0" else {}}
        self._cached[number] = cached | {"runtimeConfig": runtime_config}
        addresses = [ip_interface(given["address"]).ip for given in result["ips"]]
        return Container(
            inside, {address.version: str(address) for address in addresses}, self.node.directory
        )

    def check(self, number: int) -> None:
        for plugin in self._conflist["plugins"]:
            self._call("CHECK", self._conflist, plugin | self._cached[number], number)

    def delete(self, number: int) -> None:
        self._call("DEL", LOOPBACK, {"type": "loopback"}, number, CNI_IFNAME="lo")
        for plugin in reversed(self._conflist["plugins"]):
            self._call("DEL", self._conflist, plugin | self._cached[number], number)
        if self._namespace(number).exists():
            batch(f"netns del {self._namespace(number).name}")

    def records(self) -> list[str]:
        """The containers that the plug-in remembers."""
        return _names(self.data_dir)

    def reserved(self) -> list[str]:
        """The addresses that host-local has given away."""
        names = _names(self.reservations / self._conflist["name"])
        return [name for name in names if name != "lock" and not name.startswith("last_reserved_ip")]

    def _namespace(self, number: int) -> Namespace:
        return Namespace(f"{self.node.namespace.name}c{number}")

    def _call(
        self, command: str, network: dict[str, Any], plugin: dict[str, Any], number: int, **more: str
    ) -> str:
        conf = {key: value for key, value in plugin.items() if value}
        conf |= {key: network[key] for key in ("name", "cniVersion")}
        if plugin["type"] == "flannel":
            conf["subnetFile"] = str(self.node.subnet_file)
            conf["dataDir"] = str(self.data_dir)
            conf["ipam"] = {"dataDir": str(self.reservations)}
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": self._namespace(number).name,
            "CNI_NETNS": f"/run/netns/{self._namespace(number).name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": self._programs,
        }
        words = (f"{name}={value}" for name, value in (variables | more).items())
        places = (Path(part, plugin["type"]) for part in self._programs.split(":"))
        program = next(str(path) for path in places if (self._root / str(path).lstrip("/")).exists())
        inside = ("env", *words, *self._elsewhere, program)
        return self.node.namespace.run(*inside, stdin=json.dumps(conf)).stdout


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
