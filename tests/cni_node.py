"""A node for the CNI plug-in: its files, and delegates that write down what they are told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "dist/cni/flannel"

IPV4 = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\n"
IPV6 = "FLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00::1/64\n"
REST = "FLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\n"

#: A delegate: keeps its stdin and its environment, answers as it was told, and ends as it was told.
DELEGATE = """\
#!/bin/sh
cat >"$0.stdin"
env -0 >"$0.env"
echo "$CNI_COMMAND" >>"$0.commands"
cat "$0.answer"
echo noise >&2
. "$0.end"
"""
ANSWER = b'{ "ips" : [],\t"text": "\xc3\xa9\\u00e9" }\n\n'

Done = subprocess.CompletedProcess[bytes]


class Node:
    """A node's files, and a CNI_PATH with the delegates ``bridge`` and ``ipvlan``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.subnet_file = directory / "subnet.env"
        self.subnet_file.write_text(IPV4 + REST)
        self.plugins = directory / "bin"
        self.plugins.mkdir()
        for name in ("bridge", "ipvlan"):
            (self.plugins / name).write_text(DELEGATE)
            (self.plugins / name).chmod(0o755)
            self.let_answer(ANSWER, name=name)

    def let_answer(self, answer: bytes, end: str = "exit 0", name: str = "bridge") -> None:
        (self.plugins / f"{name}.answer").write_bytes(answer)
        (self.plugins / f"{name}.end").write_text(end)

    def run(self, command: str, stdin: bytes, **variables: str | None) -> Done:
        environment = {
            "PATH": os.environ["PATH"],
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "some-container",
            "CNI_NETNS": "/run/netns/some",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": f"{self.directory}/none::{self.plugins}",
        } | variables
        given = {name: value for name, value in environment.items() if value is not None}
        return subprocess.run(
            [PLUGIN], input=stdin, env=given, cwd=self.directory, capture_output=True, timeout=60, check=False
        )

    def conf(self, **more: Any) -> bytes:
        files = {"subnetFile": str(self.subnet_file), "dataDir": str(self.data_dir)}
        return json.dumps(
            {"name": "cbr0", "cniVersion": "1.0.0", "type": "flannel", **files, **more}
        ).encode()

    def call(self, command: str, **conf: Any) -> Done:
        """Run it with a configuration of these keys; it must succeed."""
        done = self.run(command, self.conf(**conf))
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def refusal(self, command: str, stdin: bytes | None = None, **variables: str | None) -> dict[str, Any]:
        """The error that it answers with; it must call no delegate, and say nothing else."""
        done = self.run(command, self.conf() if stdin is None else stdin, **variables)
        assert (done.returncode, done.stderr) == (1, b"")
        assert self.commands() == []
        error: dict[str, Any] = json.loads(done.stdout)
        assert error.keys() <= {"cniVersion", "code", "msg", "details"}
        assert error["msg"]
        return error

    def told(self, name: str = "bridge") -> dict[str, Any]:
        """The configuration that the delegate got last."""
        conf: dict[str, Any] = json.loads((self.plugins / f"{name}.stdin").read_bytes())
        return conf

    def environment(self) -> dict[str, str]:
        variables = (self.plugins / "bridge.env").read_text().split("\0")
        return dict(variable.split("=", 1) for variable in variables if variable)

    def commands(self, name: str = "bridge") -> list[str]:
        file = self.plugins / f"{name}.commands"
        return file.read_text().split() if file.exists() else []

    @property
    def record(self) -> Path:
        return self.data_dir / "some-container"
