"""Checks of the containers of this node, looked at from inside, and of the bridge that they are on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flanneld.compat.glog import counted
from flanneld.ctl.checks import FEW, check, few, see_first
from flanneld.diagnostics.status import PeerStatus, known
from flanneld.findings import Command, Finding, Severity, command, hint
from flanneld.model import IPNetwork
from flanneld.network.host_settings import sysctl
from flanneld.network.iproute2_commands import entering, set_link

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts
    from flanneld.ctl.inside import Container


#: More hops lead out of any cluster.
_HOPS = 8

#: Bridges that container runtimes make for their containers, by default.
RUNTIMES_BRIDGES = ("cni0", "docker0")


def former_subnets(facts: Facts) -> dict[str, PeerStatus]:
    """Return the bridges on the subnet of another node's lease, each with that lease.

    It is most likely this node's own of before it got another public IP, which nothing here proves.
    """
    own = facts.status.own_subnets
    held = [
        (name, address)
        for name, address in facts.addresses
        if facts.has_ports(name) and facts.is_bridge(name) and not any(address in net for net in own)
    ]
    unsafe = [peer for peer in (facts.peers if held and own else ()) if peer.state == "unsafe"]
    claims = [(net, peer) for peer in unsafe for net in peer.networks]
    return {name: peer for name, address in held for net, peer in claims if address in net}


@check("G", "former subnet", "no bridge of containers is on the subnet of another lease")
def former_subnet(facts: Facts) -> Iterator[Finding]:
    own = ", ".join(map(str, facts.status.own_subnets))
    for name, peer in former_subnets(facts).items():
        where = ", ".join(peer.public_ips)
        held = (ip for at, ip in facts.addresses if at == name and name in dict(facts.gateways))
        also = [f"{ip}/{net.prefixlen}" for ip in held for net in peer.networks if ip in net]
        yield Finding(
            f"{name} is on {peer.name}, and this node's subnet is {own}",
            f"the lease {peer.name} has the public IP {where}; if that is a former lease of this node, which"
            " nothing here proves, it ends by itself",
            f"other nodes send packets for the containers on {name} to {where}",
            f"{name} has one of our subnet, too, so remove that: ip address del {also[0]} dev {name}"
            if also
            else f"correct -public-ip if it is wrong; if this node was at {where} before: ip address flush"
            f" dev {name}, and recreate its containers; else give {name} other addresses, outside Network",
            about=peer.subnets[0],
        )


@check("G", "container routes", "each container has a route to the other nodes' containers")
def container_routes(facts: Facts) -> Iterator[Finding]:
    former = former_subnets(facts)
    lost = [
        each
        for each in facts.containers
        if not each.is_routed and not is_cut_off(facts, each) and each.attached_to not in former
    ]
    if lost:
        gateways = {address.version: str(address) for _, address in reversed(facts.gateways)}
        ruled = next(((each, each.rule) for each in lost if each.rule), None)
        yield Finding(
            f"{counted(len(lost), 'container')} without a route to other nodes",
            few([f"{at.address} in {at.path}{f': {at.astray}' * bool(at.astray)}" for at in lost], "; "),
            "its packets do not even get to this host",
            f"see its policy rules, the first of which is {ruled[1].priority}: {ruled[1].text}; to remove it:"
            f" {shlex.join(entering(ruled[0].path))} ip rule del priority {ruled[1].priority}"
            if ruled
            else tuple(
                step
                for each in lost
                for step in (
                    *(() if each.is_up else (set_link(each.device, "up", inside=each.path),)),
                    (*entering(each.path), "ip", *_way_back(each, str(gateways[each.address.version]))),
                )
            )
            if gateways.keys() >= {each.address.version for each in lost}
            else "restart the containers: the CNI plug-in makes the route",
        )
    if short := [each for each in facts.containers if 0 < each.hops < _HOPS]:
        yield Finding(
            f"{counted(len(short), 'container')} whose packets may take {counted(short[0].hops, 'hop')} only",
            few([f"{at.address} in {at.path}" for at in short]),
            "this host and the node of the other container pass packets on, and drop one with no hop left",
            tuple((*entering(at.path), *sysctl((at.hops_setting, 64))) for at in short),
        )
    wide = [
        (each, net)
        for each in facts.containers
        if (net := _net_of(facts, each)) and 0 < each.length < net.prefixlen
    ]
    if wide:
        yield Finding(
            f"{counted(len(wide), 'container')} with a wider prefix than our subnet",
            few([f"{at.address}/{at.length} in {at.path}; the subnet is {net}" for at, net in wide], "; "),
            "it looks for containers of other nodes on its own link, where they are not",
            tuple(step for at, net in wide for step in _narrowed(at, net.prefixlen)),
        )


def _narrowed(at: Container, length: int) -> tuple[Command, ...]:
    """Return the commands that give a container's address another prefix length."""
    change = (*entering(at.path), "ip", "address")
    added = (*change, "add", f"{at.address}/{length}", "dev", at.device)
    removed = (*change, "del", f"{at.address}/{at.length}", "dev", at.device)
    # The kernel takes an IPv6 address only once, whatever its length. The default route of IPv4 goes with
    # the last address of its gateway's network.
    return (removed, (*added, "nodad")) if at.address.version == 6 else (added, removed)


