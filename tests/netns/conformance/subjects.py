"""All tables under test, each on a host of its own."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.suite import Subject
from tests.lab.namespace import Namespace
from tests.netns.conformance import backends, files, firewall, ipsec, kernel

#: Which of them need a feature of the kernel that only some hosts have.
NEEDS = {"WireGuard": "wireguard", "IPsec policies": "esp", "connections of charon": "esp"}

SUBJECTS: dict[str, Callable[[Namespace], Subject]] = {
    "links": kernel.Links,
    "addresses": kernel.Addresses,
    "neighbors": kernel.Neighbors,
    "fdb": kernel.Fdb,
    "tunnelled routes": kernel.TunnelledRoutes,
    "direct routes": kernel.DirectRoutes,
    "rules with iptables-nft": firewall.NftRules,
    "rules with iptables-legacy": firewall.LegacyRules,
    "rules with nftables": firewall.NativeRules,
    "peers of the udp proxy": backends.PumpPeers,
    "subnet.env": files.SubnetFile,
    "forwarding": files.Forwarding,
    "peers of the extension backend": backends.ExtensionPeers,
    "WireGuard": backends.WireGuardPeers,
    "IPsec policies": ipsec.XfrmPolicies,
    "connections of charon": ipsec.CharonConnections,
}
