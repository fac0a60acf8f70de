"""One data plane in a process of its own, told over stdin what to do: one JSON list a line, one answer each.

python -m tests.netns.udp_plane '{"plane": "native", "bind": "198.18.0.1", "address": "10.5.1.0"}'
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import threading
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from flanneld.backends.udp.proxy import native
from flanneld.backends.udp.proxy.native import NativePlane
from flanneld.backends.udp.proxy.plane import Plane, Wire

DEVICE = "flannel0"
PORT = 8285
MTU = 1472


class CorruptingPlane:
    """Spoils a byte of every fiftieth long packet that it sends; knows one peer and nothing of TTLs."""

    name = "corrupting"

    def __init__(self, wire: Wire) -> None:
        self._tun, _ = native._attach(wire.tun, "none")
        self._socket = socket.socket(fileno=wire.socket)
        self._end = os.eventfd(0)
        self._endpoint: IPv4Address | None = None
        self._long = 0

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        del subnet
        self._endpoint = endpoint

    def drop_peer(self, subnet: IPv4Network) -> None:
        del subnet
        self._endpoint = None

    def run(self) -> None:
        tun, wire = self._tun.fileno(), self._socket.fileno()
        while True:
            ready, _, _ = select.select([tun, wire, self._end], [], [])
            if self._end in ready:
                break
            if tun in ready and (packet := self._tun.read(65535)) and self._endpoint:
                self._socket.sendto(self._spoilt(packet), (str(self._endpoint), PORT))
            if wire in ready:
                self._tun.write(self._socket.recv(65535))

    def _spoilt(self, packet: bytes) -> bytes:
        if len(packet) < 200:
            return packet
        self._long += 1
        return packet if self._long % 50 else packet[:150] + bytes([packet[150] ^ 0x20]) + packet[151:]

    def stop(self) -> None:
        os.eventfd_write(self._end, 1)

    def counters(self) -> dict[str, int]:
        return {"spoilt": self._long // 50}


def build(plane: str, bind: str, address: str, offloads: str = "all", accept_any: bool = False) -> Plane:
    ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.bind((bind, PORT))
    wire = Wire(DEVICE, ours.detach(), IPv4Address(address), MTU, PORT, accept_any)
    return NativePlane(wire, offloads) if plane == "native" else CorruptingPlane(wire)


class Runner:
    """Runs a plane in a thread and does what it is told meanwhile."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._plane.run()
        except OSError as error:
            self._failure = error

    def obey(self, command: str, *arguments: str) -> Any:
        match command:
            case "set":
                self._plane.set_peer(IPv4Network(arguments[0]), IPv4Address(arguments[1]))
            case "drop":
                self._plane.drop_peer(IPv4Network(arguments[0]))
            case "counters":
                return self._plane.counters()
            case "stop":
                self._plane.stop()
            case "offloads":
                return getattr(self._plane, "offloads", None)
            case "result":
                self._thread.join()
                return self._failure and errno.errorcode.get(self._failure.errno or 0)
            case _:
                raise ValueError(command)
        return None


def main() -> None:
    try:
        plane = build(**json.loads(sys.argv[1]))
    except OSError as error:
        print(json.dumps({"failed": errno.errorcode.get(error.errno or 0)}), flush=True)
        return
    runner = Runner(plane)
    print(json.dumps({"failed": None}), flush=True)
    for line in sys.stdin:
        print(json.dumps(runner.obey(*json.loads(line))), flush=True)
    plane.stop()


if __name__ == "__main__":
    main()
