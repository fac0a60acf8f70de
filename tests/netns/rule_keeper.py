"""The firewall task of the daemon alone: ``python -m tests.netns.rule_keeper '{"masquerade": true, ...}'``.

It runs until SIGTERM. On stdout it says when a step begins. With the first step it says that the rules have
been set and the chains of others read.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from ipaddress import ip_network
from typing import Any

from flanneld.compat import glog
from flanneld.errors import Fatal
from flanneld.network.firewall.rules import Nets, Purpose
from flanneld.reconcile.firewall import Firewall, FirewallSettings

STARTED, STEP = "-- started --", "-- step --"


def read_nets(pairs: list[tuple[str, str]]) -> tuple[Nets, ...]:
    return tuple(Nets(ip_network(network), ip_network(subnet)) for network, subnet in pairs)


def main(given: dict[str, Any]) -> int:
    glog.setup()
    if given.pop("without_python_iptables", False):
        sys.modules["iptc"] = None  # type: ignore[assignment]  # as if it were not installed
    nets, former = read_nets(given.pop("nets")), read_nets(given.pop("former", []))
    purpose = Purpose(given.pop("masquerade", True), given.pop("forward", True), given.pop("random", True))
    stop, has_begun = threading.Event(), threading.Event()

    def step(_: float) -> None:
        if not has_begun.is_set():
            has_begun.set()
            print(STARTED, flush=True)
        print(STEP, flush=True)

    firewall = Firewall(FirewallSettings(nets, former, purpose, **given), stop=stop, heartbeat=step)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        firewall.start()
    except Fatal as failure:
        print(failure, flush=True)
        return 1
    thread = threading.Thread(target=firewall.run)
    thread.start()
    stop.wait()
    firewall.cancel()
    thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
