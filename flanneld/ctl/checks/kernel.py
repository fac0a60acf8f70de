"""Checks of devices, routes, entries and addresses."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from itertools import combinations
from typing import TYPE_CHECKING

from flanneld.backends.cloud.contract import FORWARDING, ROUTES
from flanneld.compat.glog import counted
from flanneld.ctl.checks import FEW, check, few
from flanneld.ctl.checks.containers import RUNTIMES_BRIDGES, bridges_down, connecting, is_cut_off
from flanneld.ctl.compare import Comparison
from flanneld.ctl.paths import FROM_NODES, TO_CONTAINERS, TO_NODES
from flanneld.diagnostics.status import RefusalStatus, known
from flanneld.findings import Command, Finding, Remedy, Severity, command, hint, line
from flanneld.network import iproute2_commands
from flanneld.network.host_settings import Topic, sysctl
from flanneld.network.rtnetlink.links import PORT_REMEDY, SeenLink, is_flannels
from flanneld.state.resources import Link, Route

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts
    from flanneld.ctl.losses import Lost

#: What gives a clone a MAC of its own while its daemon is stopped.
NEW_MAC = "ip link set flannel.1 address with a new MAC"
_LACKING = ("missing", "different")
#: Properties of a device that can be set without losing the objects on it.
_SET_WITHOUT_LOSS = {"mtu", "learning"}


# ---- A: devices and uplink ----------------------------------------------------------------------


@check("A", "kernel support", "the kernel has what the backend needs")
def kernel_support(facts: Facts) -> Iterator[Finding]:
    for each in facts.lacking:
        yield Finding(
            f"this kernel has no {each.name}",
            each.evidence,
            "the daemon cannot start with this backend, and no packet of a container reaches a peer",
            f"modprobe -a {each.modules}, then start flanneld; if a module is not found, install the"
            " package that has it for the running kernel, reboot if the kernel was upgraded, or set"
            " another Backend.Type in the network config",
        )


@check("A", "devices", "each device exists, is up and has the desired properties")
def devices(facts: Facts) -> Iterator[Finding]:
    for entry in facts.entries if not facts.lacking else ():
        if entry.state in _LACKING and entry.kind == "link":
            different = "; ".join(map(str, entry.differences))
            owner = facts.port_owners.get(entry.device)
            remedy = "start the daemon: it recreates the device"
            yield Finding(
                f"{entry.device} {different}" if different else f"{entry.device} is not there",
                f"wanted: {entry.value}" + (f"; {owner} has its UDP port" if owner else ""),
                "packets to the peers are lost, or reach the wrong ones",
                _device_fix(entry) or (f"{PORT_REMEDY}; then {remedy}" if owner else remedy),
                about=entry.device,
            )
    if any(link.name == "lo" and not link.up for link in facts.links):
        yield Finding(
            "lo is down",
            "the kernel delivers packets from this host to its own addresses through it",
            "probes, and programs that talk to services of this host, fail",
            (iproute2_commands.set_link("lo", "up"),),
            about="lo",
        )


def _device_fix(entry: Comparison) -> tuple[Command, ...] | None:
    """Return the commands that correct a device; None if its routes or entries would be lost."""
    desired, actual = entry.value, entry.other
    if not (isinstance(desired, Link) and isinstance(actual, Link)):
        return None
    if {each.name for each in entry.differences} <= _SET_WITHOUT_LOSS:
        return tuple(iproute2_commands.link(desired, actual, parent=""))
    return None


@check("A", "uplink", "the external interface is there and up")
def uplink(facts: Facts) -> Iterator[Finding]:
    desired = known(facts.status.uplink)
    if not desired:
        return
    link = facts.link(desired.name)
    if link is None or not link.up:
        yield Finding(
            f"the uplink {desired.name} is {'down' if link else 'not there'}",
            f"elected with {', '.join(desired.addresses)}",
            "it carries all packets between the nodes",
            _way_up(link, desired.addresses),
            about=desired.name,
        )
        return
    bridge = next((each.name for each in facts.links if each.index == link.master), "")
    if bridge and facts.is_bridge(bridge):
        yield Finding(
            f"{link.name} is a port of {bridge}",
            f"ip link show dev {link.name}: master {bridge}",
            f"answers to ARP and NDP get to {bridge}, so that {link.name} finds no other node",
            f"ip link set {link.name} nomaster; or give {bridge} the addresses and routes of {link.name}, and"
            f" start the daemon with -iface={bridge}",
            about=link.name,
        )
    held = {str(address) for name, address in facts.addresses if name == link.name}
    lost = [address for address in desired.addresses if address not in held]
    off = next(facts.of_topic(Topic.IPV6), None)
    of_ipv6 = [address for address in lost if ":" in address]
    if off:
        yield Finding(
            off.problem,
            off.why,
            "no packet of the network's IPv6 gets to another node",
            f"{off.cure}; then give {link.name} its addresses back: {', '.join(of_ipv6) or 'IPv6'}",
            about=link.name,
        )
        lost = [address for address in lost if address not in of_ipv6]
    if lost:
        yield Finding(
            f"{link.name} has lost {', '.join(lost)}",
            f"it has {', '.join(sorted(held)) or 'no address'}",
            "peers send to an address that is no longer here",
            "give it back; with another address the daemon announces that by itself",
        )


def _way_up(link: SeenLink | None, addresses: Sequence[str]) -> Remedy:
    """Return how to bring the uplink up.

    A device that goes down keeps IPv4 addresses, and loses IPv6 ones.
    """
    if link is None:
        return "plug it in, or let the daemon elect another"
    up = iproute2_commands.set_link(link.name, "up")
    if any(ip_address(text).version == 6 for text in addresses):
        return f"{line((up,))}, and give it its IPv6 addresses back"
    return (up,)


# ---- B: stale or missing objects ----------------------------------------------------------------


@check("B", "missing", "the kernel has all objects for the peers")
def missing(facts: Facts) -> Iterator[Finding]:
    lost = [entry for entry in facts.entries if entry.state in _LACKING and entry.kind != "link"]
    if lost and not facts.lacking:
        yield Finding(
            f"the kernel lacks {counted(len(lost), 'object')}",
            few(lost, "; "),
            "packets to these peers are lost or misrouted",
            "start the daemon, or look at its log: it puts them back at once, or says why it cannot",
        )


@check("B", "detours", "packets for the peers take the daemon's routes")
def detours(facts: Facts) -> Iterator[Finding]:
    if any(each.cause == "rule" for each in facts.lost):
        return  # the rule is named, with what mends it
    if facts.detours:
        subnets = sorted({each.subnet for each in facts.detours})
        more = f" and {len(subnets) - 1} more" if len(subnets) > 1 else ""
        removals = dict.fromkeys(each.removal for each in facts.detours[:FEW] if each.removal)
        yield Finding(
            f"packets for {subnets[0]}{more} do not take the daemon's route",
            "; ".join(each.found for each in facts.detours[:FEW]),
            "another program's route or rule overrides it; the daemon leaves it alone",
            (
                f"if not needed: {'; '.join(removals)}; keep the route to a network that this host is"
                " on, and give the peer another subnet"
                if removals
                else "`ip route get ADDRESS` and `ip rule` show what decides; keep the route to a network"
                " that this host is on and give the peer another subnet"
            ),
        )


@check("B", "stale", "the kernel holds nothing for peers that are gone")
def stale(facts: Facts) -> Iterator[Finding]:
    extra = [entry for entry in facts.entries if entry.state == "not wanted"]
    if extra:
        yield Finding(
            f"the kernel holds {counted(len(extra), 'object')} of peers that are gone",
            few(extra, "; "),
            "packets go to nodes that are gone, or to the wrong ones",
            "start the daemon: it removes them; `flanneld -plan` shows them as commands",
        )


@check("B", "refused", "the kernel takes all that the daemon writes")
def refused(facts: Facts) -> Iterator[Finding]:
    refusals = [each for each in known(facts.status.refused) or () if each.table not in (ROUTES, FORWARDING)]
    off = {_device_of(each) for each in refusals if _is_of_ipv6_off(each)}
    for each in [each for each in refusals if _is_of_ipv6_off(each) or _device_of(each) not in off][:FEW]:
        yield Finding(
            f"the kernel refuses {each.object}",
            each.reason,
            "its peer is not reached",
            line((sysctl((f"net/ipv6/conf/{_device_of(each)}/disable_ipv6", 0)),))
            if _is_of_ipv6_off(each)
            else each.remedy or "find the object in the way and its owner; the daemon retries",
        )


def _is_of_ipv6_off(refused: RefusalStatus) -> bool:
    """Return True for an address whose device has IPv6 off: the kernel permits none (pure)."""
    return refused.errno == errno.EACCES and refused.object.startswith("address ")


def _device_of(refused: RefusalStatus) -> str:
    return refused.object.partition(" dev ")[2].partition(" ")[0]


@check("B", "neighbours", "the neighbour table has room for the peers")
def neighbours(facts: Facts) -> Iterator[Finding]:
    """Check gc_thresh3. Our permanent entries do not count; the peers' addresses on the uplink's link do."""
    number = len(facts.peers)
    if facts.gc_thresh and number > 0.8 * facts.gc_thresh:
        yield hint(
            "the neighbour table may overflow",
            f"{counted(number, 'peer')}, and net.ipv4.neigh.default.gc_thresh3 is {facts.gc_thresh}",
            "on one link with all peers, new neighbours are refused: connections hang at random",
            f"sysctl -w net.ipv4.neigh.default.gc_thresh3={4 * max(number, 1024)}",
        )


# ---- D: MAC addresses and device managers -------------------------------------------------------


@check("D", "mac", "our device has the MAC that peers know")
def mac(facts: Facts) -> Iterator[Finding]:
    announced = facts.own_macs
    for name in facts.devices if announced else ():
        link = facts.link(name)
        if link is not None and link.mac and link.mac not in announced:
            yield Finding(
                f"{name} has another MAC than the one in our lease",
                f"{link.mac}, announced is {', '.join(sorted(announced))}",
                "the kernel drops what peers send to the announced one",
                "start the daemon: it sets the MAC back; let udev leave it alone (MACAddressPolicy=none)",
            )


@check("D", "contested", "no two nodes claim one object, as this one's MAC")
def contested(facts: Facts) -> Iterator[Finding]:
    told: set[str] = set()
    claimed = {each for peer in facts.peers for each in peer.conflicts}
    places = {net: peer.place for peer in facts.peers if claimed for net in peer.subnets}
    for peer in facts.peers:
        others = [places.get(each, each) for each in peer.conflicts if each not in told]
        if not facts.own_macs.isdisjoint(map(str.lower, peer.macs)):
            others.append("our own device")
        if others:
            told.add(peer.name)
            has_key = peer.backend == "wireguard"
            what = "key" if has_key else "MAC"
            yield Finding(
                f"{peer.place} shares the {what} of {', '.join(others)}",
                f"public IP {', '.join(peer.public_ips)}",
                f"one of both is not reached: cloned machines have one {what}",
                (
                    "on the cloned node: stop flanneld, "
                    + ("remove the key file" if has_key else NEW_MAC)
                    + ", start flanneld"
                ),
            )


@check("D", "managers", "no other program manages flannel's devices")
def managers(facts: Facts) -> Iterator[Finding]:
    for name, program in facts.managed:
        section = (
            "unmanaged-devices=interface-name:flannel*" if program == "NetworkManager" else "Unmanaged=yes"
        )
        yield Finding(
            f"{program} manages {name}",
            "it says so itself, below /run",
            "it removes addresses and routes that it did not set, and may put a default route there",
            f"exclude flannel* there: {section}",
        )


@check("D", "fights", "no other program keeps undoing what the daemon does")
def fights(facts: Facts) -> Iterator[Finding]:
    firewall = known(facts.status.firewall)
    rules = firewall is not None and firewall.fights
    for what, is_so in (("its objects", known(facts.status.fights)), ("its rules", rules)):
        if is_so:
            yield Finding(
                f"another program keeps changing {what}",
                "frequent repairs in the last minute",
                "between two repairs packets are lost",
                "flannelctl logs names the program, if it still runs; exclude flannel* there",
            )


# ---- A, B, J: ways and addresses that others have changed -------------------------------------------


@check("B", "lookups", "packets of the network take their way through this host")
def misrouted(facts: Facts) -> Iterator[Finding]:
    is_known = any(facts.of_topic(Topic.REVERSE_PATH))
    for each in facts.lost:
        if each.cause == "rule":
            problem = f"the policy rule {each.about} diverts {each.packets}"
        elif each.cause == "no rule":
            problem = f"no policy rule leads {each.packets} to {each.about}"
        elif each.cause == "filter" and not is_known:
            problem = f"the reverse path filter of {each.about} drops {each.packets}"
        elif each.cause == "arp":
            problem = f"{each.about} answers no ARP request"
        elif each.cause == "forwarding":
            problem = f"{each.about} does not forward {each.packets}"
        elif each.cause in ("route", "no route") and not _is_known(facts, each):
            problem = f"this node loses {each.packets}"
        else:
            continue
        yield Finding(
            problem,
            each.evidence,
            "they are dropped here, or leave by another way than the daemon's",
            each.commands or _way_out(each, facts),
            about=each.about,
        )


def _is_known(facts: Facts, lost: Lost) -> bool:
    """Return True if the cause is a finding of its own, as a bridge that is down or IPv6 that is off."""
    if lost.packets == TO_CONTAINERS and (
        bridges_down(facts) or (not lost.removal and any(is_cut_off(facts, at) for at in facts.containers))
    ):
        return True
    if lost.packets in (TO_NODES, FROM_NODES) and lost.families == {6} and any(facts.of_topic(Topic.IPV6)):
        return True
    target = ip_address(lost.about) if lost.about else None
    lacking = (each.value for each in facts.entries if each.state in ("missing", "different"))
    return any(
        isinstance(each, Route) and target is not None and target in each.destination for each in lacking
    )


def _way_out(lost: Lost, facts: Facts) -> str:
    if lost.cause == "rule":
        removal = f"ip rule del priority {lost.about.partition(':')[0]}"
        spared = "the network and the nodes' addresses"
        return f"give the rule conditions that spare {spared}, or remove it: {removal}"
    if lost.cause == "no route":
        add = f"ip {'-6 ' * (':' in lost.about)}route add default via ROUTER dev {facts.status.uplink_name}"
        return f"no route leads there; give this host one: {add}"
    if lost.removal or lost.packets != TO_CONTAINERS:
        text = f"ip route del {lost.removal}" if lost.removal else f"`ip route get {lost.about}` shows it"
        return f"remove the route that leads astray, if it is not needed: {text}"
    return (
        f"give the containers' bridge the subnet in {facts.subnet_file}, as the container runtime does:"
        f" {_addressing(facts)}"
    )


def _addressing(facts: Facts) -> str:
    nets = [net for net in facts.status.own_subnets if net.version == 4] or facts.status.own_subnets
    bridges = (*(name for name, _ in facts.gateways), *filter(facts.link, RUNTIMES_BRIDGES), "BRIDGE")
    return line(connecting(facts, nets, bridges[0]))


@check("G", "other bridge", "the runtime's bridge has the address of our subnet")
def other_bridge(facts: Facts) -> Iterator[Finding]:
    own = facts.status.own_subnets
    if not own or any(facts.is_bridge(name) for name, _ in facts.gateways):
        return
    for name, address in facts.addresses:
        is_used = name in RUNTIMES_BRIDGES and facts.is_bridge(name) and facts.has_ports(name)
        is_inside = address.is_link_local or any(address in network for network in facts.networks)
        if is_used and not is_inside:
            yield Finding(
                f"{name} has {address}, which is outside the cluster network",
                f"no bridge has an address of our subnet {', '.join(map(str, own))}",
                "containers there are not on the network: other nodes have no route to them",
                f"start the container runtime with the values of {facts.subnet_file}: Docker with"
                " --bip=FLANNEL_SUBNET and --mtu=FLANNEL_MTU; with CNI take the address away and restart"
                f" the containers: ip address flush dev {name}",
                about=name,
            )


@check("A", "uplink choice", "packets to other nodes leave by the external interface")
def uplink_choice(facts: Facts) -> Iterator[Finding]:
    used = facts.status.uplink_name
    silent = {each.target.version for each in facts.paths if each.carried is None}
    for each in facts.lost:
        if each.cause == "uplink":
            yield Finding(
                f"packets to other nodes leave by {each.about}, and the daemon uses {used}",
                f"{each.evidence}; so do {each.number} of {each.asked} looked at",
                f"peers are told the address of {used} and send to it; the tunnel's packets leave by {used}",
                f"remove the route, or give it a metric: ip route show dev {each.about}; if {each.about}"
                f" is right: start the daemon with -iface={each.about}",
                about=used,
                severity=Severity.PROBLEM
                if each.number == each.asked or each.families <= silent
                else Severity.HINT,
            )


@check("A", "pinned neighbours", "no MAC address of a node is fixed by hand, and no wrong one of a container")
def pinned_neighbours(facts: Facts) -> Iterator[Finding]:
    silent = {str(each.target) for each in facts.paths if each.name == "underlay" and each.carried is None}
    nodes = {ip for peer in (facts.peers if facts.pinned else ()) for ip in peer.public_ips}
    macs = {link.name: link.mac for link in facts.links}
    own = {address for _, address in facts.addresses}
    right = {each.address: {each.mac} for each in facts.containers}
    pins = {("", pin): set(macs.values()) for pin in facts.pinned}
    for each in facts.containers:  # its packets reach its bridge, or the bridge's port that it is behind
        ways = {macs.get(each.attached_to, ""), macs.get(each.port, "")}
        pins |= {(each.path, pin): ways for pin in each.pinned}
    for (path, pin), ways in pins.items():
        address, is_node = str(pin.address), pin.device == facts.status.uplink_name and not path
        fitting = ways if pin.address in own else right.get(pin.address, {pin.mac})
        if address not in nodes if is_node else pin.mac in fitting:
            continue
        yield Finding(
            f"the MAC address of {address} is fixed by hand: {pin.mac}",
            f"ip neigh{f' in {path}' if path else ''}: {address} dev {pin.device} lladdr {pin.mac} PERMANENT",
            "the kernel does not ask who has that address, so packets go to a former or wrong MAC address",
            (command(*iproute2_commands.entering(path), "ip", "neigh", "del", address, "dev", pin.device),),
            about=address,
            severity=Severity.HINT if is_node and address not in silent else Severity.PROBLEM,
        )


@check("J", "duplicate addresses", "no other host has this node's address, or one of a silent node")
def duplicate_addresses(facts: Facts) -> Iterator[Finding]:
    ours = {address: name for name, address in facts.addresses}
    own = {link.mac for link in facts.links}
    yield from twins(facts)
    for each in (each for each in facts.claims if not each.answers):
        address, name, others = each.address, ours.get(each.address), each.macs - own
        if each.macs and len(others) < (1 if name else 2):  # a silent node answers itself
            continue
        macs, again = few(sorted(others)), f"{address}/{each.length} dev {name}"
        yield Finding(
            f"another host has our address {address}" if name else f"two hosts have the address {address}",
            f"an ARP probe was answered by {macs}" if macs else f"ip address show dev {name}: dadfailed",
            "packets for this address, and for the containers behind it, go to either host",
            (
                f"find {macs} at the switch; on the wrong host: ip address del {address} dev ITS_DEVICE"
                if macs
                else f"take it from the other host; then ip address del {again}; ip address add {again}"
            ),
            about=str(address),
            severity=Severity.PROBLEM if name else Severity.HINT,
        )


def twins(facts: Facts) -> Iterator[Finding]:
    """Yield nodes with one MAC, which is no router's: one loses packets at least, and not both are silent."""
    nodes = {ip for peer in (facts.peers if facts.claims else ()) for ip in peer.addresses}
    routers = {mac for at in facts.claims if at.answers and at.address not in nodes for mac in at.macs}
    silent = {path.target for path in facts.paths if path.name == "underlay" and path.carried is None}
    held = sorted((at for at in facts.claims if at.address in nodes), key=lambda at: at.answers)
    own = {link.mac for link in facts.links if link.name == facts.status.uplink_name}
    pairs = [(f"{at.address} and this host", at.macs & own) for at in held]
    pairs += [
        (f"{one.address} and {other.address}", one.macs & other.macs - routers)
        for one, other in combinations(held, 2)
        if not (one.answers or silent >= {one.address, other.address})
    ]
    for both, mac in ((both, each) for both, macs in pairs for each in sorted(macs)):
        yield Finding(
            f"{both} have one MAC address",
            f"ARP finds both at {mac}",
            "the switch sends the packets for both to the one that it heard last",
            "give the clone another: a new one in its hypervisor, or ip link set dev ITS_DEVICE address NEW",
            about=mac,
        )


@check("B", "left devices", "no device of an earlier configuration is left")
def left_devices(facts: Facts) -> Iterator[Finding]:
    """Check for flannel devices of other configurations.

    Another daemon's have addresses in another network.
    """
    if facts.origin != "daemon":
        return
    networks = facts.networks
    for link in facts.links:
        held = [address for name, address in facts.addresses if name == link.name]
        inside = [str(address) for address in held if any(address in network for network in networks)]
        if is_flannels(link) and link.name not in facts.devices and inside:
            yield Finding(
                f"{link.name} is left from an earlier configuration",
                f"it has {', '.join(inside)} in our network, and is no device of this daemon",
                "it takes in packets that were sent to the former segment, and its routes may come first",
                f"if no other flanneld of this host uses it: ip address flush dev {link.name};"
                f" ip link set {link.name} down",
            )