def _way_back(at: Container, gateway: str) -> tuple[str, ...]:
    if at.astray:
        return ("route", "del", *at.astray.split())
    return ("route", "replace", "default", "via", gateway, "dev", at.device)


def bridges_down(facts: Facts) -> list[str]:
    """Return the interfaces that lead to our containers and are down: the kernel has removed their routes."""
    names = sorted({name for name, _ in facts.gateways})
    return [name for name in names if facts.link(name) is not None and not _is_up(facts, name)]


@check("G", "bridge down", "the containers' bridge is up")
def bridge_down(facts: Facts) -> Iterator[Finding]:
    for name in bridges_down(facts):
        yield Finding(
            f"{name} is down",
            "it has an address of our subnet",
            "no packet gets to the containers or from them",
            (set_link(name, "up"),),
            about=name,
        )


@check("G", "bridge address", "packets for the containers of this node get to their bridge")
def bridge_address(facts: Facts) -> Iterator[Finding]:
    down = bridges_down(facts)
    if any(each.removal for each in facts.lost):
        return  # a route of a kind that leads nowhere is named
    hosts, away = {ip for _, ip in facts.addresses}, (at for at in facts.containers if is_cut_off(facts, at))
    lost = [each for each in away if each.attached_to not in down and each.address not in hosts]
    ports = (
        ()
        if facts.gateways or facts.link(RUNTIMES_BRIDGES[0])
        else dict.fromkeys(at.port for at in lost if at.attached_to == at.port)
    )
    names = [RUNTIMES_BRIDGES[0] if each.port in ports else each.attached_to for each in lost]
    for bridge in dict.fromkeys(names):
        mine = [each for each, name in zip(lost, names, strict=True) if name == bridge]
        made = (command("ip", "link", "add", bridge, "up", "type", "bridge"),) * bool(ports)
        nets = dict.fromkeys(net for each in mine if (net := _net_of(facts, each)))
        yield Finding(
            f"no interface leads to the containers on {bridge}",
            f"{mine[0].address} in {mine[0].path}: packets leave by {mine[0].reached_by or 'no interface'}"
            + f"; there is no {bridge}" * bool(ports),
            "no packet of other nodes gets to these containers, and none of this host",
            f"remove the other route, if it is not needed: ip route del {detour}"
            if (detour := mine[0].detour)
            else (*made, *(set_link(at, "master", bridge) for at in ports), *connecting(facts, nets, bridge)),
            about=bridge,
        )


def connecting(facts: Facts, nets: Iterable[IPNetwork], bridge: str) -> tuple[Command, ...]:
    """Return the commands that give a bridge the routes to subnets, with an address if it has none there."""
    held = [net for net in nets if any(name == bridge and at in net for name, at in facts.gateways)]
    routes = (command("ip", "route", "replace", str(net), "dev", bridge) for net in held)
    return (*routes, *addressing((net for net in nets if net not in held), bridge))


