"""What a request that fails leaves behind: memory, and the server to ask next."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

from flanneld.errors import Retryable
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Send, Server, Servers, Transport
from flanneld.subnet.failover import ServerFailed


def test_a_failure_is_forgotten_without_the_garbage_collector() -> None:
    failures: list[weakref.ref[ServerFailed]] = []

    def fail(_server: Server, _send: Send) -> None:
        failure = ServerFailed("it broke the connection")
        failures.append(weakref.ref(failure))
        try:
            raise failure
        finally:
            del failure

    transport = Transport(Servers(EtcdOptions(("http://192.0.2.1:2379",))), EtcdTimeouts())
    gc.disable()
    try:
        with suppress(Retryable):
            transport.ask(fail)
        assert [failure() for failure in failures] == [None]
    finally:
        gc.enable()


def test_server_on_which_two_watches_fail_at_once_is_left_once() -> None:
    servers = Servers(EtcdOptions(("http://192.0.2.1:2379", "http://192.0.2.2:2379")))
    one, other = Transport(servers, EtcdTimeouts()), Transport(servers, EtcdTimeouts())
    bad, failed = servers.current, []

    def fail(server: Server, _send: Send) -> None:
        failed.append(server)
        if len(failed) == 1:
            with suppress(Retryable):
                other.ask(fail, repeatable=False)
        raise ServerFailed("it broke the connection")

    with suppress(Retryable):
        one.ask(fail, repeatable=False)
    assert failed == [bad, bad]
    assert servers.current is not bad
