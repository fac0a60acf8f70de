"""All tables under test, each on a host of its own."""

from __future__ import annotations

from collections.abc import Callable

from flanneld.backends.cloud.routes import CloudForwardingTable
from flanneld.backends.ipsec.tables import CharonTable, StaleCharonTable
from flanneld.diagnostics.plan import RecordingTable
from flanneld.network.firewall.guard import GuardTable
from tests.conformance.suite import Subject
from tests.lab.namespace import Namespace
from tests.netns.conformance import backends, clouds, files, firewall, ipsec, kernel

#: Which of them need a feature of the kernel that only some hosts have. A kernel with ESP has dummy devices.
NEEDS = {
    "dummy device": "esp",
    "ipip device": "ipip",
    "WireGuard device": "wireguard",
    "WireGuard": "wireguard",
    "IPsec policies": "esp",
    "connections of charon": "esp",
}

SUBJECTS: dict[str, Callable[[Namespace], Subject]] = {
    "links": kernel.Links,
    "TUN device": kernel.TunLink,
    "dummy device": kernel.DummyLink,
    "ipip device": kernel.IpipLink,
    "WireGuard device": kernel.WireGuardLink,
    "addresses": kernel.Addresses,
    "neighbors": kernel.Neighbors,
    "fdb": kernel.Fdb,
    "tunnelled routes": kernel.TunnelledRoutes,
    "direct routes": kernel.DirectRoutes,
    "guard routes": kernel.GuardRoutes,
    "rules with iptables-nft": firewall.NftRules,
    "rules with iptables-legacy": firewall.LegacyRules,
    "rules with nftables": firewall.NativeRules,
    "stale rules with iptables-nft": firewall.StaleNftRules,
    "process of the udp proxy": backends.PumpProcess,
    "peers of the udp proxy": backends.PumpPeers,
    "subnet.env": files.SubnetFile,
    "CNI configuration": files.CniConfFile,
    "forwarding": files.Forwarding,
    "startup of the extension backend": backends.ExtensionStartup,
    "peers of the extension backend": backends.ExtensionPeers,
    "WireGuard": backends.WireGuardPeers,
    "IPsec policies": ipsec.XfrmPolicies,
    "connections of charon": ipsec.CharonConnections,
    "routes in a cloud": clouds.Routes,
}

#: Tables without a subject, each with the reason.
EXEMPT: dict[type, str] = {
    RecordingTable: "reads what the table in it reads, and holds nothing: tests/netns/test_plan.py",
    GuardTable: "its rules need its set, which a case would not keep: tests/netns/test_guard.py",
    CharonTable: "each case would start charon often: tests/netns/test_ipsec.py",
    StaleCharonTable: "is there only while a charon is: tests/netns/test_switching_ipsec.py",
    CloudForwardingTable: "has one setting, and never drops it: tests/unit/backends/cloud/test_faults.py",
}
