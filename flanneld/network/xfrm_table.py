"""Reconciler table of the kernel's XFRM policies: guards, and the tunnels of the ipsec backend.

Also their messages (linux/xfrm.h), and the kernel's SAs as another program may have left them.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import struct
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from ipaddress import IPv4Address, IPv4Network, ip_address

from flanneld.compat.glog import V
from flanneld.model import FAMILIES, Family, IPNetwork
from flanneld.network.firewall.fate import ACCEPT, DROP, UNKNOWN, Rule, Test, Value, protocol_name
from flanneld.network.firewall.foreign import PolicyChain
from flanneld.network.processes import GET_POLICY, NETLINK_XFRM, has_xfrm_policies
from flanneld.network.rtnetlink.messages import FAMILY, network_of
from flanneld.network.rtnetlink.netlink import (
    NLM_F_REQUEST,
    MalformedNetlink,
    NetlinkSocket,
    attribute,
    attributes,
    message,
    unpack,
)
from flanneld.network.rtnetlink.netlink import messages as split
from flanneld.network.xfrm import (
    ALLOW_PRIORITY,
    MODULES,
    POLICIES,
    Action,
    Direction,
    Tunnel,
    XfrmPolicy,
    is_flannels,
    passes_by,
)
from flanneld.state.resources import Resource
from flanneld.state.table import Bypass, Changes, Claim, Failure, Put, Report, Scope, Seen, Table

# linux/xfrm.h, XFRM_MSG_*
NEW_POLICY, DELETE_POLICY, UPDATE_POLICY = 0x13, 0x14, 0x19
_GET_DEFAULT, _BLOCKS = 0x28, 1
GET_SA, FLUSH_SA = 0x12, 0x1C
#: Not of the kernel: notifications were lost.
LOST = -1
#: Multicast groups of changes to SAs and policies, XFRMNLGRP_*.
GROUP_SA, GROUP_POLICY = 3, 4
_TEMPLATE, _POLICY_TYPE, _MARK, _IF_ID = 5, 16, 21, 31

_AF_INET, _ESP, _MODE_TUNNEL = 2, 50, 1
_NO_LIMIT, _ALL_ALGORITHMS = (1 << 64) - 1, (1 << 32) - 1

#: Hooks of packets at which the policies of a direction decide.
_HOOKS = {Direction.IN: "input", Direction.OUT: "postrouting", Direction.FWD: "forward"}
#: struct xfrm_userpolicy_default: what happens to packets without a policy, in these directions.
_DEFAULT, _DIRECTIONS = struct.Struct("=BBB"), (Direction.IN, Direction.FWD, Direction.OUT)
#: struct xfrm_selector: addresses, ports, family, lengths, protocol, interface, user.
_SELECTOR = struct.Struct("=16s16sHHHHHBBB3xiI")
#: struct xfrm_usersa_info up to the SPI: selector, destination, SPI.
_SA = struct.Struct(f"={_SELECTOR.size}x16s4s")
#: struct xfrm_userpolicy_info after the selector: limits, their current use, and the rest.
_INFO = struct.Struct("=8Q4QIIBBBB4x")
_WHOLE = struct.Struct(f"={_SELECTOR.size}s{_INFO.size}s")
#: struct xfrm_userpolicy_id
_ID = struct.Struct(f"={_SELECTOR.size}sIB3x")
#: struct xfrm_user_tmpl
_TMPL = struct.Struct("=16s4sB3xH2x16sIBBBxIII")


def pack_policy(policy: XfrmPolicy) -> bytes:
    """Return the body of a message that creates a policy or replaces the one with its selector."""
    limits = (_NO_LIMIT,) * 4 + (0,) * 4
    info = _INFO.pack(*limits, 0, 0, 0, 0, policy.priority, 0, policy.direction, policy.action, 0, 0)
    return _pack_selector(policy) + info + (_template(policy.tunnel) if policy.tunnel else b"")


def pack_policy_id(policy: XfrmPolicy) -> bytes:
    """Return the body of a message that deletes the policy with this selector."""
    return _ID.pack(_pack_selector(policy), 0, policy.direction)


def decode_policy(data: bytes, offset: int, end: int) -> XfrmPolicy | None:
    """Parse a policy in a dump; None if it is not for packets like ours. Raises ``MalformedNetlink``."""
    selector, info = unpack(_WHOLE, data, offset, end)
    return _decode(bytes(selector), bytes(info), attributes(data, offset + _WHOLE.size, end))


def decode_rule(
    data: bytes, offset: int, end: int, ends: Container[bytes] | None = None
) -> tuple[Family, Direction, int, Rule] | None:
    """Return a policy of any program in a dump as a rule, with family, direction and priority.

    None for that of a socket. A condition that is not looked at is unknown. With the ``ends`` of all SAs,
    one that wants packets encrypted drops them if no SA leads to its own. Raises ``MalformedNetlink``.
    """
    selector, info = unpack(_WHOLE, data, offset, end)
    to, source, *ports, family, to_bits, source_bits, protocol, device, _ = _SELECTOR.unpack(bytes(selector))
    *_, priority, index, way, action, _, _ = _INFO.unpack(bytes(info))
    if way not in tuple(Direction) or action not in tuple(Action) or family not in FAMILY:
        return None
    size, direction = 4 if family == _AF_INET else 16, Direction(way)
    dport, _, sport, _ = map(socket.ntohs, ports)
    found: list[tuple[str, str, Value]] = [("src", "source", network_of(source[:size], source_bits))]
    found.append(("dst", "destination", network_of(to[:size], to_bits)))
    found += [("proto", "protocol", protocol_name(protocol))] if protocol else []
    found += [(side, side, (port, port)) for side, port in (("sport", sport), ("dport", dport)) if port]
    more = attributes(data, offset + _WHOLE.size, end)
    is_apart = device or _is_apart(more)
    lacks = "" if action or ends is None else _lacking(more.get(_TEMPLATE, b""), size, ends)
    tests = [*(Test(field, (value,)) for _, field, value in found), *((UNKNOWN,) if is_apart else ())]
    text = " ".join(f"{word} {value[0] if isinstance(value, tuple) else value}" for word, _, value in found)
    text += f"{lacks} action {Action(action).name.lower()} index {index} dir {direction.name.lower()}"
    return (
        FAMILY[family],
        direction,
        priority,
        Rule(DROP if action or lacks else ACCEPT, tuple(tests), text=text),
    )


def _lacking(templates: bytes, size: int, ends: Container[bytes]) -> str:
    """Return the first end that a policy wants packets encrypted for, if no SA leads there."""
    if len(templates) < _TMPL.size:
        return ""
    to, _, protocol, *_, optional, _, _, _ = _TMPL.unpack_from(templates)
    if optional or not any(to) or to[:size] in ends:
        return ""
    return f" tmpl dst {ip_address(to[:size])} proto {protocol_name(protocol)} without state"


#: Packets of charon's own, which pass all policies by, as what it has encrypted does.
_OF_CHARON = (
    Rule(ACCEPT, (Test("protocol", ("esp",)),)),
    Rule(ACCEPT, (Test("protocol", ("udp",)), Test("port", ((500, 500), (4500, 4500))))),
)


def chains(
    found: Iterable[tuple[Family, Direction, int, Rule]],
    *,
    is_ipsec: bool,
    blocked: Collection[Direction] = (),
) -> list[PolicyChain]:
    """Return policies as the chains that packets pass (pure). With ipsec guards are no fault.

    In ``blocked`` directions the kernel drops packets without a policy.
    """
    rules: dict[tuple[Family, Direction], list[Rule]] = {}
    for family, direction, priority, rule in sorted(found, key=lambda each: each[2]):
        if not (is_ipsec and priority >= ALLOW_PRIORITY):
            rules.setdefault((family, direction), list(_OF_CHARON if is_ipsec else ())).append(rule)
    for key in itertools.product(FAMILIES, blocked):
        rules.setdefault(key, list(_OF_CHARON if is_ipsec else ()))
    return [
        PolicyChain("legacy", family, "xfrm", "", _HOOKS[way], way in blocked, {"": tuple(each)})
        for (family, way), each in rules.items()
    ]


def read_chains(*, is_ipsec: bool) -> list[PolicyChain]:
    """Return the policies of all programs as chains. Raises ``OSError``."""
    with closing(open_xfrm()) as kernel:
        # Those of charon's tunnels are judged by its sessions.
        ends = None if is_ipsec else _ends(kernel)
        found = filter(None, (decode_rule(*each, ends) for each in kernel.dump(GET_POLICY, b"")))
        return chains(list(found), is_ipsec=is_ipsec, blocked=_blocked(kernel))


def _blocked(kernel: NetlinkSocket) -> list[Direction]:
    """Return the directions in which packets without a policy are dropped; none before Linux 5.14."""
    with suppress(OSError):
        acts = unpack(_DEFAULT, *kernel.ask(_GET_DEFAULT, bytes(_DEFAULT.size)))
        return [way for way, act in zip(_DIRECTIONS, acts, strict=True) if act == _BLOCKS]
    return []


def _ends(kernel: NetlinkSocket) -> set[bytes]:
    """Return the addresses that SAs lead to, with the length of either family; not of SAs without keys."""
    found = (map(bytes, unpack(_SA, *each)) for each in kernel.dump(GET_SA, b""))
    return {to[:size] for to, spi in found if any(spi) for size in (4, 16)}


def decode_spi(data: bytes, offset: int, end: int) -> str:
    """Return the SPI of an SA in a dump, as charon writes it. Raises ``MalformedNetlink``."""
    _, found = unpack(_SA, data, offset, end)
    return bytes(found).hex()


def _decode(selector: bytes, info: bytes, found: dict[int, bytes]) -> XfrmPolicy | None:
    to, source, *ports, family, to_bits, source_bits, protocol, interface, _ = _SELECTOR.unpack(selector)
    *limits, priority, index, direction, action, _, _ = _INFO.unpack(info)
    is_ours = family == _AF_INET and direction in tuple(Direction)
    if not is_ours or _is_apart(found):
        return None
    is_whole = not (any(ports) or protocol or interface)
    if action not in tuple(Action):
        raise MalformedNetlink
    tunnel, odd = _read_templates(found.get(_TEMPLATE, b""))
    if any(limits[6:8]):
        odd = "with an end of its life"
    return XfrmPolicy(
        Direction(direction),
        _network(source, source_bits),
        _network(to, to_bits),
        priority,
        tunnel,
        Action(action),
        odd,
        0 if is_whole else index,
    )


def _is_apart(found: dict[int, bytes]) -> bool:
    """Return True for a policy of another type, or for packets with a mark or through an XFRM interface."""
    return any(any(found.get(kind, b"")) for kind in (_POLICY_TYPE, _MARK, _IF_ID))


def _pack_selector(policy: XfrmPolicy) -> bytes:
    source, to = policy.source, policy.destination
    return _SELECTOR.pack(
        to.network_address.packed,
        source.network_address.packed,
        *(0, 0, 0, 0),
        _AF_INET,
        to.prefixlen,
        source.prefixlen,
        0,
        0,
        0,
    )


def _template(tunnel: Tunnel) -> bytes:
    packed = _TMPL.pack(
        tunnel.destination.packed,
        bytes(4),
        _ESP,
        _AF_INET,
        tunnel.source.packed,
        tunnel.reqid,
        _MODE_TUNNEL,
        0,
        tunnel.optional,
        *(_ALL_ALGORITHMS,) * 3,
    )
    return attribute(_TEMPLATE, packed)


def _read_templates(data: bytes) -> tuple[Tunnel | None, str]:
    """Return the first template, and a description of anything that flannel's templates never have."""
    if not data:
        return None, ""
    if len(data) < _TMPL.size:
        raise MalformedNetlink
    to, spi, protocol, family, source, reqid, mode, _, optional, *algorithms = _TMPL.unpack_from(data)
    is_usual = (len(data), protocol, family, mode) == (_TMPL.size, _ESP, _AF_INET, _MODE_TUNNEL)
    tunnel = Tunnel(IPv4Address(source[:4]), IPv4Address(to[:4]), reqid, bool(optional))
    if not is_usual or any(spi) or set(algorithms) != {_ALL_ALGORITHMS}:
        return tunnel, "with other templates"
    return tunnel, ""


