"""What a container runtime does with a list of CNI plug-ins, for the pods of one node."""

from __future__ import annotations

import json
import re
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from tests.lab import Container, Namespace, Node
from tests.lab.daemon import ROOT
from tests.lab.namespace import batch

CNI_PATH = f"{ROOT}/dist/cni:/usr/lib/cni"  # the latter is Debian's containernetworking-plugins


def documented() -> dict[str, Any]:
    """The configuration list that docs/cni.md tells to install."""
    found = re.search(r"^```json\n(.*?)^```", (ROOT / "docs/cni.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    conflist: dict[str, Any] = json.loads(found[1])
    return conflist


class Runtime:
    """Adds, checks and deletes pods by their number, with files of the node's own.

    Each raises ``CommandError`` with what the plug-in answered when a command fails.
    """

    def __init__(self, node: Node, programs: str = CNI_PATH, **changes: Any) -> None:
        """``changes`` replace parts of the documented configuration, such as ``cniVersion``.

        ``use`` takes another one later, as a runtime does when the file in net.d changes. ``programs`` are
        the directories of the plug-ins.
        """
        self.node = node
        self._programs = programs
        self.data_dir = node.directory / "cni-flannel"
        self.reservations = node.directory / "cni-networks"
        self._conflist = documented() | changes
        self._results: dict[int, dict[str, Any]] = {}
        self._runtime_configs: dict[int, dict[str, Any]] = {}

    def use(self, conflist: dict[str, Any]) -> None:
        self._conflist = conflist

    def add(self, number: int, **runtime_config: Any) -> Container:
        inside = self._namespace(number)
        batch(f"netns add {inside.name}")
        result: dict[str, Any] = {}
        for plugin in self._conflist["plugins"]:
            answer = self._call("ADD", plugin, number, prevResult=result, runtimeConfig=runtime_config)
            result = json.loads(answer)
        self._results[number] = result
        self._runtime_configs[number] = runtime_config
        addresses = [ip_interface(given["address"]).ip for given in result["ips"]]
        return Container(
            inside, {address.version: str(address) for address in addresses}, self.node.directory
        )

    def check(self, number: int) -> None:
        for plugin in self._conflist["plugins"]:
            self._call("CHECK", plugin, number, prevResult=self._results[number])

    def delete(self, number: int) -> None:
        for plugin in reversed(self._conflist["plugins"]):
            given = {"prevResult": self._results[number], "runtimeConfig": self._runtime_configs[number]}
            self._call("DEL", plugin, number, **given)
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

    def _call(self, command: str, plugin: dict[str, Any], number: int, **more: Any) -> str:
        conf = {"name": self._conflist["name"], "cniVersion": self._conflist["cniVersion"], **plugin}
        if plugin["type"] == "flannel":
            conf["subnetFile"] = str(self.node.subnet_file)
            conf["dataDir"] = str(self.data_dir)
            conf["ipam"] = {"dataDir": str(self.reservations)}
        conf |= {key: value for key, value in more.items() if value}
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": self._namespace(number).name,
            "CNI_NETNS": f"/run/netns/{self._namespace(number).name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": self._programs,
        }
        words = (f"{name}={value}" for name, value in variables.items())
        places = (Path(part, plugin["type"]) for part in self._programs.split(":"))
        program = next(str(path) for path in places if path.exists())
        return self.node.namespace.run("env", *words, program, stdin=json.dumps(conf)).stdout


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
