"""Checks of the lease, the peers, the store, the daemon, and a cloud's routes and permission to forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.backends.cloud.contract import FORWARDING, ROUTES
from flanneld.backends.registry import described
from flanneld.backends.vxlan import LINUX_PORT
from flanneld.compat.glog import counted
from flanneld.ctl.checks import check
from flanneld.ctl.checks.containers import former_subnets
from flanneld.ctl.nodes import Told, own_node
from flanneld.ctl.paths import takes_mtu
from flanneld.ctl.source import SourcePart, last_words
from flanneld.diagnostics.status import Status, known
from flanneld.errors import LEASE_TAKEN, LEASES_END, LINK_BROADCAST
from flanneld.findings import Finding, hint
from flanneld.model import LEASE_ENDS_SOON, lies_in
from flanneld.network.host_settings import Topic
from flanneld.runtime.clock import wall
from flanneld.subnet.etcd.keys import remedy_for

if TYPE_CHECKING:
    from flanneld.config import Config
    from flanneld.ctl.checks import Facts

#: Seconds to wait for etcd, which answers within milliseconds unless it hangs.
_TIME_LIMIT = 2.0
#: Seconds by which the clocks of etcd and of this host may differ.
_CLOCK_OFF = 300.0


class EtcdHealth(Struct, frozen=True, gc=False):
    """Clock and health of an etcd server, which it tells without a quorum.

    ``ahead`` are the seconds that this host's clock is ahead of it.
    """

    url: str
    ahead: float
    is_healthy: bool
    said: str


def ask_etcd(told: Status) -> EtcdHealth | None:
    """Ask the first server of etcd that a problem names; None without one, or without an answer.

    Nothing secret is sent, so that a certificate that is not valid by this clock does no harm.
    """
    store = known(told.store)
    problem = (known(store.problem) or "") if store else ""
    found = re.search(r"(https?)://([^\s/()]+:\d+)", problem)
    if not found or not problem.startswith("etcd "):
        return None
    import ssl  # on a healthy node none of these is needed
    from email.utils import parsedate_to_datetime
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    scheme, server = found.groups()
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    secure = HTTPSConnection(server, timeout=_TIME_LIMIT, context=anyone)
    connection = secure if scheme == "https" else HTTPConnection(server, timeout=_TIME_LIMIT)
    try:
        with closing(connection):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            ahead = wall() - parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
            said = answer.read(200).decode(errors="replace").strip()
            return EtcdHealth(found[0], ahead, answer.status == 200, said)
    except (OSError, HTTPException, ValueError):
        return None


# ---- C: news of the peers -----------------------------------------------------------------------


@check("C", "synced", "the peers are known")
def synced(facts: Facts) -> Iterator[Finding]:
    told = known(facts.status.store)
    cache = told.cache if told else None
    if cache or facts.status.synced is False:
        yield Finding(
            "the peers are known from a file only" if cache else "the peers are not known yet",
            f"leases are taken from {cache}" if cache else "no list of leases was read since the start",
            "nodes that joined since are not reached, and gone ones not removed",
            "see why the store does not answer",
        )


@check("C", "removal_guard", "no removals are held back")
def removal_guard(facts: Facts) -> Iterator[Finding]:
    guard = known(facts.status.removal_guard)
    if guard and guard.holds:
        yield hint(
            "removals are held back",
            "the last list of leases lacked most peers",
            "if it is right, packets still go to nodes that are gone",
            "nothing: the list is read again within 30 s; see whether the store was restored from a copy:"
            " then restart all API servers of Kubernetes",
        )


def unlike_stored(stored: Config, told: Told) -> Iterator[str]:
    """Yield what a node runs otherwise than the store's network config has it (pure).

    In the phases of a switch ``Backend.Also`` is right, too, and what else is not judged.
    """
    phases = {each.backend_type or "udp": each for each in (stored, stored.also) if each}
    networks = tuple(f"{each.network} /{each.subnet_len}" for each in stored.ranges)
    wanted: dict[str, tuple[Hashable, Container[Hashable]]] = {"network": (networks, (networks,))}
    ours = phases.get(told.backend or "")
    if ours is None:
        wanted["backend"] = (" or ".join(phases), phases)
    elif stored.also is None:
        outer = ours.backend.integer("MTU", 0)
        headers = described(told.backend or "").overhead.values()
        if outer and takes_mtu(described(told.backend or "")):
            wanted["MTU"] = (f"Backend.MTU {outer}", [outer - each for each in headers])
        if told.backend == "vxlan":
            vni, port = ours.backend.integer("VNI", 1), ours.backend.integer("Port", 0) or LINUX_PORT
            wanted |= {"VNI": (vni, (vni,)), "port": (port, (port,))}
    has = {"network": told.network or None, "backend": told.backend, "MTU": told.mtu}
    has |= {"VNI": told.vni, "port": told.port}
    for name, (wish, right) in wanted.items():
        found = has[name]
        if found is not None and found not in right:
            yield f"{name} {shown(found)}, the store has {shown(wish)}"


@check("C", "config", "the daemon runs the network config of the store")
def config(facts: Facts) -> Iterator[Finding]:
    ours = own_node(facts.status).told
    found = list(unlike_stored(facts.stored, ours)) if facts.stored and ours else []
    if found and facts.origin == "daemon":
        yield Finding(
            "this daemon runs another config than the store has",
            "; ".join(found),
            "nodes that were started since run the store's, and do not reach this one",
            "restart flanneld here: it reads the network config when it starts",
        )


def shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- H: the lease -------------------------------------------------------------------------------


def taken_lease(facts: Facts) -> str:
    """Return the daemon's words about a lease that another node has taken; empty if it has not."""
    found = (each.problem for each in facts.status.conditions if each.part == "lease")
    return next((text for text in found if LEASE_TAKEN in text), "")


