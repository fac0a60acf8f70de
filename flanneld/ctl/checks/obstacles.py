"""Checks of what stands where a lease leads to (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, check


@check("J", "unsafe leases", "no lease claims a network or an address of this host")
def unsafe_leases(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer["state"] == "unsafe":
            yield Finding(
                f"the lease {','.join(peer['subnets'])} would harm this host",
                peer["reason"].partition("; ")[0],
                "the daemon withdrew the routes to its node: containers there are not reached from here",
                Advice(
                    "give this host's own network other addresses, outside Network, or the node another"
                    " subnet; delete the lease only if its node is gone; the daemon follows by itself"
                ),
            )
