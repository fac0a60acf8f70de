"""Guard of the tunnel: only nodes with a lease reach its port, by a set of their public IPs in nftables.

Each family has a table ``flannel-guard``. A node is admitted before the routes to it are made, and until they
are gone. The rule is set with the first list of all leases: until then everything passes, and after a restart
what passed before. A drop in any table is final, so this serves with rules in iptables, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from typing import ClassVar

from msgspec import Struct

from flanneld.errors import Fatal
from flanneld.model import FAMILIES, Family, IPAddress, Lease
from flanneld.network.firewall.driver import Unavailable
from flanneld.network.firewall.netlink import Netfilter, has_guard
from flanneld.network.firewall.nftables import load, run
from flanneld.network.firewall.rules import NFT_FAMILY
from flanneld.state.resources import GUARD, GUARDS, Key, Kind, Resource
from flanneld.state.table import Claim, Put, Report, Scope, Seen, Table

_SET, _CHAIN = "nodes", "input"
#: Seconds between two readings: what others remove is no loss of packets.
_AUDIT = 30.0
_IPIP = 4


class Admitted(Struct, frozen=True, gc=False):
    """Node whose packets the guard lets in."""

    kind: ClassVar[Kind] = Kind.REMOTE
    address: IPAddress

    @property
    def key(self) -> Key:
        return (GUARDS[self.address.version], int(self.address))

    def __str__(self) -> str:
        return f"guard lets in {self.address}"


class Guarded(Struct, frozen=True, gc=False):
    """Rules of one family that drop the tunnel's packets from all others; port 0 is IP protocol 4, ipip."""

    kind: ClassVar[Kind] = Kind.REMOTE
    family: Family
    ports: tuple[int, ...]

    @property
    def key(self) -> Key:
        return (GUARDS[self.family], -1)

    def __str__(self) -> str:
        what = ", ".join(f"UDP {port}" if port else "ipip" for port in self.ports)
        return f"guard of {what} for IPv{self.family}"


def admits(lease: Lease, families: Iterable[Family] = FAMILIES) -> Iterator[Admitted]:
    """Yield what lets in the packets of a lease's node."""
    for family in families:
        if (public := lease.attrs.public(family)) is not None:
            yield Admitted(public)


class GuardTable(Table):
    """Table of one family's guard, in the kernel's thread. Raises ``Fatal`` without libnftables."""

    vital = False
    audit = _AUDIT

    def __init__(self, family: Family) -> None:
        self.name = GUARDS[family]
        self.what = f"the guard of the tunnel for IPv{family}"
        self._family = family
        try:
            load()
        except Unavailable as missing:
            raise Fatal(f"cannot guard the tunnel: {missing.problem}", missing.remedy) from missing

    def read(self, scope: Scope) -> Iterator[Seen]:
        with Netfilter() as netfilter:
            if not netfilter.has_table(self._family, GUARD):
                return
        ports: list[int] = []
        table = {"family": NFT_FAMILY[self._family], "name": GUARD}
        for item in run([{"list": {"table": table}}])["nftables"]:
            match item:
                case {"set": {"name": "nodes", "elem": [*elements]}}:
                    for each in elements:
                        yield _seen(Admitted(ip_address(each)), scope)
                case {"rule": {"comment": str(port)}} if port.isdigit():
                    ports.append(int(port))
        if ports:
            yield _seen(Guarded(self._family, tuple(ports)), scope)

    def put(self, puts: Sequence[Put]) -> Report:
        """Admit nodes, then set the rules, in one transaction. Raises ``Retryable``."""
        wanted = [put.want for put in puts]
        run("\n".join(self._made(wanted)))
        return Report(made=wanted)

    def _made(self, wanted: Sequence[Resource]) -> Iterator[str]:
        """Yield the commands of nft(8) that make resources, whatever is there already."""
        family, kind = NFT_FAMILY[self._family], "ipv4_addr" if self._family == 4 else "ipv6_addr"
        yield f"add table {family} {GUARD}"
        yield f"add set {family} {GUARD} {_SET} {{ type {kind}; }}"
        nodes = ", ".join(str(each.address) for each in wanted if isinstance(each, Admitted))
        if nodes:
            yield f"add element {family} {GUARD} {_SET} {{ {nodes} }}"
        chain = f"{family} {GUARD} {_CHAIN}"
        for each in wanted:
            if isinstance(each, Guarded):
                yield f"add chain {chain} {{ type filter hook input priority -10; policy accept; }}"
                yield f"flush chain {chain}"
                for port in each.ports:
                    what = f"udp dport {port}" if port else f"meta l4proto {_IPIP}"
                    others = f'{what} {family} saddr != @{_SET} counter drop comment "{port}"'
                    yield f"add rule {chain} {others}"

    def drop(self, found: Sequence[Resource]) -> Report:
        """Let in these nodes no more; without its rules the guard goes. Raises ``Retryable``."""
        place = f"{NFT_FAMILY[self._family]} {GUARD}"
        if any(isinstance(each, Guarded) for each in found):
            run(f"delete table {place}")
        else:
            nodes = ", ".join(str(each.address) for each in found if isinstance(each, Admitted))
            run(f"delete element {place} {_SET} {{ {nodes} }}")
        return Report(removed=list(found))

    def script(self, scope: Scope) -> Iterator[str]:
        """Yield the command that removes the guard of an earlier run."""
        if not scope.desired and has_guard(self._family):
            yield f"nft delete table {NFT_FAMILY[self._family]} {GUARD}"

    def explain(self, put: Put) -> str:
        """Return the command that does what ``put`` would do."""
        return f"nft '{'; '.join(self._made([put.want]))}'"


def _seen(resource: Resource, scope: Scope) -> Seen:
    return Seen(resource, Claim.OURS if resource.key in scope.desired else Claim.LEFT)


def retire(*, dry_run: bool) -> Iterator[str]:
    """Remove the guards of both families, and yield a line for each. Raises ``Retryable``."""
    for family in filter(has_guard, FAMILIES):
        if not dry_run:
            run([{"delete": {"table": {"family": NFT_FAMILY[family], "name": GUARD}}}])
        yield f"nftables: table {NFT_FAMILY[family]} {GUARD}"
