"""Tables of backends under test: what is wanted of each, and what others do to it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace

from flanneld.backends.extension import tables as extension
from flanneld.backends.extension.backend import ConfigCommand, PeerSetup, Startup
from flanneld.backends.extension.backend import ConfigCommands as ExtensionCommands
from flanneld.backends.extension.journal import Journal
from flanneld.backends.udp import client as proxy_client
from flanneld.backends.udp.client import NoProxy, ProxyClient
from flanneld.backends.udp.control import ProxyPeer, UdpProxy
from flanneld.backends.udp.tables import ProxyPeerTable, ProxyTable
from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import AllowedIp, DeviceKey, WgPeer
from flanneld.backends.wireguard.table import WireGuardTable
from flanneld.network.rtnetlink import devices
from flanneld.runtime import waits
from flanneld.runtime.command import CommandRunner
from flanneld.state.resources import (
    Resource,
    Tun,
    WireGuard,
)
from flanneld.state.table import Put, Table
from tests.lab.namespace import Namespace, suspend
from tests.netns.conformance.host import OnHost

_WANTED_PROXY = UdpProxy(
    "flannel0", IPv4Address("192.0.2.1"), 8285, IPv4Address("10.1.5.0"), 1400, data_plane="python"
)


class PumpProcess(OnHost):
    """The process of a udp proxy."""

    resources = (_WANTED_PROXY,)
    drifts = ("kill it", "start it with another port")

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        devices.put(Tun(_WANTED_PROXY.tun, _WANTED_PROXY.mtu), None)
        self._made: list[ProxyTable] = []
        # A silent one is one that is slow, and this one is not.
        self._patience = patch.object(proxy_client, "ANSWER_PATIENCE", 0.5)

    def make(self) -> ProxyTable:
        self._made.append(ProxyTable(ProxyClient(_WANTED_PROXY.tun)))
        return self._made[-1]

    def do(self, command: str, *, check: bool = True) -> str:
        client = ProxyClient(_WANTED_PROXY.tun)
        try:
            if command == "kill it":
                pidfd = os.pidfd_open(client.hello().pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                assert waits.readable(pidfd, 10)
                os.close(pidfd)
            elif command == "start it with another port":
                client.start(replace(_WANTED_PROXY, port=8999))
        except NoProxy:
            if check:
                raise
        finally:
            client.close()
        return ""

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        """Have the proxy stopped: it may only be slow."""
        assert isinstance(table, ProxyTable)
        pid = table._client.hello().pid
        suspend(pid)
        try:
            with self._patience:
                yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        ProxyClient(_WANTED_PROXY.tun).leave(device_stays=False)
        for table in self._made:
            table.close(remove=False)


class PumpPeers(OnHost):
    """The peers of a udp proxy, a process on the host."""

    tun = _WANTED_PROXY.tun
    resources = (
        ProxyPeer("flannel0", IPv4Network("10.1.7.0/24"), IPv4Address("192.0.2.7")),
        ProxyPeer("flannel0", IPv4Network("10.1.8.0/24"), IPv4Address("192.0.2.8")),
        ProxyPeer("flannel0", IPv4Network("10.1.9.0/24"), IPv4Address("192.0.2.9")),
    )

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        devices.put(Tun(self.tun, 1400), None)
        self._pump = ProxyTable(ProxyClient(self.tun))
        assert self._pump.put([Put(_WANTED_PROXY)]).failed == []

    def make(self) -> ProxyPeerTable:
        return ProxyPeerTable(ProxyClient(self.tun), self.tun)

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        del table
        self._pump.drop(())
        yield

    def close(self) -> None:
        self._pump.drop(())
        self._pump.close(remove=False)


class ExtensionStartup(OnHost):
    """What PostStartupCommand has done: here a file. Only the daemon that ran it knows that it did."""

    can_be_blind = False
    writes_anew = True
    resources = (
        Startup(
            IPv4Network("10.1.0.0/16"), None, IPv4Network("10.1.5.0/24"), None, IPv4Address("192.0.2.1"), None
        ),
    )

    def make(self) -> extension.StartupTable:
        return extension.StartupTable(
            ConfigCommand("PostStartupCommand", "ip link show br5 || ip link add br5 type bridge"),
            ConfigCommand("ShutdownCommand", "ip link del br5"),
            ExtensionCommands(CommandRunner(threading.Event()).run, 20.0),
        )


class ExtensionPeers(OnHost):
    """What the commands of the extension backend have set up: here a file for each peer."""

    can_be_blind = False
    resources = tuple(
        PeerSetup(IPv4Network(f"10.1.{number}.0/24"), None, IPv4Address(f"192.0.2.{number}"), None, "data")
        for number in (7, 8, 9)
    )

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        self._peers = f"{self._directory.name}/peer-"
        self.drifts = (f"rm {self._peers}192.0.2.7", f"rm {self._peers}192.0.2.8 {self._peers}192.0.2.9")
        self.foreign = (f"touch {self._peers}192.0.2.66",)
        self.shows_foreign = f"ls {self._peers}192.0.2.66"
        # Each reading checks all peers.
        self._checks = patch.object(extension, "CHECK_PERIOD", 0.0)
        self._checks.start()

    def make(self) -> extension.PeerSetupTable:
        return extension.PeerSetupTable(
            ConfigCommand("SubnetAddCommand", f"cat >{self._peers}$PUBLIC_IP"),
            ConfigCommand("SubnetRemoveCommand", f"rm -f {self._peers}$PUBLIC_IP"),
            ConfigCommand("CheckCommand", f"[ -e {self._peers}$PUBLIC_IP ]"),
            ExtensionCommands(CommandRunner(threading.Event()).run, 20.0),
            Journal(Path(self._directory.name) / "journal", lambda: "base"),
        )

    def close(self) -> None:
        self._checks.stop()
        self._directory.cleanup()


class WireGuardPeers(OnHost):
    """Key, peers and allowed IPs of a WireGuard device."""

    device = "flannel-wg"

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        devices.put(WireGuard(self.device, 1420), None)
        own, *others = (keys.private_key(bytes([number]) * 32) for number in (1, 7, 8))
        self._key = DeviceKey(self.device, own, keys.public_key(own), 51820)
        publics = [keys.public_key(each) for each in others]
        self._peers = [
            WgPeer(self.device, public, ip_address(f"192.0.2.{number}"), 51820, keepalive=25)
            for number, public in zip((7, 8), publics, strict=True)
        ]
        nets = [
            AllowedIp(self.device, ip_network(net), public)
            for net, public in zip(("10.1.7.0/24", "fd00:0:0:8::/64"), publics, strict=True)
        ]
        self.resources = (*nets, self._key, *self._peers)
        seventh, eighth = map(keys.text_of, publics)
        stranger = keys.text_of(keys.public_key(keys.private_key(bytes([9]) * 32)))
        self.drifts = tuple(
            f"wg set {self.device} {change}"
            for change in (
                f"peer {seventh} remove",
                "listen-port 51999",
                "fwmark 7",
                f"peer {seventh} endpoint 192.0.2.99:51820",
                f"peer {eighth} persistent-keepalive 0",
                f"peer {eighth} allowed-ips 10.1.99.0/24",
                f"peer {eighth} allowed-ips fd00:0:0:8::/64,10.1.7.0/24",
                f"peer {stranger} allowed-ips 10.1.66.0/24",
            )
        )
        self.foreign = ("ip link add wg7 type wireguard",)
        self.shows_foreign = "ip -o link show dev wg7"

    def sensible(self, part: Sequence[Resource]) -> Sequence[Resource]:
        """The key always; what a peer may send only with the peer."""
        peers = {each.public_key for each in part if isinstance(each, WgPeer)}
        return [
            self._key,
            *(
                each
                for each in part
                if isinstance(each, WgPeer) or (isinstance(each, AllowedIp) and each.public_key in peers)
            ),
        ]

    def make(self) -> WireGuardTable:
        return WireGuardTable([self.device])

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        assert isinstance(table, WireGuardTable)
        assert table._kernel
        table._kernel.close()
        yield
