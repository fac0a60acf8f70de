"""The reconciler's hands on a pump: one driver for the process, one for its peers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

from flanneld.backends.udp import rendezvous
from flanneld.backends.udp.client import Client, NoPump, Running, Silent
from flanneld.backends.udp.resources import Pump, PumpPeer
from flanneld.backends.udp.watchdog import ProxyWatchdog
from flanneld.runtime import clock

log = logging.getLogger(__name__)


class PumpDriver:
    """Starts the process, adopts one that an earlier run has left, and hears when it ends."""

    handles: type = Pump

    def __init__(self, client: Client) -> None:
        self._client = client
        self._announced = False
        self._watchdog = ProxyWatchdog(client.tun)

    def read(self) -> Iterator[Pump]:
        """Raises ``Silent`` for a pump that may only be slow."""
        try:
            running = self._client.hello()
        except Silent:
            if self.next_look <= clock.now():
                self.look()  # Before the daemon is ready nobody else does.
            raise
        except NoPump:
            return
        if not self._announced:
            log.info("Found the %s, process %d", running.settings, running.pid)
            self._announce(running)
        yield running.settings

    def put(self, resource: Pump) -> None:
        self._client.start(resource)
        self._announce(self._client.hello())

    def drop(self, resource: Pump) -> None:
        del resource  # The client knows its own.
        self._client.leave(device_stays=True)

    def close(self) -> None:
        """The pump goes on without us, unless it is bound to die with us and would leave a dead device."""
        if os.getpid() == 1:
            self._client.leave(device_stays=False)
        self.hand_over()

    def hand_over(self) -> None:
        """The next driver adopts the pump, also where it would die with us."""
        self._watchdog.close()
        self._client.close()

    def fileno(self) -> int:
        return self._client.fileno()

    def news(self) -> None:
        log.warning("The packet pump has ended: %s", self._client.news())

    @property
    def next_look(self) -> float:
        return self._watchdog.next_look

    def look(self) -> bool:
        return self._watchdog.look()

    def _announce(self, running: Running) -> None:
        self._announced = True
        plane, why, pid = running.plane, running.why, running.pid
        if not self._client.has_usual_name:
            name = rendezvous.address_of(running.settings.tun).replace("\0", "@")
            log.warning("Another process poses as the pump, at %s; `ss -xlp` names it", name)
        log.info("Packets go through the %s data plane: %s; process %d", plane, why, pid)


class PeersDriver:
    """Tells the pump about peers, many at a time."""

    handles: type = PumpPeer

    def __init__(self, client: Client, tun: str) -> None:
        self._client = client
        self._tun = tun

    def read(self) -> Iterator[PumpPeer]:
        for subnet, endpoint in self._client.peers():
            yield PumpPeer(self._tun, subnet, endpoint)

    def put(self, resource: PumpPeer) -> None:
        self.put_all((resource,))

    def drop(self, resource: PumpPeer) -> None:
        self.drop_all((resource,))

    def put_all(self, resources: Sequence[PumpPeer]) -> None:
        self._client.put((peer.subnet, peer.endpoint) for peer in resources)

    def drop_all(self, resources: Sequence[PumpPeer]) -> None:
        self._client.drop((peer.subnet, peer.endpoint) for peer in resources)

    def close(self) -> None:
        """What it knows is the pump's to keep."""
