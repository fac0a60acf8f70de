"""Faults of wireguard and ipsec: keys, peers, policies, charon, and filters for their packets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.faults.cluster import OTHER, gone
from tests.faults.fault import (
    BEHIND,
    Fault,
    configured,
    listener,
    no_listener,
    nothing_missing,
    on_peer,
    ready,
    restart,
    restarted_with,
    start,
    start_in_vain,
    stop,
    without_charon,
)
from tests.faults.firewall import flushed
from tests.faults.world import IPSEC, VXLAN_XFRM, WIREGUARD, Step, World
from tests.lab import wait_for
from tests.netns.charons import charon_of

DEVICE = "flannel-wg"
START = "start the daemon"
BLOCK, UNBLOCK = "ip xfrm policy add ", "ip xfrm policy delete "
#: Selector of a policy that lets packets to some peers leave unencrypted.
OPEN = "src 10.5.0.0/16 dst 10.5.128.0/17 dir out"


def without_sessions(world: World) -> None:
    """Let all sessions of both nodes end, as after a reboot: one lasts for three minutes."""
    for node in (world.node, world.peer):
        node.run("ip", "link", "del", DEVICE)
    if world.peer.running:
        wait_for(lambda: world.peer.link(DEVICE), what="the device of the peer")


def lease_with_key(key: str) -> Step:
    def act(world: World) -> None:
        data = {"PublicKey": key.format(**world.words), "Port": 51820}
        attributes = {"PublicIP": "198.18.0.203", "BackendType": "wireguard", "BackendData": data}
        world.lab.etcd.put_lease(OTHER, attributes)
        world.wait_for_peer(OTHER)

    return act


def to_charon(number: signal.Signals) -> Callable[[World], None]:
    def act(world: World) -> None:
        os.kill(charon_of(world.node), number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            wait_for(lambda: not charon_of(world.node), what="charon to end")

    return act


FAULTS = {
    "XFRM blocks what has no policy": Fault(
        "filters",
        "UDP 8472 from its peers: the XFRM policies for input",
        ("ip xfrm policy setdefault in block",),
        heal=("ip xfrm policy setdefault in accept",),
    ),
    "XFRM blocks what is passed on without a policy": Fault(
        "filters",
        "packets of its containers to other nodes: the XFRM policies for forward",
        ("ip xfrm policy setdefault fwd block",),
        heal=("ip xfrm policy setdefault fwd accept",),
        peer_sees=BEHIND,
    ),
    "policy of XFRM that blocks packets of containers": Fault(
        "filters",
        "src 10.5.0.0/16 dst 10.5.0.0/16 action block",
        (BLOCK + "src 10.5.0.0/16 dst 10.5.0.0/16 dir fwd action block",),
        VXLAN_XFRM,
        heal=(UNBLOCK + "src 10.5.0.0/16 dst 10.5.0.0/16 dir fwd",),
        advice=UNBLOCK + "index",
        peer_sees=BEHIND,
    ),
    "policy of XFRM that blocks the tunnel": Fault(
        "filters",
        "src {peer}/32 dst 0.0.0.0/0 proto udp dport 8472 action block",
        (BLOCK + "src {peer} proto udp dport 8472 dir in action block",),
        VXLAN_XFRM,
        heal=(UNBLOCK + "src {peer} proto udp dport 8472 dir in",),
        advice=UNBLOCK + "index",
    ),
    "policy of XFRM that wants packets encrypted, without an SA": Fault(
        "filters",
        "src {node}/32 dst {peer}/32 tmpl dst {peer} proto esp without state action allow",
        (BLOCK + "src {node} dst {peer} dir out tmpl src {node} dst {peer} proto esp mode transport",),
        VXLAN_XFRM,
        heal=(UNBLOCK + "src {node} dst {peer} dir out",),
        advice=UNBLOCK + "index",
    ),
    "INPUT drops the port, wireguard": Fault(
        "filters",
        "UDP 51820 from its peers",
        ("iptables-nft -A INPUT -p udp --dport 51820 -j DROP",),
        WIREGUARD,
        after=flushed("filter", "INPUT"),
    ),
    "INPUT of the peer drops the port, wireguard": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (on_peer("iptables-nft -A INPUT -p udp --dport 51820 -j DROP"),),
        WIREGUARD,
        heal=(on_peer("iptables-nft -F INPUT"),),
        advice="let the network between pass UDP 51820",
        peer_sees="filters",
        peer_says="UDP 51820 from its peers",
        is_long=True,
    ),
    "peer's device gone": Fault(
        "handshakes",
        "the node refuses the packets",
        (lambda world: world.peer.stop(), without_sessions),
        WIREGUARD,
        heal=(lambda world: world.start(world.peer), lambda world: world.peer.wait_ready()),
        advice="see that flanneld runs there",
        peer_sees="devices",
        peer_says=f"{DEVICE} is not there",
    ),
    "another PSK, wireguard": Fault(
        "handshakes",
        "no handshake with the node of {subnet}",
        (restarted_with(PSK="YW5vdGhlciBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="), without_sessions),
        WIREGUARD,
        heal=(start,),
        advice="the PSK is the same on both nodes",
        peer_sees="handshakes",
    ),
    "another key in the device while the daemon is stopped": Fault(
        "missing",
        "key {own_key} ",
        (stop, "wg genkey >{directory}/other", f"wg set {DEVICE} private-key {{directory}}/other"),
        WIREGUARD,
        heal=(start,),
        advice=START,
    ),
    "another port of the device while the daemon is stopped": Fault(
        "missing",
        "listen-port 51820",
        (stop, f"wg set {DEVICE} listen-port 51999"),
        WIREGUARD,
        cuts=None,
        heal=(start,),
        advice=START,
        is_long=True,
    ),
    "peer removed from the device while the daemon is stopped": Fault(
        "missing",
        "peer {key} ",
        (stop, f"wg set {DEVICE} peer {{key}} remove"),
        WIREGUARD,
        heal=(start,),
        advice=START,
    ),
    "device deleted while the daemon is stopped, wireguard": Fault(
        "devices",
        f"{DEVICE} is not there",
        (stop, f"ip link del {DEVICE}"),
        WIREGUARD,
        heal=(start,),
        advice=START,
        is_long=True,
    ),
    "MTU of the device while the daemon is stopped, wireguard": Fault(
        "devices",
        "has mtu 1300, wanted 1420",
        (stop, f"ip link set {DEVICE} mtu 1300"),
        WIREGUARD,
        cuts=False,
        after=(start,),
    ),
    "port taken by another program": Fault(
        "refused",
        "(python3) has UDP port 51820",
        (stop, f"ip link del {DEVICE}", listener(51820), restart()),
        WIREGUARD,
        heal=(no_listener, ready),
        advice="-wireguard-port",
    ),
    "lease with our key": Fault(
        "cloned keys",
        f"the node of {OTHER} has our key",
        (lease_with_key("{own_key}"),),
        WIREGUARD,
        cuts=False,
        heal=(gone(OTHER),),
        advice="remove the key file",
    ),
    "PSK that is no key, wireguard": Fault(
        "start",
        "flanneld cannot start: Error registering network: could not parse psk: the key is no base64",
        (stop, configured(PSK="no key"), start_in_vain),
        WIREGUARD,
        cuts=False,
        heal=(configured(), start),
        advice="make one with `wg genpsk`",
        is_long=True,
    ),
    "key file without a key": Fault(
        "start",
        "flanneld cannot start: Error registering network: could not parse private key from file: "
        "the key is no base64",
        (stop, "echo no key >{directory}/wgkey", start_in_vain),
        WIREGUARD,
        cuts=False,
        heal=("rm {directory}/wgkey", start),
        advice="remove the file to have a key made",
    ),
    "key file that cannot be read": Fault(
        "ready",
        "cannot keep the key in {directory}/wgkey",
        (stop, "rm {directory}/wgkey; mkdir {directory}/wgkey", restart()),
        WIREGUARD,
        cuts=False,
        heal=("rmdir {directory}/wgkey",),
        advice="let flanneld read this file",
        is_long=True,
    ),
    "route past the encryption": Fault(
        "bypass",
        "{base}/25",
        ("ip route add {base}/25 via {gateway} dev eth0",),
        WIREGUARD,
        heal=("ip route del {base}/25 dev eth0",),
        advice="ip route del",
    ),
    "policy past the encryption": Fault(
        "bypass",
        f"{OPEN} priority 100 action allow",
        (f"ip xfrm policy add {OPEN} priority 100",),
        IPSEC,
        cuts=False,
        heal=(f"ip xfrm policy delete {OPEN}",),
        advice=f"ip xfrm policy delete {OPEN}",
    ),
    "INPUT drops ESP": Fault(
        "filters",
        "IP protocol 50 from its peers",
        ("iptables-nft -A INPUT -p esp -j DROP",),
        IPSEC,
        after=flushed("filter", "INPUT"),
    ),
    "INPUT drops the port of IKE": Fault(
        "filters",
        "UDP 500 from its peers",
        ("iptables-nft -A INPUT -p udp --dport 500 -j DROP",),
        IPSEC,
        cuts=False,
        after=flushed("filter", "INPUT"),
    ),
    "INPUT of the peer drops ESP": Fault(
        "tunnel",
        "no packet comes back through the tunnel to {peer}",
        (on_peer("iptables-nft -A INPUT -p esp -j DROP"),),
        IPSEC,
        heal=(on_peer("iptables-nft -F INPUT"),),
        advice="IP protocol 50",
        peer_sees="filters",
        peer_says="IP protocol 50 from its peers",
        is_long=True,
    ),
    "policies flushed while the daemon is stopped": Fault(
        "missing",
        "policy",
        (stop, "ip xfrm policy flush"),
        IPSEC,
        heal=(start,),
        advice=START,
        is_long=True,
    ),
    "device deleted while the daemon is stopped, ipsec": Fault(
        "devices",
        "flannel-ipsec is not there",
        (stop, "ip link del flannel-ipsec"),
        IPSEC,
        heal=(start,),
        advice=START,
    ),
    "charon killed while the daemon is stopped": Fault(
        "charon",
        "charon does not run",
        (stop, to_charon(signal.SIGKILL)),
        IPSEC,
        cuts=False,
        heal=(start,),
        advice="start flanneld",
    ),
    "charon is not installed": Fault(
        "charon",
        "charon is not installed",
        # A charon that was killed before leaves SAs, over which packets flow on until they expire.
        (stop, to_charon(signal.SIGTERM), "ip xfrm state flush", without_charon, start_in_vain),
        IPSEC,
        heal=(nothing_missing, start),
        advice="apt-get install strongswan-charon strongswan-swanctl libstrongswan-standard-plugins",
        peer_sees="tunnel or handshakes",
    ),
    "PSK shorter than 96 characters": Fault(
        "start",
        "flanneld cannot start: Error registering network: config error, password should be at least 96 "
        "characters long",
        (stop, configured(PSK="too short"), start_in_vain),
        IPSEC,
        cuts=False,
        heal=(configured(), start),
        advice="set Backend.PSK",
    ),
    "charon hangs": Fault(
        "charon",
        "charon does not answer",
        (stop, to_charon(signal.SIGSTOP)),
        IPSEC,
        cuts=False,
        heal=(to_charon(signal.SIGCONT), start),
        advice="wait 20 s",
        is_long=True,
    ),
    "another PSK, ipsec": Fault(
        "handshakes",
        "charon says of {peer}",
        (stop, to_charon(signal.SIGTERM), restarted_with(PSK="another secret, which no log may show, " * 3)),
        IPSEC,
        peer_sees="tunnel or handshakes",
        is_long=True,
        heal=(start,),
        advice="give all nodes one PSK",
    ),
    "another ESPProposal": Fault(
        "handshakes",
        "charon says of {peer}",
        (restarted_with(ESPProposal="aes256-sha256"),),
        IPSEC,
        peer_sees="tunnel or handshakes",
        is_long=True,
        heal=(start,),
        advice="give all nodes one ESPProposal",
    ),
}