@check("H", "lease", "the lease lasts")
def lease(facts: Facts) -> Iterator[Finding]:
    own = known(facts.status.lease)
    if own is None and facts.origin == "store":
        yield Finding(
            "this node has no lease",
            "no lease has our public IP",
            "no other node knows the way to our containers",
            "start the daemon; if it runs, its log says what it waits for",
        )
    if taken := taken_lease(facts):
        problem, _, remedy = taken.partition("; ")
        yield Finding(
            problem,
            "the daemon yields, and ends soon",
            "other nodes send packets for our containers to that one",
            f"{remedy}; then restart flanneld here, and recreate the containers if its subnet is another one",
        )
    expires = known(own.expires) if own else None
    if not own or not expires:
        return
    left = expires - facts.now
    if left < LEASE_ENDS_SOON:
        yield Finding(
            "the lease has expired" if left <= 0 else f"the lease ends in {left:.0f} s",
            f"subnet {', '.join(own.subnets)}, renewals: {known(own.renewals) or 'none'}",
            "another node may be given our subnet",
            "see why the daemon does not renew it: its log, and whether the store answers",
        )


@check("H", "clock", "the clock is set")
def clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_is_synchronised is False:
        yield hint(
            "the clock is not synchronised",
            "/run/systemd/timesync/synchronized is missing",
            "certificates of the store may not be valid here; leases do not depend on it",
            "see timedatectl timesync-status",
        )
    word = facts.etcd
    if word and abs(word.ahead) > _CLOCK_OFF:
        way = "ahead of" if word.ahead > 0 else "behind"
        yield Finding(
            f"this host's clock is {abs(word.ahead) / 3600:.1f} h {way} etcd's",
            f"by the date in the answer of {word.url}",
            "certificates are not valid yet, or have expired, by a wrong clock",
            "set the clock of the one that is wrong: timedatectl set-ntp true",
        )


# ---- I: the store -------------------------------------------------------------------------------


@check("I", "store", "the store answers")
def store(facts: Facts) -> Iterator[Finding]:
    told = known(facts.status.store)
    problem = known(told.problem) if told else None
    if told and problem:
        # An alarm makes it unhealthy, too, and its refusal names that.
        is_mute = facts.etcd is not None and problem.startswith("etcd does not answer")
        sick = facts.etcd if is_mute and facts.etcd and not facts.etcd.is_healthy else None
        remedy = remedy_for("no leader") if sick else known(told.remedy)
        yield Finding(
            problem,
            f"{sick.url}/health: {sick.said}" if sick else told.name,
            "changes of peers are not seen, and our lease is not renewed; existing routes stay",
            remedy or "see the log of the store",
        )
    for why in facts.unknown:
        if why.part is SourcePart.STORE and why.failed:
            yield Finding(
                "the store did not answer",
                str(why),
                "a start of the daemon would wait for it",
                "see whether it runs and is reached from here, and the flags that name it",
            )


