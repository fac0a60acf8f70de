"""Reconciler tables of the udp backend: the udp proxy's process, and its peers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

from flanneld.backends.udp import control
from flanneld.backends.udp.client import NoProxy, ProxyClient, ProxySilent, RunningProxy
from flanneld.backends.udp.resources import PROXIES, PROXY_PEERS, ProxyPeer, UdpProxy
from flanneld.backends.udp.watchdog import ProxyWatchdog
from flanneld.runtime import clock, waits
from flanneld.state.resources import LINKS, Resource
from flanneld.state.table import Changes, Failure, Put, Report, Scope, Seen

log = logging.getLogger(__name__)

#: Seconds between two reads without notifications.
_AUDIT_PERIOD = 30.0


class ProxyTable:
    """Table of the proxy's process. It starts or adopts the process and watches for its end."""

    name = PROXIES
    what = "the settings of the udp proxy"
    worker = "kernel"
    vital = True
    audit: float | None = _AUDIT_PERIOD
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


class ProxyPeerTable:
    """Table of the proxy's peers, written in batches."""

    name = PROXY_PEERS
    what = "the peers of the udp proxy"
    worker = "kernel"
    vital = False
    audit: float | None = _AUDIT_PERIOD
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

    def close(self, *, remove: bool) -> None:
        """Leave the peers in the proxy."""