def addressing(nets: Iterable[IPNetwork], bridge: str) -> tuple[Command, ...]:
    """Return the commands that give a bridge the first address of each subnet, and IPv6 if it is off."""
    return tuple(
        step
        for net in nets
        for step in (
            *([sysctl((f"net/ipv6/conf/{bridge}/disable_ipv6", 0))] if net.version == 6 else ()),
            command("ip", "address", "add", f"{net[1]}/{net.prefixlen}", "dev", bridge),
        )
    )


@check("G", "attachment", "each container is attached to the bridge that leads to it")
def attachment(facts: Facts) -> Iterator[Finding]:
    loose = [
        each
        for each in facts.containers
        if facts.is_bridge(each.reached_by)
        and facts.link(each.attached_to)
        and not facts.is_bridge(each.attached_to)
    ]
    if loose:
        yield Finding(
            f"{counted(len(loose), 'container')} off the bridge",
            few(
                [
                    f"{each.address} in {each.path}: {each.attached_to} is no port of {each.reached_by}"
                    for each in loose
                ],
                "; ",
            ),
            "no packet gets to such a container or from it",
            tuple(
                set_link(name, "master", bridge)
                for name, bridge in dict.fromkeys((each.attached_to, each.reached_by) for each in loose)
            ),
        )


@check("G", "bridge port", "the bridge passes packets to each container")
def bridge_port(facts: Facts) -> Iterator[Finding]:
    # A bridge that is down disables all its ports, and enables them when it is up.
    bad = (each for each in facts.containers if each.off and each.is_up and _is_up(facts, each.attached_to))
    for port, each in sorted({each.port: each for each in bad}.items()):
        is_up, is_stopped = _is_up(facts, port), "state" in each.off
        is_lost = is_stopped or ("flood" in each.off and not each.is_learnt)
        passing = (word for option in each.off for word in (option, 3 if option == "state" else "on"))
        yield Finding(
            f"the bridge passes no packets to {port}, a container's port"
            if is_lost
            else f"{port}, a container's port, has {' and '.join(each.off)} off",
            f"{port} is down"
            if not is_up
            else "its state is disabled or blocking"
            if is_stopped
            else f"bridge -d link show dev {port}: {', '.join(f'{option} off' for option in each.off)}",
            "no packet gets to the container behind it or from it"
            if is_stopped
            else "ARP requests of other containers on this bridge do not get to the one behind it"
            if each.off == ("bcast_flood",)
            else "packets to a MAC address whose port the bridge does not know are lost, or go to all ports",
            (command("bridge", "link", "set", "dev", port, *passing) if is_up else set_link(port, "up"),),
            about=port,
            severity=Severity.PROBLEM if is_lost else Severity.HINT,
        )


def _is_up(facts: Facts, name: str) -> bool:
    link = facts.link(name)
    return link is not None and link.up


def is_cut_off(facts: Facts, container: Container) -> bool:
    """Return True if packets of this host for a container of our subnet leave for another host."""
    if any(each.cause in ("no rule", "rule") for each in facts.lost):
        return False
    away = {facts.status.uplink_name, "", *facts.devices}
    return container.reached_by in away and _net_of(facts, container) is not None


def _net_of(facts: Facts, container: Container) -> IPNetwork | None:
    """Return our subnet that a container's address is in."""
    address = container.address
    return next((net for net in facts.status.own_subnets if address in net), None)


