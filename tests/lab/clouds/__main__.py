"""``python -m tests.lab.clouds KIND``: a cloud and the router of its VPC in this namespace, until killed.

The API is at ADDRESS:8080 and the metadata service at its real address. The kernel's routes here follow the
cloud's table, so packets between containers pass if, and only if, the table says so.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from tests.lab.clouds.control import CloudControl
from tests.lab.clouds.kinds import METADATA, make_cloud
from tests.lab.clouds.service import served
from tests.lab.kube_api.calls import serve

_PORT = 8080
#: Seconds between two looks at the table.
_PERIOD = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.clouds")
    parser.add_argument("kind")
    parser.add_argument("--address", required=True)
    parser.add_argument("--control", type=Path, required=True, help="unix socket for tests")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cloud = make_cloud(options.kind)
    hops: dict[str, str] = {}
    with ExitStack() as open_servers:
        open_servers.enter_context(served(cloud, options.address, _PORT))
        open_servers.enter_context(served(cloud, METADATA[options.kind], 80, metadata=True))
        threading.Thread(target=_route, args=(cloud, hops), daemon=True).start()
        serve(cast("Any", CloudControl(cloud, hops)), options.control)


def _route(cloud: Any, hops: dict[str, str]) -> None:
    """Keep the kernel's routes as the cloud's table has them; ``hops`` are addresses by next hop."""
    known: dict[str, str] = {}
    while True:
        wanted = {net: hops[hop] for net, hop in cloud.routes().items() if hop in hops}
        lines = [f"route del {net}" for net in known if net not in wanted]
        lines += [f"route replace {net} via {via}" for net, via in wanted.items() if known.get(net) != via]
        if lines:
            text = "\n".join(lines) + "\n"
            subprocess.run(["ip", "-force", "-batch", "-"], input=text, text=True, check=False)
        known = wanted
        time.sleep(_PERIOD)


if __name__ == "__main__":
    main()
