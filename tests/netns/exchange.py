"""Data between two containers, checked by content: TCP both ways at once, and UDP of many sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab import Container, wait_for

TCP_PORT, UDP_PORT = 7001, 7002

ECHO = f"""
import socket, threading
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.close()
def accept():
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", {UDP_PORT}))
listener = socket.create_server(("0.0.0.0", {TCP_PORT}))
threading.Thread(target=accept, daemon=True).start()
while True:
    udp.sendto(*udp.recvfrom(65535))
"""

#: Writes of odd sizes, so that segments end anywhere. What comes back shows that both directions are sound.
TALK = f"""
import hashlib, json, os, random, socket, sys, threading
target, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
def tcp():
    data, got = os.urandom(size), hashlib.sha256()
    connection = socket.create_connection((target, {TCP_PORT}), 60)
    connection.settimeout(120)
    def write():
        at = 0
        while at < size:
            step = choose.choice((1, 13, 999, 1431, 1432, 5001, 65535, 200000))
            connection.sendall(data[at : at + step])
            at += step
        connection.shutdown(socket.SHUT_WR)
    writer = threading.Thread(target=write)
    writer.start()
    while part := connection.recv(65536):
        got.update(part)
    writer.join()
    return got.digest() == hashlib.sha256(data).digest()
def udp(length):
    # A datagram may get lost on any network; three in a row do not.
    for _ in range(3):
        data = os.urandom(length)
        talker.sendto(data, (target, {UDP_PORT}))
        try:
            while (back := talker.recv(65535)) != data:
                if len(back) == length:
                    return False
            return True
        except TimeoutError:
            pass
    return False
talker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
talker.settimeout(10)
SIZES = [0, 1, 2, 3, 63, 64, 65, 1400, 1443, 1444, 1445, 1472, 2000, 2888, 3000, 9001, 30001, 65000]
sizes = SIZES + [choose.randrange(1, 1445) for _ in range(60)]
lost = [length for length in sizes if not udp(length)]
print(json.dumps({{"tcp": [tcp() for _ in range(3)], "udp": lost, "sizes": len(sizes)}}))
"""


@contextmanager
def echo(server: Container, output: Path) -> Iterator[None]:
    """A server in this container that says back what it hears."""
    with output.open("wb") as file:
        process = server.namespace.start(sys.executable, "-c", ECHO, output=file)
    try:
        wait_for(lambda: f":{TCP_PORT}" in server.run("ss", "-Hltn").stdout, what="the echo server")
        yield
    finally:
        process.kill()
        process.wait()


def check_content(client: Container, server: Container, output: Path, *, size: int = 2 << 20) -> None:
    """See that three TCP streams and 78 sizes of UDP datagrams come back as they were sent."""
    with echo(server, output):
        command = (sys.executable, "-c", TALK, server.address, str(size), "1")
        done: subprocess.CompletedProcess[str] = client.run(*command, timeout=600)
    assert json.loads(done.stdout) == {"tcp": [True] * 3, "udp": [], "sizes": 78}