@check("G", "container echoes", "each container gets answers from this host and from other nodes")
def container_echoes(facts: Facts) -> Iterator[Finding]:
    turned_away = {address.version for _, address, _ in facts.turned_away}  # the same of this host's own
    for each in facts.containers:
        inside, port = shlex.join(entering(each.path)), each.port
        own_rules = f"see its own rules: {inside} nft list ruleset; {inside} iptables-save"
        if each.is_refused:
            yield hint(
                f"TCP of {each.address} for other nodes is refused before it leaves the container",
                f"from {each.path} the first packet with one hop left is refused at once",
                "a rule inside rejects it, or redirects it to a port at which nothing listens, as without a"
                " sidecar's proxy; ICMP and UDP may pass",
                f"start what listens there, or recreate the container; {own_rules}",
                about=str(each.address),
            )
        if each.is_heard and (not each.unanswered or each.address.version in turned_away):
            continue
        if not each.is_heard:
            yield Finding(
                f"packets between {each.address} and this host get lost",
                f"from {each.path} {each.attached_to} answers neither ICMP nor TCP",
                "no packet of other nodes gets to this container and back, if its own rules do not mean that",
                f"{own_rules}; and what is between: nft list ruleset; tc -s qdisc show dev {port};"
                f" tc -s filter show dev {port} ingress; bridge -d link show dev {port};"
                f" bridge fdb show br {each.attached_to}",
                about=str(each.address),
            )
        else:
            yield Finding(
                f"packets between {each.address} and other nodes get lost",
                f"from {each.path} no answer comes to {each.unanswered}; to those of this host all come"
                + (f"; dropped by {few(each.dropped_by, '; ')}" if each.dropped_by else ""),
                "this host does not pass all packets on, or the container's own rules drop them",
                "remove it, unless a NetworkPolicy means it: kubectl get networkpolicy --all-namespaces"
                if each.dropped_by
                else f"{see_first(facts)}see the rules for packets that are passed on, with what they count:"
                f" nft list ruleset; iptables-save -c. Then {own_rules}",
                about=str(each.address),
                severity=Severity.HINT if facts.has_policies else Severity.PROBLEM,
            )


@check("E", "way out", "containers get answers from outside the cluster, as this host does")
def way_out(facts: Facts) -> Iterator[Finding]:
    firewall = known(facts.status.firewall)
    for each in facts.containers if not facts.exempting else ():
        if not each.is_led_out:
            yield hint(
                f"{each.address} gets no answer from outside the cluster, and this host does",
                f"a router reports packets of this host that have no hops left, and none from {each.path}",
                "no one masquerades the containers' packets, or rules drop them or the answers",
                "see the rules of nat and forward, with what they count: nft list ruleset; iptables-save -c"
                if firewall and firewall.masquerade
                else "start flanneld with -ip-masq, if the containers are to reach hosts outside",
                about=str(each.address),
            )


@check("E", "router", "packets for other networks go to a router that is there")
def router(facts: Facts) -> Iterator[Finding]:
    for each in facts.lost_ways:
        removal = (*(("-6",) if each.family == 6 else ()), "route", "del", *each.route.split())
        yield hint(
            f"packets over IPv{each.family} for other networks get lost at {each.device}",
            f"{each.evidence}, and the route is {each.route}",
            "containers and this host reach nothing outside the cluster, and may find no names",
            "see whether that router runs, and whether its address is right: ip route"
            if each.device == facts.status.uplink_name
            else f"if it is left of a VPN that has ended: {shlex.join(('ip', *removal))}; see ip rule, too",
            about=each.device,
        )


@check("G", "peers' containers", "containers of other nodes answer this one, and take packets of all sizes")
def peers_containers(facts: Facts) -> Iterator[Finding]:
    places = {peer.subnets[0]: peer.place for peer in (facts.peers if facts.beyond else ())}
    carried = {each.end: each.carried or 0 for each in facts.paths}
    silent = [each for each in facts.beyond if each.carried is None]
    if silent:
        peers = counted(len({each.peer for each in silent}), "peer")
        yield hint(
            f"no answer from containers of {peers}, whose nodes answer",
            few([f"{each.target} at {places[each.peer]}" for each in silent]),
            "the node does not pass packets on, or a NetworkPolicy or the containers mean it",
            "run flannelctl doctor there",
        )
    for each in facts.beyond:
        if each.carried and each.carried < min(each.required, carried.get(each.end, 0)):
            yield hint(
                f"{each.target} answers packets of {each.carried} bytes, and none of {each.required}",
                f"its node {places[each.peer]} answers those of {each.required}",
                "large packets to it are lost: it has another MTU, or a limit or a rule drops them",
                "run flannelctl doctor there; a container with another MTU is recreated",
                about=each.peer,
            )