@check("I", "ready", "nothing is missing to be ready")
def ready(facts: Facts) -> Iterator[Finding]:
    health = known(facts.status.health)
    if not health:
        return
    for what in health.missing:
        said = next(iter(health.waiting), what)
        problem, _, remedy = said.partition("; ")
        yield Finding(
            "the daemon is not ready",
            what if said == what else f"{what.partition('; ')[0]}; {problem}",
            "no container should be started here yet",
            remedy or "wait, or see its log",
        )


# ---- J: addresses -------------------------------------------------------------------------------


@check("J", "public ip", "each node has a public IP of its own")
def public_ip(facts: Facts) -> Iterator[Finding]:
    seen = Counter(ip for peer in facts.peers for ip in peer.public_ips)
    uplink = known(facts.status.uplink)
    ours = uplink.public_ips if uplink else ()
    seen.update(set(ours) & seen.keys())
    is_global_elsewhere = any(":" in ip and not ip.startswith("fe80:") for ip in seen)
    if is_global_elsewhere and (local := next((ip for ip in ours if ip.startswith("fe80:")), "")):
        yield Finding(
            f"this node announces {local}, which leads nowhere from other nodes",
            f"{facts.status.uplink_name} had only this IPv6 address",
            "they refuse the lease, and send nothing to containers of this node",
            f"ip address add ADDRESS/64 dev {facts.status.uplink_name}; the daemon follows by itself",
        )
    for ip, number in seen.items():
        if number > 1:
            owners = [peer.name for peer in facts.peers if ip in peer.public_ips]
            if facts.status.backend == "wireguard":
                yield _behind_nat(ip, [*owners, *(["this node"] if ip in ours else [])])
                continue
            yield Finding(
                f"the public IP {ip} is used twice",
                f"by {', '.join([*owners, *(['this node'] if ip in ours else [])])}",
                "packets for one of both reach the other",
                f"give each node its own with -public-ip or -iface; {LEASES_END}",
            )


def _behind_nat(public_ip: str, owners: Sequence[str]) -> Finding:
    return hint(
        f"several nodes have the public IP {public_ip}",
        f"by {', '.join(owners)}",
        "they are told apart by their keys, and reached only at a port of its own each",
        "give each node behind this NAT a -wireguard-port; with etcd run no Go flannel there,"
        " which would take the lease of another node",
    )


@check("J", "network", "each subnet is inside the network")
def network(facts: Facts) -> Iterator[Finding]:
    own = facts.status.own_subnets if facts.origin != "host" else ()
    for net in own if facts.networks else ():
        if not any(lies_in(net, each) for each in facts.networks):
            yield Finding(
                f"our subnet {net} is outside the network",
                f"Network is {', '.join(map(str, facts.networks))}",
                "other nodes refuse it",
                "make the podCIDR of the node, or Network, fit",
            )