def _network(address: bytes, bits: int) -> IPv4Network:
    if bits > 32:
        raise MalformedNetlink
    return IPv4Network((address[:4], bits), strict=False)


log = logging.getLogger(__name__)

#: Seconds between two reads without notifications.
_AUDIT = 30.0
#: Receive buffer for notifications in bytes: enough for a flush of a few thousand policies.
RECEIVE_BUFFER = 4 << 20
#: Datagrams to read at a time, so that a storm of notifications does not block other work.
_AT_A_TIME = 1000


class XfrmPolicyTable(Table):
    """Table of flannel's policies inside ``network``, without those inside ``spared``. Used by one thread."""

    name = POLICIES
    what = "the IPsec policies"
    audit = _AUDIT

    def __init__(self, network: IPv4Network, spared: Sequence[IPv4Network] = ()) -> None:
        self._network = network
        self._spared = spared
        if spared:
            self.name = f"{POLICIES} of {network}"
        self._kernel: NetlinkSocket | None = None
        self._news: NetlinkSocket | None = None
        self._bypasses: tuple[Bypass, ...] = ()

    def bypasses(self) -> tuple[Bypass, ...]:
        """Return other programs' policies that let packets pass unencrypted, as of the last read."""
        return self._bypasses

    def has(self, policy: XfrmPolicy) -> bool:
        """Return True for one of flannel's policies that belongs here."""
        spared = any(is_flannels(policy, each) for each in self._spared)
        return is_flannels(policy, self._network) and not spared

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield flannel's policies, and foreign ones with the key of a desired one."""
        # Read in one go: a write may come between two objects.
        found = list(policies(self._open()))
        self._bypasses = tuple(
            Bypass(str(each), f"ip xfrm policy delete {_selector(each)}")
            for each in found
            if passes_by(each, self._network, scope.desired.values())
        )
        for policy in found:
            if self.has(policy):
                yield Seen(policy)
            elif policy.key in scope.desired:
                yield Seen(policy, Claim.FOREIGN)

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        kinds = [NEW_POLICY if put.was is None else UPDATE_POLICY for put in puts]
        may = [place for place, put in enumerate(puts) if put.claim is not Claim.FOREIGN]
        refused = self._write((kinds[place], pack_policy(_policy(puts[place].want)), place) for place in may)
        for place, put in enumerate(puts):
            if put.claim is Claim.FOREIGN:
                report.failed.append(_stands_in_the_way(put))
            elif code := refused.get(place):
                is_taken = code == errno.EEXIST
                report.failed.append(Failure(put.want, os.strerror(code), _remedy(code), is_taken=is_taken))
            else:
                report.made.append(put.want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        refused = self._write(
            (DELETE_POLICY, pack_policy_id(_policy(each)), place) for place, each in enumerate(found)
        )
        for place, each in enumerate(found):
            code = refused.get(place, 0)
            if code in (0, errno.ENOENT):
                report.removed.append(each)
            else:
                report.failed.append(Failure(each, os.strerror(code)))
        return report

    def close(self, *, remove: bool) -> None:
        """Release the sockets. Policies stay, so that nothing leaves unencrypted without the daemon."""
        del remove
        for each in filter(None, (self._kernel, self._news)):
            each.close()
        self._kernel = self._news = None

    # ---- notifications -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._news.fileno() if self._news else -1

    def changes(self) -> list[Changes]:
        """Return one change if another program has changed any policy, or notifications were lost."""
        if self._news is None or self._kernel is None:
            return []
        authors = {port for _, port in notifications(self._news)}
        return [Changes()] if authors - {self._kernel.port} else []

    # ---- the kernel --------------------------------------------------------------------------------

    def _open(self) -> NetlinkSocket:
        """Return the socket. Notifications are enabled before the first read."""
        if self._kernel is None:
            self._news = self._news or open_xfrm((GROUP_POLICY,), RECEIVE_BUFFER)
            self._kernel = open_xfrm()
        return self._kernel

    def _write(self, content: Iterator[tuple[int, bytes, int]]) -> dict[int, int]:
        """Send messages. Return the errno of each refused one by its index."""
        batch = (message(kind, NLM_F_REQUEST, body, place) for kind, body, place in content)
        return {place: code for failed in self._open().write(batch) for place, code in failed}


def stale_tables(networks: Iterable[IPNetwork]) -> Iterator[XfrmPolicyTable]:
    """Yield a table for each network with stale policies of an ipsec backend, to sweep them.

    They would block the packets of any other backend. This does not load the kernel module of NETLINK_XFRM.
    The first network's table has the name of the ipsec backend's.
    """
    if not has_xfrm_policies():
        return
    try:
        with closing(open_xfrm()) as kernel:
            found = list(policies(kernel))
    except OSError as failure:
        log.log(V(1), "Cannot read the IPsec policies of an earlier run: %s", failure)
        return
    of_family = [each for each in networks if isinstance(each, IPv4Network)]
    for number, network in enumerate(of_family):
        table = XfrmPolicyTable(network, of_family[:number])
        if any(map(table.has, found)):
            yield table


def open_xfrm(groups: Sequence[int] = (), receive_buffer: int = 1 << 20) -> NetlinkSocket:
    """Open a socket. Raises ``OSError`` with the remedy if this kernel lacks NETLINK_XFRM."""
    try:
        return NetlinkSocket(groups, receive_buffer, protocol=NETLINK_XFRM)
    except OSError as failure:
        if failure.errno == errno.EPROTONOSUPPORT:
            text = f"{os.strerror(failure.errno)}; load it: modprobe -a {MODULES}"
            raise OSError(failure.errno, text) from None
        raise


def notifications(news: NetlinkSocket) -> Iterator[tuple[int, int]]:
    """Yield type and author's port of each pending notification, without blocking; ``LOST`` after a loss."""
    for _ in range(_AT_A_TIME):
        try:
            data = news.receive()
        except BlockingIOError:
            return
        except OSError as failure:
            if failure.errno != errno.ENOBUFS:
                raise
            yield LOST, LOST
        else:
            yield from ((kind, port) for kind, _, _, port, _, _ in split(data))


def policies(kernel: NetlinkSocket) -> Iterator[XfrmPolicy]:
    """Yield the policies that could be ours. Raises ``OSError``."""
    for data, offset, end in kernel.dump(GET_POLICY, b""):
        policy = decode_policy(data, offset, end)
        if policy is not None:
            yield policy


def _policy(resource: Resource) -> XfrmPolicy:
    assert isinstance(resource, XfrmPolicy)
    return resource


def _selector(policy: XfrmPolicy) -> str:
    """Return a policy as iproute2 selects it for its removal."""
    which = f"index {policy.index}" if policy.index else f"src {policy.source} dst {policy.destination}"
    return f"{which} dir {policy.direction.name.lower()}"


def _stands_in_the_way(put: Put) -> Failure:
    remedy = f"stop the program that made it, and ip xfrm policy delete {_selector(_policy(put.want))}"
    return Failure(put.want, f"another program's {put.was} stands there", remedy)


def _remedy(code: int) -> str:
    return f"load what is missing: modprobe -a {MODULES}" if code == errno.EPROTONOSUPPORT else ""


class Associations:
    """View of the kernel's SAs. Both sockets are opened by the first read."""

    def __init__(self) -> None:
        self._kernel: NetlinkSocket | None = None
        self._news: NetlinkSocket | None = None

    def spis(self) -> frozenset[str]:
        """Return the SPIs of all SAs. Raises ``OSError``."""
        self._news = self._news or open_xfrm((GROUP_SA,), RECEIVE_BUFFER)
        self._kernel = self._kernel or open_xfrm()
        return frozenset(decode_spi(*each) for each in self._kernel.dump(GET_SA, b""))

    def fileno(self) -> int:
        return self._news.fileno() if self._news else -1

    def were_flushed(self) -> bool:
        """Return True after a flush, and after lost notifications. charon itself removes single SAs."""
        found = [kind for kind, _ in notifications(self._news)] if self._news else []
        return FLUSH_SA in found or LOST in found

    def close(self) -> None:
        for each in filter(None, (self._kernel, self._news)):
            each.close()
        self._kernel = self._news = None
