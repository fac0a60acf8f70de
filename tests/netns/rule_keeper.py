"""The firewall task of the daemon alone: ``python -m tests.netns.rule_keeper '{"masquerade": true, ...}'``.

It runs until SIGTERM. On stdout it says when a step ends. The first one has read the chains of others, after
the rules were set.
"""

from __future__ import annotations

import _thread
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from ipaddress import ip_address, ip_network
from typing import Any

from flanneld.compat import glog
from flanneld.errors import Fatal
from flanneld.network.firewall.rules import Nets, Purpose
from flanneld.reconcile.firewall import Firewall, FirewallSettings
from flanneld.runtime import clock
from flanneld.runtime.supervisor import StepLoop

STARTED, STEP = "-- started --", "-- step --"


def read_nets(pairs: list[tuple[str, str]]) -> tuple[Nets, ...]:
    return tuple(Nets(ip_network(network), ip_network(subnet)) for network, subnet in pairs)


def with_spared(nets: tuple[Nets, ...], spared: list[str]) -> tuple[Nets, ...]:
    return tuple(each.sparing(map(ip_network, spared)) for each in nets) if spared else nets


def main(given: dict[str, Any]) -> int:
    glog.setup()
    if given.pop("without_python_iptables", False):
        sys.modules["iptc"] = None  # type: ignore[assignment]  # as if it were not installed
    nets, former = read_nets(given.pop("nets")), read_nets(given.pop("former", []))
    purpose = Purpose(given.pop("masquerade", True), given.pop("forward", True), given.pop("random", True))
    nets, nodes = with_spared(nets, given.pop("spared", [])), given.pop("nodes", None)
    addresses = None if nodes is None else lambda: list(map(ip_address, nodes)) or None
    stop = threading.Event()

    has_begun = threading.Event()

    def loop(
        _name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple
    ) -> StepLoop:
        def told(now: float) -> float:
            due = step(now)
            print(STEP if has_begun.is_set() else STARTED, firewall.problem, flush=True)
            has_begun.set()
            return due

        return StepLoop(told, sources, stop=stop, heartbeat=lambda _: None)

    settings = FirewallSettings(nets, former, purpose, **given)
    firewall = Firewall(settings, stop=stop, make_loop=loop, nodes=addresses)
    # By a thread: the handler may interrupt the wait below while it holds the lock of ``stop``.
    signal.signal(signal.SIGTERM, lambda *_: _thread.start_new_thread(stop.set, ()))
    try:
        firewall.prepare(clock.now())
        firewall.leases_changed()
    except Fatal as failure:
        print(failure, flush=True)
        return 1
    thread = threading.Thread(target=firewall.run)
    thread.start()
    while not stop.wait(0.2):  # one without end is not ended by a signal that comes just before it
        pass
    firewall.cancel()
    thread.join()
    firewall.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
