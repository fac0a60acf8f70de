"""Question whether a host has a UDP port open, as far as it says so (RFC 792: port unreachable)."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack

from flanneld.model import IPAddress
from flanneld.runtime import clock, waits


def refused(targets: Iterable[tuple[IPAddress, int]], within: float) -> set[IPAddress]:
    """Send an empty datagram to each target; return the hosts that refuse it ``within`` seconds.

    An open port gives no answer, and neither does a filter that drops: only a refusal tells something.
    """
    found: set[IPAddress] = set()
    waiting: dict[int, tuple[IPAddress, socket.socket]] = {}
    with ExitStack() as stack:
        for address, port in targets:
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            asker = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
            try:
                asker.connect((str(address), port))
                asker.send(b"")
                waiting[asker.fileno()] = (address, asker)
            except ConnectionRefusedError:
                found.add(address)
            except OSError:
                continue
        began = clock.now()
        while waiting and (left := began + within - clock.now()) > 0:
            for fd in waits.some_readable(waiting, left):
                address, asker = waiting.pop(fd)
                try:
                    asker.recv(1)
                except ConnectionRefusedError:
                    found.add(address)
                except OSError:
                    continue
    return found
