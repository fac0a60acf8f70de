"""``flanneld --cleanup``: remove what flannel, in Go or in Python, made on this host, and list it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from flanneld import subnet_file
from flanneld.firewall import pairs, retire
from flanneld.network import devices
from flanneld.network.diff import Plan
from flanneld.network.domain import Domain
from flanneld.network.kernel import Kernel
from flanneld.network.pump.client import Client, NoPump, Silent
from flanneld.network.resources import Resource, Tun
from flanneld.ownership import is_flannels
from flanneld.status_socket import path_beside
from flanneld.subnet_file import Previous


def clean_up(path: Path, saved: Path, say: Callable[[str], None], *, dry_run: bool) -> bool:
    """Remove routes, devices, rules, the subnet file and the saved nodes, each said in a line.

    False if something is left. Containers lose their network. A daemon that still runs puts all of it
    back: stop it first.
    """
    previous = subnet_file.read(path)
    kernel = Kernel()
    complete = True
    for what, act in _steps(kernel, previous, (path, path_beside(path), saved)):
        done = dry_run or act()
        complete &= done
        say(f"{'would remove' if dry_run else 'removed' if done else 'could not remove'} {what}")
    removed, failures = retire(pairs(previous.networks, previous.subnets), dry_run=dry_run)
    for line in removed:
        say(f"{'would remove' if dry_run else 'removed'} rule {line}")
    for line in failures:
        say(f"could not remove {line}")
    return complete and not failures


def _steps(
    kernel: Kernel, previous: Previous, files: Iterable[Path]
) -> Iterator[tuple[str, Callable[[], bool]]]:
    domain = _domain(previous)
    for route in kernel.left_behind(domain):
        yield str(route), partial(_dropped, kernel, route, domain)
    for link in kernel.links():
        if is_flannels(link):
            if isinstance(link.make, Tun):
                yield from _pump_of(link.name)
            yield f"link {link.name}", partial(_unmade, link.name)
    for file in files:
        if file.exists():
            yield str(file), partial(_unlinked, file)


def _pump_of(tun: str) -> Iterator[tuple[str, Callable[[], bool]]]:
    client = Client(tun, of_anybody=True)
    try:
        running = client.hello()
        what = f"{running.settings}, process {running.pid}"
    except NoPump:
        if not _has_pump(tun):
            return
        what = f"packet pump of {tun}, which does not answer"
    yield what, partial(_ended, client)


def _ended(client: Client) -> bool:
    client.leave(device_stays=True)
    return not _has_pump(client.tun)


def _has_pump(tun: str) -> bool:
    """Whether there is one that may be believed, even if it says nothing."""
    client = Client(tun)
    try:
        client.hello()
    except NoPump as reason:
        return isinstance(reason, Silent)
    finally:
        client.close()
    return True


def _domain(previous: Previous) -> Domain:
    lengths = {net.version: net.prefixlen for net in previous.subnets if net is not None}
    ranges = [(net, lengths[net.version]) for net in previous.networks if net.version in lengths]
    return Domain(uplink="", links=frozenset(), ranges=tuple(ranges), adopt=True)


def _dropped(kernel: Kernel, route: Resource, domain: Domain) -> bool:
    return not kernel.apply(Plan(drops=(route,)), domain).failed


def _unmade(name: str) -> bool:
    try:
        devices.drop(name)
    except OSError:
        return False
    return True


def _unlinked(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
