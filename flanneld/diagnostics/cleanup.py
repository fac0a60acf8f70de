"""``flanneld --cleanup``: remove and list what flannel, in Go or in Python, created on this host."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from ipaddress import IPv4Network
from itertools import chain
from pathlib import Path

from msgspec import Struct

from flanneld.backends.cloud.record import SUFFIX, Record, routes_in
from flanneld.backends.extension.backend import ConfigCommandFailed, ConfigCommands
from flanneld.backends.extension.journal import Journal, JournalEntry
from flanneld.backends.ipsec import charon
from flanneld.backends.registry import GROUP, described
from flanneld.backends.udp.client import NoProxy, ProxyClient, ProxySilent
from flanneld.errors import Fatal, cause_of
from flanneld.model import lies_in
from flanneld.network import xfrm_table as xfrm
from flanneld.network.rtnetlink import devices
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.xfrm import XfrmPolicy
from flanneld.reconcile.firewall import retire
from flanneld.reconcile.last_run import LastRun, stale
from flanneld.runtime.command import TIME_LIMIT, CommandRunner
from flanneld.runtime.files import remove, text
from flanneld.runtime.process import InstanceLock, holders
from flanneld.state.resources import Blackhole, Resource, Route, Tun
from flanneld.state.table import Claim, Scope
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import Previous

log = logging.getLogger(__name__)

#: Names of the program: ``flanneld``, or a release's ``flanneld-amd64``; not the udp proxy's module.
_PROGRAM = re.compile(r"flanneld([-_].*)?")
_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*")
#: Options of calls that do not run the daemon.
_ERRAND = re.compile(r"--?(cleanup|plan|migrate-etcd-v2-to-v3|version|help|h)(=.*)?")
_UNIT = re.compile(r"/([^/\n]+\.service)(?:\n|$)")
_CONTAINER = re.compile(r"/docker[-/]([0-9a-f]{12})")


class OtherDaemon(Struct, frozen=True, gc=False):
    """A running daemon, and the command that stops it for good."""

    pid: int
    remedy: str


def running(proc: Path = Path("/proc")) -> Iterator[OtherDaemon]:
    """Yield the daemons of this network namespace, except this process and its ancestors.

    Daemons in an invisible PID namespace are not found, nor, without root, those of other users.
    """
    here = (proc / "self/ns/net").stat()
    own = set(_ancestors(proc))
    found: dict[int, Path] = {}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # It has ended, or belongs to another user.
            if os.path.samestat((process / "ns/net").stat(), here) and is_daemon(*_call_of(process)):
                found[int(process.name)] = process
    for pid in sorted(found.keys() - own):
        # A child between fork and exec looks like its parent, and may have ended since.
        parent = _parent_of(found[pid])
        if parent is not None and parent not in found:
            yield OtherDaemon(pid, how_to_stop(pid, text(found[pid] / "cgroup")))


def is_daemon(names: Sequence[str], words: Sequence[str]) -> bool:
    """Return True if a process runs the daemon, by its names and its command line."""
    program, rest = "", list(words[1:])
    if words and _INTERPRETER.fullmatch(Path(words[0]).name):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest.pop(0)
        if rest[:1] == ["-m"]:
            rest.pop(0)
        program = Path(rest.pop(0)).name if rest else ""
    elif words:
        program = Path(words[0]).name
    is_flanneld = any(_PROGRAM.fullmatch(name) for name in (*names, program))
    return is_flanneld and not any(_ERRAND.fullmatch(word) for word in rest)


def how_to_stop(pid: int, cgroup: str) -> str:
    """Return the command that stops a daemon for good, by the manager in its cgroup (cgroups(7))."""
    if "kubepods" in cgroup:
        return "kubectl delete its DaemonSet, or keep it from this node with a nodeSelector"
    if container := _CONTAINER.search(cgroup):
        return f"docker stop {container[1]}"
    units = [unit for unit in _UNIT.findall(cgroup) if "flannel" in unit]
    return f"systemctl stop {units[0]}" if units else f"kill {pid}"


def _ancestors(proc: Path) -> Iterator[int]:
    """Yield the pids of this process, its parent, and so on."""
    pid: int | None = os.getpid()
    while pid and pid > 1:
        yield pid
        pid = _parent_of(proc / str(pid))


def _parent_of(process: Path) -> int | None:
    """Return the pid of the parent, None of a process that has ended."""
    found = re.search(r"^PPid:\s*([0-9]+)$", text(process / "status"), re.MULTILINE)
    return int(found[1]) if found else None


def _call_of(process: Path) -> tuple[list[str], list[str]]:
    """Return the names of a process, and its command line. Raises ``OSError``."""
    names = [(process / "comm").read_text().strip()]
    with suppress(OSError):
        names.append((process / "exe").readlink().name)
    return names, (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


#: Description of an object, and the function that removes it; None if it stays.
_Step = tuple[str, Callable[[], bool] | None]


def clean_up(
    path: Path, files: Iterable[Path], say: Callable[[str], None], *, everything: bool, dry_run: bool
) -> bool:
    """Remove routes, devices, rules, the subnet file and other ``files``, and report each in a line.

    Only objects of the subnet file's network are removed, unless ``everything``. Return False if something is
    left. Containers lose their network. Raises ``Fatal`` while a daemon runs, which would restore everything.
    """
    lock = InstanceLock(subnet_file.beside(path, "lock"))
    if not dry_run:
        _refuse_running(lock, path)
    for each in entry_points(group=GROUP):
        described(each.name)  # registers its kinds of devices
    return sweep_network(path, files, say, everything=everything, dry_run=dry_run)


def sweep_network(
    path: Path,
    files: Iterable[Path],
    say: Callable[[str], None],
    *,
    everything: bool = False,
    dry_run: bool = False,
) -> bool:
    """Do the same without a check for a running daemon: no task may maintain this network any more."""
    last_run = LastRun(path)
    previous = subnet_file.read(path)
    kernel = Kernel()
    complete = True
    files = (
        path,
        *(subnet_file.beside(path, suffix) for suffix in ("sock", "state", "lock", "events")),
        *files,
    )
    journal = Journal(subnet_file.beside(path, "extension"), str)
    recorded = Record(subnet_file.beside(path, SUFFIX))
    for what, act in chain(
        _peers_in(journal),
        routes_in(recorded),
        _steps(kernel, previous, last_run, files, everything=everything),
    ):
        if act is None:
            say(f"left {what}: it is of another network; -all removes it, too")
            continue
        done = dry_run or act()
        complete &= done
        say(f"{'would remove' if dry_run else 'removed' if done else 'could not remove'} {what}")
    former = (*previous.nets, *last_run.former)
    removed, failures = retire(former, everything=everything, dry_run=dry_run)
    for line in removed:
        say(f"{'would remove' if dry_run else 'removed'} rule {line}")
    for line in failures:
        say(f"could not remove {line}")
    return complete and not failures


def _refuse_running(lock: InstanceLock, path: Path) -> None:
    """Raise ``Fatal`` if a daemon runs in this network namespace; else take its lock, so that none starts.

    One in a PID namespace that is invisible here shows by its claims, unless it is Go's.
    """
    found = list(running())
    if found:
        raise Fatal(
            "flanneld runs in this network namespace: "
            + ", ".join(f"process {daemon.pid}" for daemon in found),
            f"stop it first: {'; '.join(dict.fromkeys(daemon.remedy for daemon in found))}",
        )
    if not lock.try_take(create=False):
        file = subnet_file.beside(path, "lock")
        raise Fatal(f"a flanneld holds {file}", f"stop it first; find it with: fuser {file}")
    if claims := sorted(f"{holder} has {holder.claim}" for holder in holders()):
        raise Fatal(
            f"flanneld runs in this network namespace: {', '.join(claims)}",
            "stop it first; on the host this finds it: ss -xlp | grep flanneld/",
        )


def _steps(
    kernel: Kernel, previous: Previous, last_run: LastRun, files: Iterable[Path], *, everything: bool
) -> Iterator[_Step]:
    """Yield the objects and their removal; None for those of another network."""
    domain = _domain(previous, last_run, everything=everything)
    for route in kernel.left_behind(domain):
        is_ours = everything or _is_of(previous, route)
        yield str(route), partial(_dropped, kernel, route) if is_ours else None
    links = kernel.links()
    recorded = {seen.name for seen in stale(last_run.devices, links, desired=())}
    for link in links:
        if not is_flannels(link):
            continue
        if not (everything or link.name in recorded or _has_address_in(kernel, link, previous)):
            yield f"link {link.name}", None
        else:
            if isinstance(link.make, Tun):
                yield from _pump_of(link.name)
            yield f"link {link.name}", partial(_unmade, link.name)
    if pid := charon.running_charon():
        yield f"charon, process {pid}", partial(charon.end_running, pid)
    yield from _policies_of(previous, everything=everything)
    for file in files:
        if file.exists():
            yield str(file), partial(remove, file)


def _peers_in(journal: Journal) -> Iterator[_Step]:
    """Yield the peers that commands of the extension backend have set up, then their journal."""
    try:
        entries = list(journal.entries().values())
    except OSError as failure:
        yield f"what {journal.path} names: {cause_of(failure)}", lambda: False
        return
    for entry in entries:
        yield str(entry.setup), partial(_undone, journal, entry)
    if journal.path.exists():
        yield str(journal.path), lambda: not journal.entries() and remove(journal.path)


def _undone(journal: Journal, entry: JournalEntry) -> bool:
    commands = ConfigCommands(CommandRunner(threading.Event()).run, TIME_LIMIT)
    try:
        if entry.remove:
            commands.run(entry.remove, entry.setup.variables(), entry.setup.data)
    except ConfigCommandFailed as failure:
        log.warning("%s", failure)
        return False
    journal.gone(entry.setup.name)
    return True


def _is_of(previous: Previous, route: Resource) -> bool:
    """Return True if a route leads into the network of the subnet file."""
    return isinstance(route, Route | Blackhole) and any(
        lies_in(route.destination, network) for network in previous.networks
    )


def _policies_of(previous: Previous, *, everything: bool) -> Iterator[_Step]:
    """Yield the ipsec backend's XFRM policies, guards last: until then nothing leaves unencrypted."""
    networks = [IPv4Network("0.0.0.0/0")] if everything else previous.networks
    for table in xfrm.stale_tables(networks):
        found = [seen.resource for seen in table.read(Scope({})) if seen.claim is not Claim.FOREIGN]
        for policy in sorted(found, key=lambda each: isinstance(each, XfrmPolicy) and each.is_guard):
            yield str(policy), partial(_withdrawn, table, policy)


