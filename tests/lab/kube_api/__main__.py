"""``python -m tests.lab.kube_api``: one API server, until it is killed."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
from pathlib import Path

from tests.lab.kube_api.access import ROLES, Access
from tests.lab.kube_api.api import Api
from tests.lab.kube_api.calls import serve
from tests.lab.kube_api.control import Control
from tests.lab.kube_api.server import Server, tls_context
from tests.lab.kube_api.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.kube_api")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=6443)
    parser.add_argument("--control", type=Path, required=True, help="unix socket for tests")
    parser.add_argument("--journal", type=Path, help="file that keeps the objects; without it they are lost")
    parser.add_argument("--version", type=int, default=0, help="the resource version to start with, at least")
    parser.add_argument("--window", type=int, default=4096, help="changes that watches can catch up with")
    parser.add_argument("--certificates", type=Path, help="folder with ca.crt, server.crt, server.key")
    parser.add_argument("--anonymous", choices=ROLES, default="nobody", help="the role of who has no token")
    parser.add_argument("--token", default="", help="a token for flannel, good from the cluster's beginning")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    is_new = options.journal is None or not options.journal.exists()
    store = Store(options.journal, options.version, options.window)
    listener = socket.create_server((options.address, options.port), backlog=512)
    tls = tls_context(options.certificates) if options.certificates else None
    server = Server(listener, Api(store, Access(store, options.anonymous)), tls)
    control = Control(server)
    if options.token and is_new:
        control.put_token(options.token)
    threading.Thread(target=server.serve, daemon=True).start()
    serve(control, options.control)


if __name__ == "__main__":
    main()
