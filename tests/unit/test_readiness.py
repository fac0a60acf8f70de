"""A start that has to wait for its store."""

from __future__ import annotations

import errno
import threading

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.network.rtnetlink.netlink import DumpInterrupted
from flanneld.runtime.process import Notifier
from flanneld.startup import Readiness


class Stop(threading.Event):
    """Lets nobody wait, and remembers for how long they wanted to."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


def test_the_store_is_asked_ever_more_rarely_and_not_by_all_nodes_at_once() -> None:
    stop = Stop()
    left = iter(range(40))

    def attempt() -> str:
        if next(left, None) is None:
            return "the config"
        raise Retryable("etcd does not answer", "wait")

    assert Readiness(stop, Notifier()).ask("the network config", attempt) == "the config"
    assert len(stop.pauses) == 40
    assert 0.4 <= stop.pauses[0] <= 0.8
    assert all(2.5 <= pause <= 5.0 for pause in stop.pauses[-20:])
    assert len(set(stop.pauses)) == 40


def test_a_node_is_ready_once_the_peers_are_known_and_the_subnet_file_is_written() -> None:
    readiness = Readiness(threading.Event(), Notifier())
    assert readiness.missing() == ["no lease yet"]
    readiness.hold("file", "cannot write /run/flannel/subnet.env: No space left on device")
    readiness.await_peers()
    readiness.complete()
    assert readiness.missing() == ["cannot write /run/flannel/subnet.env: No space left on device"]
    assert not readiness.is_ready()
    readiness.hold("file", "")
    assert readiness.is_ready()
    readiness.hold("file", "cannot write /run/flannel/subnet.env: No space left on device")
    assert not readiness.is_ready()


def test_the_wait_for_peers_ends_with_the_peers_the_time_or_a_stop() -> None:
    stop = threading.Event()
    readiness = Readiness(stop, Notifier())
    assert readiness.wait_for_peers(0.0)
    readiness.await_peers()
    readiness.complete()
    assert readiness.wait_for_peers(3600.0)
    readiness.await_peers()
    stop.set()
    assert not readiness.wait_for_peers(3600.0)


def test_what_the_start_waits_for_is_told_until_it_is_there() -> None:
    readiness = Readiness(Stop(), Notifier())
    seen: list[list[str]] = []

    def attempt() -> str:
        seen.append(readiness.waiting())
        if len(seen) < 3:
            raise Retryable("etcd answers, but has no network config at /config", "write it")
        return "the config"

    readiness.ask("the network config", attempt)
    waiting = "waiting for the network config: etcd answers, but has no network config at /config; write it"
    assert seen == [[], [waiting], [waiting]]
    assert readiness.waiting() == []


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            DumpInterrupted(errno.EINTR, "the table changed during the dump"),
            "the table changed during the dump",
        ),
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space available"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
)
def test_what_the_kernel_refuses_for_a_moment_is_asked_for_again(failure: OSError, told: str) -> None:
    readiness = Readiness(Stop(), Notifier())
    failures = iter((failure, failure))
    seen: list[str] = []

    def attempt() -> str:
        seen.extend(readiness.waiting())
        if (next_failure := next(failures, None)) is not None:
            raise next_failure
        return "the devices"

    assert readiness.patiently("the kernel", attempt) == "the devices"
    assert seen == [f"waiting for the kernel: this host refuses: {told}"] * 2


def test_a_limit_of_this_process_is_not_waited_out() -> None:
    def attempt() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(Fatal, match="out of file descriptors; raise the limit"):
        Readiness(Stop(), Notifier()).patiently("the kernel", attempt)