def _withdrawn(table: xfrm.XfrmPolicyTable, policy: Resource) -> bool:
    return not table.drop([policy]).failed


def _has_address_in(kernel: Kernel, link: SeenLink, previous: Previous) -> bool:
    return any(
        each.address in network
        for network in previous.networks
        for each in kernel.addresses(network.version, link.index)
    )


def _pump_of(tun: str) -> Iterator[_Step]:
    client = ProxyClient(tun, of_anybody=True)
    try:
        running = client.hello()
        what = f"{running.settings}, process {running.pid}"
    except NoProxy:
        if not _has_pump(tun):
            return
        what = f"udp proxy of {tun}, which does not answer"
    yield what, partial(_ended, client)


def _ended(client: ProxyClient) -> bool:
    client.leave(device_stays=True)
    return not _has_pump(client.tun)


def _has_pump(tun: str) -> bool:
    """Return True if a trusted pump exists, even if it does not answer."""
    client = ProxyClient(tun)
    try:
        client.hello()
    except NoProxy as reason:
        return isinstance(reason, ProxySilent)
    finally:
        client.close()
    return True


def _domain(previous: Previous, last_run: LastRun, *, everything: bool) -> Domain:
    return Domain(
        uplink="",
        links=frozenset(),
        ranges=previous.ranges,
        unmarked=everything or last_run.adopts,
        adopted=last_run.adopted,
    )


def _dropped(kernel: Kernel, route: Resource) -> bool:
    return not kernel.write([route], drop=True)


def _unmade(name: str) -> bool:
    try:
        devices.drop(name)
    except OSError:
        return False
    return True
