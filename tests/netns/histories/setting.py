"""In what kind of network a history takes place, and the peers that may be there."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from tests.netns.charons import IPSEC

NETWORKS = {4: "10.5.0.0/16", 6: "fc00:5::/48"}
#: The part of it that the peers have; our own subnet is elsewhere.
PEERS = {4: IPv4Network("10.5.0.0/19"), 6: IPv6Network("fc00:5::/59")}
#: What our node gets at least.
FIRST_OWN = {4: "10.5.100.0", 6: "fc00:5:0:100::"}
#: The node itself, and hosts on its link; others are behind its gateway.
OURS = {4: "198.18.0.1", 6: "fd00:18::1"}
GATEWAY = {4: "198.18.0.254", 6: "fd00:18::fe"}
UPLINK = "eth0"
DEVICES = {
    "vxlan": {4: "flannel.1", 6: "flannel-v6.1"},
    "udp": {4: "flannel0"},
    "ipip": {4: "flannel.ipip"},
    "wireguard": {4: "flannel-wg"},
    "ipsec": {4: "flannel-ipsec"},
    "host-gw": dict[int, str](),
    "extension": dict[int, str](),
}

#: The peers that come and go, and those that are always there unless the store loses them.
PLAYERS = range(1, 7)
CROWD = range(16, 28)


@dataclass(frozen=True, slots=True)
class Setting:
    """``api`` is that of etcd; ``native`` says that the rules are in a table of our own in nftables.

    If they are not, ``flavour`` is that of iptables: "nft" or "legacy".
    """

    name: str
    backend: Mapping[str, Any]
    api: str = "v3"
    families: tuple[int, ...] = (4,)
    native: bool = False
    flavour: str = "nft"

    @property
    def type(self) -> str:
        return str(self.backend["Type"])

    @property
    def is_direct(self) -> bool:
        """Whether peers on our link are led to without the tunnel."""
        return bool(self.backend.get("DirectRouting"))

    @property
    def devices(self) -> dict[int, str]:
        """The device that leads to the peers, by family."""
        return {family: name for family, name in DEVICES[self.type].items() if family in self.families}

    @property
    def hosts(self) -> tuple[int, ...]:
        """The numbers of the hosts on which players may be; without a tunnel only those on our link."""
        return (101, 102, 103, 300) if self.devices else (101, 102, 103)

    @property
    def network_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"Network": NETWORKS[4], "Backend": self.backend, "SubnetMin": FIRST_OWN[4]}
        if 6 in self.families:
            config |= {"EnableIPv6": True, "IPv6Network": NETWORKS[6], "IPv6SubnetMin": FIRST_OWN[6]}
        return config | {"EnableNFTables": self.native}

    def lease(self, number: int) -> str:
        """What a peer's lease is called: ``10.5.7.0/24`` or ``10.5.7.0/24&fc00:5:0:7::/64``."""
        names = {4: f"10.5.{number}.0/24", 6: f"fc00:5:0:{number:x}::/64"}
        return "&".join(names[family] for family in self.families)

    def attributes(self, host: int, mac: int) -> dict[str, Any]:
        """What a peer announces; ``mac`` is the number of its MAC address or key."""
        found: dict[str, Any] = {"PublicIP": address(4, host)}
        if 6 in self.families:
            found["PublicIPv6"] = address(6, host)
        if self.type != "udp":
            found["BackendType"] = self.type
        if self.type == "vxlan":
            found["BackendData"] = {"VtepMAC": f"02:00:00:00:01:{mac:02x}"}
            if 6 in self.families:
                found["BackendV6Data"] = {"VtepMAC": f"02:06:00:00:01:{mac:02x}"}
        if self.type == "wireguard":
            found["BackendData"] = {"PublicKey": public_key(mac), "Port": 51820}
        return found


def public_key(number: int) -> str:
    """A key of WireGuard. Nobody has the private one."""
    return b64encode(bytes([number]) * 32).decode()


def address(family: int, host: int) -> str:
    """A host's address. Those from 256 on are not on our link."""
    link, number = (18, host) if host < 256 else (19, host - 256)
    return f"198.{link}.0.{number}" if family == 4 else f"fd00:{link}::{number:x}"


def home(number: int) -> str:
    """The address of a host that is connected to a peer's subnet."""
    return f"10.5.{number}.1/24"


def nets(lease: str) -> dict[int, Any]:
    """A lease's subnets by family."""
    found = [ip_network(name) for name in lease.split("&")]
    return {net.version: net for net in found}


#: Routes as those of host-gw, made by commands.
EXTENSION = {
    "Type": "extension",
    "SubnetAddCommand": f"ip route replace $SUBNET via $PUBLIC_IP dev {UPLINK}",
    "SubnetRemoveCommand": f"ip route del $SUBNET via $PUBLIC_IP dev {UPLINK}",
    "CheckCommand": f"ip route show exact $SUBNET via $PUBLIC_IP dev {UPLINK} | grep -q .",
}
SETTINGS = (
    Setting("vxlan", {"Type": "vxlan"}),
    Setting("host-gw", {"Type": "host-gw"}, api="v2"),
    Setting("vxlan-direct", {"Type": "vxlan", "DirectRouting": True}, api="v2", native=True),
    Setting("vxlan-dual", {"Type": "vxlan"}, families=(4, 6), native=True),
    Setting("host-gw-dual", {"Type": "host-gw"}, families=(4, 6), flavour="legacy"),
    Setting("udp", {"Type": "udp"}, api="v2"),
    Setting("ipip-direct", {"Type": "ipip", "DirectRouting": True}),
    Setting("wireguard", {"Type": "wireguard"}),
    Setting("ipsec", IPSEC, api="v2"),
    Setting("extension", EXTENSION),
)
