"""Question whether a host refuses a port, as far as it says so: by ICMP for UDP (RFC 792), by RST for TCP."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice

from flanneld.model import IPAddress
from flanneld.runtime import clock, waits

#: tcpmux, at which nothing listens: a host that drops ICMP still refuses it, and so shows that it is reached.
_CLOSED = 1
#: Sockets at once; a process may have 1,024 descriptors.
_MOST = 500


def reached(targets: Iterable[IPAddress], within: float) -> set[IPAddress]:
    """Return the hosts that refuse TCP: packets get there and back. Of many the first 500 are asked."""
    return refused(((each, _CLOSED) for each in islice(targets, _MOST)), within, socket.SOCK_STREAM)


def refused(
    targets: Iterable[tuple[IPAddress, int]], within: float, kind: int = socket.SOCK_DGRAM
) -> set[IPAddress]:
    """Send an empty datagram or SYN to each target; return the hosts that refuse it ``within`` seconds.

    An open port gives no answer, and neither does a filter that drops: only a refusal tells something.
    """
    found: set[IPAddress] = set()
    waiting: dict[int, tuple[IPAddress, socket.socket]] = {}
    with ExitStack() as stack:
        for address, port in targets:
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            asker = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK))
            try:
                asker.connect((str(address), port))
                asker.send(b"")
            except BlockingIOError:  # TCP goes on connecting
                pass
            except ConnectionRefusedError:
                found.add(address)
                continue
            except OSError:
                continue
            waiting[asker.fileno()] = (address, asker)
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
