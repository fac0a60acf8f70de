"""Codec of NETLINK_XFRM's messages about policies and SAs (linux/xfrm.h)."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv4Network

from flanneld.network.rtnetlink.netlink import MalformedNetlink, attribute, attributes, unpack
from flanneld.network.xfrm.policy import Action, Direction, Tunnel, XfrmPolicy

# linux/xfrm.h, XFRM_MSG_*
NEW_POLICY, DELETE_POLICY, UPDATE_POLICY = 0x13, 0x14, 0x19
GET_SA, FLUSH_SA = 0x12, 0x1C
#: Not of the kernel: notifications were lost.
LOST = -1
#: Multicast groups of changes to SAs and policies, XFRMNLGRP_*.
GROUP_SA, GROUP_POLICY = 3, 4
_TEMPLATE, _POLICY_TYPE, _MARK, _IF_ID = 5, 16, 21, 31

_AF_INET, _ESP, _MODE_TUNNEL = 2, 50, 1
_NO_LIMIT, _ALL_ALGORITHMS = (1 << 64) - 1, (1 << 32) - 1

#: struct xfrm_selector: addresses, ports, family, lengths, protocol, interface, user.
_SELECTOR = struct.Struct("=16s16sHHHHHBBB3xiI")
#: struct xfrm_usersa_info up to the SPI: selector, destination, SPI.
_SA = struct.Struct(f"={_SELECTOR.size}x16x4s")
#: struct xfrm_userpolicy_info after the selector: limits, their current use, and the rest.
_INFO = struct.Struct("=8Q4QIIBBBB4x")
_WHOLE = struct.Struct(f"={_SELECTOR.size}s{_INFO.size}s")
#: struct xfrm_userpolicy_id
_ID = struct.Struct(f"={_SELECTOR.size}sIB3x")
#: struct xfrm_user_tmpl
_TMPL = struct.Struct("=16s4sB3xH2x16sIBBBxIII")


def pack(policy: XfrmPolicy) -> bytes:
    """Return the body of a message that creates a policy or replaces the one with its selector."""
    limits = (_NO_LIMIT,) * 4 + (0,) * 4
    info = _INFO.pack(*limits, 0, 0, 0, 0, policy.priority, 0, policy.direction, policy.action, 0, 0)
    return _selector(policy) + info + (_template(policy.tunnel) if policy.tunnel else b"")


def pack_id(policy: XfrmPolicy) -> bytes:
    """Return the body of a message that deletes the policy with this selector."""
    return _ID.pack(_selector(policy), 0, policy.direction)


def decode(data: bytes, offset: int, end: int) -> XfrmPolicy | None:
    """Parse a policy in a dump; None if it is not for packets like ours. Raises ``MalformedNetlink``."""
    selector, info = unpack(_WHOLE, data, offset, end)
    return _decode(bytes(selector), bytes(info), attributes(data, offset + _WHOLE.size, end))


def spi(data: bytes, offset: int, end: int) -> str:
    """Return the SPI of an SA in a dump, as charon writes it. Raises ``MalformedNetlink``."""
    (found,) = unpack(_SA, data, offset, end)
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


def _selector(policy: XfrmPolicy) -> bytes:
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