@check("G", "container addresses", "each container has an address of its own in our subnet")
def container_addresses(facts: Facts) -> Iterator[Finding]:
    own, former = facts.status.own_subnets, former_subnets(facts)
    strange = [
        each
        for each in facts.containers
        if own and not any(each.address in net for net in own) and each.attached_to not in former
    ]
    if strange:
        yield Finding(
            f"{counted(len(strange), 'container')} with an address outside our subnet",
            few([f"{each.address} in {each.path}" for each in strange], "; "),
            f"other nodes send packets for it elsewhere: our subnet is {', '.join(map(str, own))}",
            "recreate these containers: they have kept the addresses of an earlier subnet",
        )
    holders: dict[str, dict[str, Container]] = {}
    for each in facts.containers:
        for what in (f"address {each.address}", each.mac and f"MAC address {each.mac} on {each.attached_to}"):
            holders.setdefault(what, {}).setdefault(each.path, each)
    hosts = {f"address {address}" for _, address in facts.addresses}
    hosts |= {f"MAC address {each.mac} on {each.name}" for each in facts.links}
    for what, same in holders.items():
        is_hosts = what in hosts
        if what and (is_hosts or len(same) > 1):
            yield Finding(
                f"{counted(len(same), 'container')} with the {what}{' of this host' if is_hosts else ''}",
                few([f"{each.address} with {each.mac} in {path}" for path, each in same.items()], "; "),
                "packets for this address get to either of them",
                f"recreate all of them{'' if is_hosts else ' but one'}, with no MAC address fixed, and see"
                " that the runtime keeps its record of addresses in use, for CNI in /var/lib/cni/networks",
                about=what,
            )
    held = {(each.path, each.address.version) for each in facts.containers}
    for name, gateway in facts.gateways:
        mine = (each for each in facts.containers if each.attached_to == name)
        lacking = {at.path: at for at in mine if (at.path, gateway.version) not in held}
        for path, each in list(lacking.items())[:FEW]:
            yield Finding(
                f"a container has no IPv{gateway.version} address, and its bridge has",
                f"{each.device} in {path} has {each.address} only, {name} has {gateway}",
                f"nothing reaches it over IPv{gateway.version}",
                f"recreate it; if that does not help: {shlex.join(entering(path))} sysctl"
                f" net.ipv6.conf.{each.device}.disable_ipv6 must be 0",
                about=path,
                severity=Severity.HINT,  # it may be older than the bridge's address
            )


@check("G", "bridge subnet", "bridges of this host are in our subnet")
def bridge_subnet(facts: Facts) -> Iterator[Finding]:
    own, former = facts.status.own_subnets, former_subnets(facts)
    networks, leads = facts.networks, {name for name, _ in facts.gateways}
    for name, address in facts.addresses if own else ():
        inside = any(address in network for network in networks)
        is_ours = name in facts.devices or any(address in net for net in own)
        if not inside or is_ours or name in former:
            continue
        evidence = f"our subnet is {', '.join(map(str, own))}"
        if not facts.is_bridge(name):
            yield hint(
                f"{name} has {address}, which is inside the cluster network",
                evidence,
                "one address may stand for a host there and for a container on another node",
                "choose a Network that no other network of this host overlaps",
                about=name,
            )
        elif facts.has_ports(name):
            yield Finding(
                f"{name} has {address}, which is not in our subnet",
                evidence,
                "other nodes send packets for its containers elsewhere",
                f"restart its containers and see that the runtime reads {facts.subnet_file}",
                about=name,
            )
    families = {network.version for network in networks}
    for name, address in facts.addresses if own else ():
        is_foreign = address.version in families and not any(address in network for network in networks)
        if is_foreign and not address.is_link_local and facts.is_bridge(name) and name in leads:
            yield hint(
                f"{name} has {address}, too, which is outside the cluster network",
                f"our subnet is {', '.join(map(str, own))}",
                "no other node reaches containers with addresses of that network",
                f"if another CNI config made it, remove that from /etc/cni/net.d, recreate those containers,"
                f" and take the address from {name}",
                about=name,
            )