@check("J", "refusals", "the leases of the peers are valid")
def refusals(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer.state == "refused":
            yield Finding(
                f"the lease {peer.name} is refused",
                peer.reason,
                "nothing is done for this peer",
                f"correct it on the node that wrote it; {LEASES_END}",
            )


@check("J", "reverse path", "reverse path filters accept packets from peers")
def reverse_path(facts: Facts) -> Iterator[Finding]:
    yield from facts.of_topic(Topic.REVERSE_PATH)


@check("J", "unsafe leases", "no lease claims a network or an address of this host")
def unsafe_leases(facts: Facts) -> Iterator[Finding]:
    former = former_subnets(facts).values()
    for peer in facts.peers:
        if peer.state == "unsafe" and peer not in former:
            yield Finding(
                f"the lease {peer.name} would harm this host",
                peer.reason.partition("; ")[0],
                "the daemon withdrew the routes to its node: containers there are not reached from here",
                _spared(facts, peer.reason),
            )


def _spared(facts: Facts, reason: str) -> str:
    """Return what to do about a lease that is unsafe for this ``reason``."""
    claim, uplink = reason.partition("; ")[0], facts.status.uplink_name
    if LINK_BROADCAST in reason:
        return (
            f"see whether the prefix length of {uplink} is that of the other nodes: ip address show dev"
            f" {uplink}; ip address add the right one, then del this, and ip neigh flush dev {uplink} nud"
            " noarp, as the kernel keeps a broadcast MAC address for that node"
        )
    if claim.startswith("lo has ") and "/" in claim:
        removal = f"ip route del local {claim.removeprefix('lo has ')} dev lo"
        return f"if it is not needed, and no address of lo is in it: {removal}; {LEASES_END}"
    held = next(((ip, name) for name, ip in facts.addresses if f"announces {ip}," in claim), None)
    if held is not None:
        ip, name = held
        return (
            f"if this address belongs to that node: ip address del {ip} dev {name}; else correct -public-ip"
            f" there; {LEASES_END}"
        )
    return (
        "give this host's own network other addresses, outside Network, or the node another subnet;"
        f" the daemon follows by itself; {LEASES_END}"
    )


# ---- L: the daemon itself -----------------------------------------------------------------------


@check("L", "start", "the daemon can start")
def start(facts: Facts) -> Iterator[Finding]:
    for why in facts.unknown:
        if why.part is SourcePart.START:
            yield Finding(
                why.reason,
                "a dry run of the start ends so, with the store's network config and the flags given here",
                "the daemon exits with status 1, and nothing on this node is set up, repaired or renewed",
                f"{why.remedy or 'see its log'}; then start flanneld",
            )


@check("L", "daemon", "the daemon runs and answers")
def daemon(facts: Facts) -> Iterator[Finding]:
    if facts.origin == "daemon":
        yield from _limits(facts)
        return
    silent = next((each for each in facts.unknown if each.part is SourcePart.DAEMON), None)
    hangs = silent is not None and silent.hangs
    yield Finding(
        "the daemon hangs" if hangs else "the daemon is not running",
        "; ".join(filter(None, (str(silent or ""), last_words(facts.status)))),
        "existing routes stay; nothing is repaired or renewed until the daemon runs",
        (
            "see the daemon's log, then: systemctl restart flanneld"
            if hangs
            else "systemctl start flanneld; if it ends again, its log says why: journalctl -u flanneld"
        ),
    )


def _limits(facts: Facts) -> Iterator[Finding]:
    elsewhere, lacks = facts.limits
    if elsewhere:
        inside = f"/proc/{elsewhere}/ns/net"
        yield Finding(
            "the daemon runs in another network namespace than this host",
            f"{inside} is not that of flannelctl; nothing else is judged",
            "its devices and routes are there, and it announces an address of there",
            "give its pod hostNetwork: true, or its container --network=host; if that namespace is meant:"
            f" nsenter --net={inside} flannelctl doctor",
        )
    elif lacks and facts.status.backend != "alloc":
        yield Finding(
            f"the daemon lacks {lacks}",
            "CapEff in /proc/PID/status of its process",
            "the kernel refuses its devices, routes and rules; what an earlier run made stays as it is",
            "give it NET_ADMIN and NET_RAW, in securityContext.capabilities.add of its pod or in"
            " AmbientCapabilities= of its unit, and restart it",
        )


@check("L", "late", "every thread of the daemon reports in time")
def late(facts: Facts) -> Iterator[Finding]:
    health = known(facts.status.health)
    for line in health.late if health else ():
        yield Finding("a thread of the daemon hangs", line, "what it does is not done", "restart the daemon")


@check("L", "overruns", "no notifications of the kernel were lost")
def overruns(facts: Facts) -> Iterator[Finding]:
    number = known(facts.status.lost_notifications)
    if number:
        yield hint(
            f"notifications of the kernel were lost {counted(number, 'time')}",
            "the daemon read everything again each time",
            "repairs came later than usual",
            "see what changes routes or devices so often: ip monitor",
        )


# ---- B, E: a cloud ------------------------------------------------------------------------------


@check("B", "cloud routes", "the cloud's table has this node's routes")
def cloud_routes(facts: Facts) -> Iterator[Finding]:
    yield from _refused(facts, ROUTES, "other nodes of the cloud do not reach the containers of this one")


@check("E", "cloud forwarding", "the cloud lets packets of containers pass")
def cloud_forwarding(facts: Facts) -> Iterator[Finding]:
    why = (
        "a cloud drops packets that carry no address of the instance itself: on AWS by the source/destination"
        " check, on Google Cloud without can-ip-forward"
    )
    yield from _refused(facts, FORWARDING, why)


def _refused(facts: Facts, table: str, why: str) -> Iterator[Finding]:
    for each in known(facts.status.refused) or ():
        if each.table == table:
            remedy = each.remedy or "see the daemon's log"
            yield Finding(each.reason, each.object, why, remedy, about=each.object)
