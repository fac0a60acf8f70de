"""Reconciler tables of the udp backend: the proxy's process, watched for hanging, and its peers.

On a busy machine a healthy process may be silent for seconds, while it waits for CPU or disk. So silence
alone proves nothing. A proxy hangs if it sleeps all the time, or if it gets CPU time and still does not
answer.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from flanneld.backends.udp import control
from flanneld.backends.udp.client import NoProxy, ProxyClient, ProxySilent, RunningProxy, end_process
from flanneld.backends.udp.control import PROXIES, PROXY_PEERS, ProxyPeer, UdpProxy
from flanneld.runtime import clock, waits
from flanneld.state.resources import LINKS, Resource
from flanneld.state.table import Changes, Failure, Put, Report, Scope, Seen, Table

log = logging.getLogger(__name__)

#: Seconds between two requests, and between two checks of a proxy that owes an answer.
PERIOD, _LOOK = 2.0, 1.0
#: Seconds of silence allowed to a proxy that sleeps, and to one that runs.
IDLE_FOR, BUSY_FOR = 5.0, 15.0
#: Consecutive checks that must agree.
_LOOKS = 3
#: Seconds between two reads of a table without notifications.
_AUDIT_PERIOD = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Activity(Struct, frozen=True, gc=False):
    """Sample of a process: the states of its threads (proc(5)), and its CPU time in seconds."""

    at: float
    states: str
    cpu: float

    @property
    def sleeps(self) -> bool:
        """True if no thread waits for CPU or disk."""
        return not set(self.states) & {"R", "D"}


def activity(pid: int, now: float) -> Activity:
    """Return a sample of a process. Raises ``OSError`` if it is gone."""
    rows = [
        (task / "stat").read_text().rpartition(")")[2].split() for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return Activity(
        now, "".join(row[0] for row in rows), sum(int(row[11]) + int(row[12]) for row in rows) / _TICKS
    )


def verdict(silent: float, looks: list[Activity]) -> str:
    """Return why a process silent for ``silent`` seconds counts as hanging, else an empty text (pure)."""
    last = looks[-_LOOKS:]
    if len(last) < _LOOKS:
        return ""
    if silent >= IDLE_FOR and all(each.sleeps for each in last) and last[0].cpu == last[-1].cpu:
        return "is stopped" if "T" in last[-1].states else "does nothing"
    asleep = sum(each.sleeps for each in looks)
    runs = looks[-1].cpu - looks[0].cpu >= (looks[-1].at - looks[0].at) / 2
    if silent >= BUSY_FOR and (runs or 2 * asleep > len(looks)):
        return "does other things"
    return ""


class ProxyWatchdog:
    """Watchdog with a connection of its own, which never blocks. For one thread."""

    def __init__(self, tun: str) -> None:
        self._tun = tun
        self.next_look = clock.now() + PERIOD
        self._connection: socket.socket | None = None
        self._pid = 0
        self._asked = 0.0
        self._looks: list[Activity] = []

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def look(self) -> bool:
        """Send a request, or check for its answer. Return True if the proxy is gone."""
        now = clock.now()
        self.next_look = now + PERIOD
        if self._connection is None:
            self._connect()
            return False
        try:
            if self._connection.recv(control.LONGEST, socket.MSG_DONTWAIT):
                self._ask(now)
                return False
        except BlockingIOError:
            return self._suspect(now)
        except OSError:
            pass  # Gone: treated like an empty message.
        self.close()
        return True

    def _connect(self) -> None:
        """Connect to the first trusted proxy; on failure the next check tries again."""
        for address in control.addresses_of(self._tun):
            connection = control.new_socket()
            try:
                connection.setblocking(False)
                connection.connect(address)
                pid, trusted = control.other_end(connection)
                if trusted:
                    self._pid, self._connection = pid, connection
                    self._ask(clock.now())
                    return
            except OSError:
                self.close()
            connection.close()

    def _ask(self, now: float) -> None:
        assert self._connection
        self._connection.send(control.HELLO, socket.MSG_DONTWAIT)
        self._asked = now
        self._looks.clear()

    def _suspect(self, now: float) -> bool:
        self.next_look = now + _LOOK
        with suppress(OSError):  # the next check finds that it is gone
            self._looks.append(activity(self._pid, now))
        reason = verdict(now - self._asked, self._looks)
        if not reason:
            return False
        if self._end():
            silent = now - self._asked
            log.warning(
                "Killed the udp proxy of %s, process %d: no answer for %.0f s, and %s",
                self._tun, self._pid, silent, reason,
            )  # fmt: skip
        self.close()
        return True

    def _end(self) -> bool:
        """Kill the proxy if it is still there and silent. Return True if it was."""
        assert self._connection
        try:
            pidfd = os.pidfd_open(self._pid)
        except OSError:
            return False
        try:
            # While it holds its end of the connection, its pid cannot be reused.
            self._connection.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            end_process(pidfd)
            return True
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return False


class ProxyTable(Table):
    """Table of the proxy's process. It starts or adopts the process and watches for its end."""

    name = PROXIES
    what = "the settings of the udp proxy"
    audit = _AUDIT_PERIOD
    needs = frozenset({LINKS})

    def __init__(self, client: ProxyClient) -> None:
        self._client = client
        self._announced = False
        self._watchdog = ProxyWatchdog(client.tun)

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield the running proxy. Raises ``ProxySilent`` for one that may only be slow."""
        del scope
        try:
            running = self._client.hello()
        except ProxySilent:
            if self.next_look <= clock.now():
                self.look()  # Until the daemon is ready, only this read checks the watchdog.
            raise
        except NoProxy:
            return
        if not self._announced:
            log.info("Adopted the running %s, process %d", running.settings, running.pid)
            self._announce(running)
        yield Seen(running.settings)

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            assert isinstance(put.want, UdpProxy)
            try:
                self._client.start(put.want)
                self._announce(self._client.hello())
                report.made.append(put.want)
            except (OSError, NoProxy) as failure:
                report.failed.append(Failure(put.want, str(failure)))
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        self._client.leave(device_stays=True)  # there is only the client's own proxy
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Leave the proxy running, unless it would die with us and leave a dead device."""
        if remove or os.getpid() == 1:
            self._client.leave(device_stays=False)
        self._watchdog.close()
        self._client.close()

    def fileno(self) -> int:
        return self._client.fileno()

    def changes(self) -> list[Changes]:
        source = self.fileno()
        if source < 0 or not waits.readable(source, 0):
            return []
        log.warning("The udp proxy ended: %s", self._client.news())
        return [Changes()]

    @property
    def next_look(self) -> float:
        return self._watchdog.next_look

    def look(self) -> bool:
        return self._watchdog.look()

    def _announce(self, running: RunningProxy) -> None:
        self._announced = True
        plane, why, pid = running.plane, running.why, running.pid
        if not self._client.has_usual_name:
            name = control.address_of(running.settings.tun).replace("\0", "@")
            log.warning("Another process poses as the udp proxy at %s; find it with: ss -xlp", name)
        log.info("Using the %s data plane: %s; process %d", plane, why, pid)


class ProxyPeerTable(Table):
    """Table of the proxy's peers, written in batches."""

    name = PROXY_PEERS
    what = "the peers of the udp proxy"
    vital = False
    audit = _AUDIT_PERIOD
    needs = frozenset({PROXIES})

    def __init__(self, client: ProxyClient, tun: str) -> None:
        self._client = client
        self._tun = tun

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        for subnet, endpoint in self._client.peers():
            yield Seen(ProxyPeer(self._tun, subnet, endpoint))

    def put(self, puts: Sequence[Put]) -> Report:
        peers = [put.want for put in puts if isinstance(put.want, ProxyPeer)]
        self._client.put((peer.subnet, peer.endpoint) for peer in peers)
        return Report(made=list(peers))

    def drop(self, found: Sequence[Resource]) -> Report:
        peers = [each for each in found if isinstance(each, ProxyPeer)]
        self._client.drop((peer.subnet, peer.endpoint) for peer in peers)
        return Report(removed=list(peers))
