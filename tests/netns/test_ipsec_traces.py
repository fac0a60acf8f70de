"""The quick look for policies that an ipsec backend may have left, on a real kernel."""

from __future__ import annotations

from flanneld.network.processes import has_xfrm_policies
from tests.lab import Lab


def test_any_policy_of_a_namespace_is_seen(lab: Lab) -> None:
    (node,) = lab.add_nodes()
    selector = ("src", "10.5.0.0/16", "dst", "10.5.0.0/16", "dir", "out")
    with node.namespace.entered():
        assert not has_xfrm_policies()
        node.run("ip", "xfrm", "policy", "add", *selector, "action", "block")
        assert has_xfrm_policies()
        node.run("ip", "xfrm", "policy", "delete", *selector)
        assert not has_xfrm_policies()
