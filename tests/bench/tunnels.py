"""Encrypted tunnels between two nodes, made by hand: the kernel's path without any daemon."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence

from tests.lab import Node

#: An address of a node on the wire between them.
AddressOf = Callable[[Node], str]

#: What is left of 1500 bytes; see docs/backends.md.
_MTU = {"wireguard": 1420, "ipsec": 1423}


def by_hand(backend: str, nodes: Sequence[Node], address_of: AddressOf) -> None:
    """Connect the nodes as the daemons do, but without charon, guards, or anything that looks after it."""
    for node in nodes:
        mtu = _MTU[backend]
        node.subnet_file.write_text(f"FLANNEL_SUBNET=10.5.{node.number}.1/24\nFLANNEL_MTU={mtu}\n")
    for node, other in zip(nodes, reversed(nodes), strict=True):
        MAKERS[backend](node, other, address_of)


def _wireguard(node: Node, other: Node, address_of: AddressOf) -> None:
    device = "flannel-wg"
    node.namespace.ip(f"link add {device} mtu {_MTU['wireguard']} type wireguard")
    keys = [b64encode(bytes([each.number]) * 32).decode() for each in (node, other)]
    private = node.directory / "private-key"
    private.write_text(keys[0])
    public = node.run("sh", "-c", f"echo {keys[1]} | wg pubkey").stdout.strip()
    peer = f"peer {public} allowed-ips 10.5.{other.number}.0/24 endpoint {address_of(other)}:51820"
    node.run("wg", "set", device, "listen-port", "51820", "private-key", str(private), *peer.split())
    node.namespace.ip(f"address add 10.5.{node.number}.0/32 dev {device}", f"link set {device} up")
    node.namespace.ip(f"route add 10.5.{other.number}.0/24 dev {device}")


def _ipsec(node: Node, other: Node, address_of: AddressOf) -> None:
    """Add SAs with the algorithm of ESPProposal's default: AES of 128 bits in GCM."""
    device = "flannel-ipsec"
    node.namespace.ip(f"link add {device} mtu {_MTU['ipsec']} type dummy", f"link set {device} up")
    for source, target in ((node, other), (other, node)):
        ends = f"src {address_of(source)} dst {address_of(target)}"
        key = "0x" + f"{source.number:02x}" * 20
        state = f"{ends} proto esp spi {0x1000 + source.number} reqid 11 mode tunnel replay-window 32"
        node.run("ip", "xfrm", "state", "add", *state.split(), "aead", "rfc4106(gcm(aes))", key, "128")
        selector = f"src 10.5.{source.number}.0/24 dst 10.5.{target.number}.0/24"
        for direction in ("out",) if source is node else ("in", "fwd"):
            policy = f"{selector} dir {direction} tmpl {ends} proto esp reqid 11 mode tunnel"
            node.run("ip", "xfrm", "policy", "add", *policy.split())
    node.namespace.ip(f"route add 10.5.{other.number}.0/24 dev {device}")


MAKERS: Mapping[str, Callable[[Node, Node, AddressOf], None]] = {"wireguard": _wireguard, "ipsec": _ipsec}
