"""Owners of UDP ports, with real sockets of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from flanneld.network.processes import find_owner, owner_of

ME = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


@contextmanager
def bound(address: str, *, v6_only: bool = False) -> Iterator[int]:
    """Bind a free port of an address; yield the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as holder:
        if v6_only:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("127.0.0.1", None),
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", None),
        ("::1", "::1"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_process_with_the_port_is_named_with_pid_and_command(address: str, wanted: str | None) -> None:
    with bound(address) as port:
        assert find_owner(port, ip_address(wanted) if wanted else None, ["vxlan9"]) == ME


@pytest.mark.parametrize(("address", "wanted"), [("127.0.0.1", "127.0.0.2"), ("::1", "::2")])
def test_process_with_the_port_at_another_address_is_not_named(address: str, wanted: str) -> None:
    with bound(address) as port:
        assert find_owner(port, ip_address(wanted)) == ""


def test_port_of_no_process_is_that_of_the_devices_or_unknown() -> None:
    with bound("127.0.0.1") as port:
        pass
    assert find_owner(port) == ""
    assert find_owner(port, devices=["vxlan9"]) == "the device vxlan9"
    assert f"ss -anup sport = {port}" in owner_of(port)
