"""A host for a recipe: a node with flanneld, this machine's programs, and nothing running."""

from __future__ import annotations

from tests.lab import Node
from tests.lab.isolated import IsolatedNode
from tests.lab.namespace import run

#: The control group of all that is no container.
OWN = "init"
#: A layered file system cannot stand on another one, so the runtimes get theirs in memory.
INSTALL = """
for place in docker containerd containers; do
    mkdir -p var/lib/$place
    mount -t tmpfs tmpfs var/lib/$place
done
rm -rf etc/cni/net.d
"""
#: Reaps what loses its parent, as an init does. Runtimes want no process beside the control groups they make.
FIRST = f"""
mkdir /sys/fs/cgroup/{OWN}
echo $$ >/sys/fs/cgroup/{OWN}/cgroup.procs
touch /run/booted
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -c 'while :; do sleep 1d & wait; done'
"""
#: crun and Podman raise limits, which needs CAP_SYS_RESOURCE, and a sandbox may lack it. A limit of processes
#: needs a controller that the node's control group may lack.
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
pids_limit = 0
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
#: For one block of commands, in seconds.
DEADLINE = 120


class Host(IsolatedNode):
    """A booted host, to be used in a ``with``."""

    INSTALL, FIRST = INSTALL, FIRST

    def __init__(self, node: Node) -> None:
        super().__init__(node, {"etc/containers/containers.conf": CONTAINERS_CONF})

    def shell(self, commands: str) -> str:
        """Run lines of a shell as a user of the host would; return what they print."""
        enter = ("sh", "-ec", 'echo $$ >"$0"/cgroup.procs; exec "$@"', str(self.control_group / OWN))
        user = ("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root")
        done = run(*enter, *self.entering(), *user, "bash", "-euc", commands, timeout=DEADLINE)
        return done.stdout.strip()

    def log(self, name: str) -> str:
        """Return what a daemon has written to ``/var/log``."""
        file = self.path(f"var/log/{name}.log")
        return file.read_text(errors="replace") if file.exists() else ""

    def _has_booted(self) -> bool:
        return self.path("run/booted").exists()
