"""What tests open to reach an etcd; all of it is closed when the test is over."""

from __future__ import annotations

from contextlib import ExitStack

from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport

opened = ExitStack()


def transport_to(*endpoints: str, timeouts: EtcdTimeouts, **options: str) -> Transport:
    """To servers that are asked in this order."""
    return transport_of(Servers(EtcdOptions(endpoints, **options), _leave), timeouts)


def transport_of(servers: Servers, timeouts: EtcdTimeouts) -> Transport:
    transport = Transport(servers, timeouts)
    opened.callback(transport.close)
    return transport


def _leave(_servers: list[object]) -> None:
    """As they are given."""
