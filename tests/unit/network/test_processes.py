"""Processes behind changes of the kernel and behind ports, as far as the kernel names them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from flanneld.network.processes import ChangeOrigins, find_owner, owner_of, process_at

# ---- authors of changes, by the port in a notification -------------------------------------------


def named_8(port: int) -> str:
    return "NetworkManager (pid 8)" if port == 8 else ""


def test_a_writer_is_asked_for_once_until_all_is_put_right() -> None:
    asked: list[int] = []

    def look(port: int) -> str:
        asked.append(port)
        return named_8(port)

    origins = ChangeOrigins(look)
    assert [origins.of(8), origins.of(8)] == ["NetworkManager (pid 8)"] * 2
    assert asked == [8]
    origins.forget()
    origins.of(8)
    assert asked == [8, 8]


@pytest.mark.parametrize("port", [0, 9], ids=["the kernel", "a process that is gone"])
def test_nobody_is_named_that_is_not_known(port: int) -> None:
    assert ChangeOrigins(named_8).of(port) == ""


def test_a_storm_of_writers_is_not_looked_into_without_end() -> None:
    asked: list[int] = []

    def look(port: int) -> str:
        asked.append(port)
        return "a writer"

    origins = ChangeOrigins(look)
    for port in range(1, 1000):
        origins.of(port)
        origins.of(port)
    assert asked == list(range(1, 17))


def listing(proc: Path, port: int, inode: int, protocol: int = 0) -> None:
    (proc / "self/net").mkdir(parents=True, exist_ok=True)
    head = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode"
    row = f"000000000e5aecf5 {protocol}   {port} 00000000 0 0 0 2 0 {inode}"
    (proc / "self/net/netlink").write_text(f"{head}\n{row}\n")


def process(proc: Path, pid: int, inode: int, name: str = "NetworkManager", command: str = "") -> None:
    (proc / f"{pid}/fd").mkdir(parents=True)
    (proc / f"{pid}/comm").write_text(f"{name}\n")
    (proc / f"{pid}/cmdline").write_text("".join(f"{word}\0" for word in command.split(" ")))
    (proc / f"{pid}/fd/3").symlink_to("/dev/null")
    (proc / f"{pid}/fd/4").symlink_to(f"socket:[{inode}]")


def test_the_process_that_holds_the_socket_is_named(tmp_path: Path) -> None:
    listing(tmp_path, 812, 4711)
    process(tmp_path, 812, 4711)
    assert process_at(812, tmp_path) == "NetworkManager (pid 812)"


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("ip", "ip route flush root 10.5.0.0/16", "`ip route flush root 10.5.0.0/16` (pid 812)"),
        ("ip", f"ip route del {'x' * 5000}", f"`ip route del {'x' * 64}...` (pid 812)"),
        ("ip", "ip \x1b[2J\nE1123", "`ip \\x1b[2J\\nE1123` (pid 812)"),
        ("ip", "", "ip (pid 812)"),
        ("vpn", "vpn --password=secret", "vpn (pid 812)"),
    ],
    ids=["a tool", "a long one", "control characters", "none to read", "arguments that may be secret"],
)
def test_of_network_tools_the_command_is_shown(
    name: str, command: str, expected: str, tmp_path: Path
) -> None:
    listing(tmp_path, 812, 4711)
    process(tmp_path, 812, 4711, name, command)
    assert process_at(812, tmp_path) == expected


def test_a_process_of_that_number_without_the_socket_is_another_one(tmp_path: Path) -> None:
    listing(tmp_path, 812, 4711)
    process(tmp_path, 812, 4712)
    assert process_at(812, tmp_path) == ""


def test_a_socket_of_another_protocol_is_not_the_one(tmp_path: Path) -> None:
    listing(tmp_path, 812, 4711, protocol=15)
    process(tmp_path, 812, 4711)
    assert process_at(812, tmp_path) == ""


def test_a_name_that_would_write_to_a_terminal_is_left_out(tmp_path: Path) -> None:
    listing(tmp_path, 812, 4711)
    process(tmp_path, 812, 4711, name="\x1b[2J")
    assert process_at(812, tmp_path) == "pid 812"


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert process_at(812, tmp_path) == ""


def test_a_process_is_known_by_its_port() -> None:
    opens = "import socket; s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))"
    tells = "print(s.getsockname()[0], flush=True); input()"
    command = [sys.executable, "-c", f"{opens}; {tells}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        port = int(writer.stdout.readline())
        assert process_at(port).endswith(f" (pid {writer.pid})")
        writer.communicate("\n")
    assert process_at(port) == ""


# ---- owners of UDP ports, with real sockets of this process --------------------------------------


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
