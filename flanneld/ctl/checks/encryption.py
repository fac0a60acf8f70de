"""Checks of an encrypted network: its sessions, and charon; and how both are read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from flanneld.backends.registry import described
from flanneld.compat.glog import counted
from flanneld.ctl import compare
from flanneld.ctl.checks import check, few
from flanneld.ctl.compare import Comparison
from flanneld.ctl.paths import PathToPeer, listed
from flanneld.diagnostics.status import PeerStatus, SessionStatus, Status, known
from flanneld.errors import Fatal, Retryable
from flanneld.findings import Finding, Severity, hint
from flanneld.runtime import files

if TYPE_CHECKING:
    from flanneld.backends.ipsec.resources import ConnectionSas
    from flanneld.ctl.checks import Facts
    from flanneld.network.genetlink import SeenDevice

#: Tables of encrypting backends that are in the kernel: WireGuard's keys and peers, and policies of XFRM.
_KERNEL_TABLES = frozenset({"wireguard", "xfrm-policies"})
#: Seconds to wait for charon, which answers within milliseconds unless it hangs.
_TIME_LIMIT = 2.0


class CharonState(StrEnum):
    """State of charon, as its control socket shows it."""

    ANSWERS = "answers"
    HANGS = "hangs"
    NOT_RUNNING = "not running"
    NOT_INSTALLED = "not installed"


def lacking_objects(told: Status) -> Iterator[Comparison]:
    """Yield what the kernel lacks for encryption. A daemon that runs puts that back, or names a refusal."""
    return (
        each
        for each in compare.outside(told)
        if each.state == "missing" and each.value.key[0] in _KERNEL_TABLES
    )


def with_sessions(told: Status, paths: Collection[PathToPeer], now: float) -> Status:
    """Return the status with the sessions as they are now, after ``paths`` were probed.

    The daemon reads charon's sessions every 10 s, and calls a peer of WireGuard silent after up to 90 s. A
    probe through the tunnel asks for a handshake at once. Peers that are not known stay so.
    """
    if told.peers is UNSET:
        return told
    if "ipsec" in told.backends:
        told = replace(told, peers=tuple(with_associations(told, _associations())))
    if "wireguard" not in told.backends:
        return told
    # A node that does not answer at all may just be off.
    there = {each.peer for each in paths if each.name == "underlay" and each.carried is not None}
    silent = {each.peer for each in paths if each.name == "tunnel" and each.carried is None} & there
    try:
        devices = list(_devices(known(told.devices) or ()))
    except OSError:
        return told
    return replace(told, peers=tuple(sessions_of(told, devices, silent, now)))


def _associations() -> Mapping[str, ConnectionSas]:
    """Return the SAs that charon and the kernel have, by the peer's subnet; none without permission."""
    from flanneld.backends.ipsec import charon
    from flanneld.backends.ipsec.resources import by_connection, connection_of
    from flanneld.network.xfrm_table import Associations

    try:
        with closing(Associations()) as kernel, charon.ViciConnection(time_limit=_TIME_LIMIT) as connection:
            found = by_connection([*connection.listing("list-sas", "list-sa")], kernel.spis())
    except (Retryable, OSError):
        return {}
    named = {connection_of(name): sas for name, sas in found.items()}
    return {str(each.peer): sas for each, sas in named.items() if each is not None}


def _devices(names: Iterable[str]) -> Iterator[SeenDevice]:
    from flanneld.network.genetlink import WireGuardDevices

    with closing(WireGuardDevices()) as kernel:
        yield from filter(None, map(kernel.read, names))


def charon_of(told: Status) -> CharonState | None:
    """Return the state of charon; None without ipsec or permission."""
    if "ipsec" not in told.backends:
        return None
    from flanneld.backends.ipsec import charon

    if Path(charon.SOCKET).exists() and not os.access(charon.SOCKET, os.W_OK):
        return None
    try:
        with charon.ViciConnection(time_limit=_TIME_LIMIT) as connection:
            connection.ask("version")
    except charon.NoCharon:
        try:
            charon.find_charon()
        except Fatal:
            return CharonState.NOT_INSTALLED
        return CharonState.NOT_RUNNING
    except Retryable:
        return CharonState.HANGS
    return CharonState.ANSWERS


def with_associations(told: Status, associations: Mapping[str, ConnectionSas]) -> Iterator[PeerStatus]:
    """Yield the peers; one with SAs has an established session (pure)."""
    from flanneld.backends.ipsec.resources import is_encapsulated

    for each in told.each_peer:
        found = associations.get(each.subnets[0])
        if found is None or not found.children:
            yield each
            continue
        session = replace(
            next(iter(known(each.sessions) or ()), SessionStatus(each.subnets[0])),
            subnet=each.subnets[0],
            state="established",
            endpoint=found.endpoint,
            encapsulated=is_encapsulated(found),
        )
        yield replace(each, sessions=(session,))


def standing(before: Status, after: Status) -> Iterator[str]:
    """Yield peers with keys, by first subnet, whose received bytes stand while sent ones grow (pure)."""
    former = {each.subnet: each for peer in before.each_peer for each in known(peer.sessions) or ()}
    for peer in after.each_peer if "wireguard" in after.backends else ():
        for each in known(peer.sessions) or ():
            last = former.get(each.subnet)
            grows = last is not None and each.rx_bytes == last.rx_bytes and each.tx_bytes > last.tx_bytes
            if grows and each.state == "established":
                yield peer.subnets[0]


def is_threaded(name: str) -> bool:
    """Return True if a device takes in packets in a thread of the kernel (threaded NAPI)."""
    return files.text(Path(f"/sys/class/net/{name}/threaded")).strip() == "1"


@check("M", "receiving", "WireGuard's devices take in what arrives")
def receiving(facts: Facts) -> Iterator[Finding]:
    # A peer that was sent a keepalive, or data a moment ago, need not have answered yet: an echo it answers.
    silent = {each.peer for each in facts.paths if each.name == "tunnel" and each.carried is None}
    silent -= {peer for peer, _ in facts.passing}
    if stuck := [each for each in dict.fromkeys(facts.standing) if each in silent]:
        commands = (f"echo 0 >/sys/class/net/{name}/threaded" for name in facts.devices)
        yield hint(
            f"nothing comes in from {counted(len(stuck), 'peer')} with valid keys",
            f"{few(stuck)}: received bytes stand, sent ones grow; the device uses threaded NAPI",
            "on some kernels its thread stops, and received packets wait for ever",
            f"if the peers do send: {'; '.join(commands)}",
        )


def sessions_of(
    told: Status, devices: Collection[SeenDevice], silent: Collection[str], now: float
) -> Iterator[PeerStatus]:
    """Yield the peers, each with the sessions that the devices have with it (pure).

    A session also has the device's ``port``. ``silent`` are first subnets of peers that do not answer through
    the tunnel.
    """
    from flanneld.backends.wireguard.rotation import is_alive
    from flanneld.backends.wireguard.table import where

    found = {net: (device, peer) for device in devices for peer in device.peers for net in peer.allowed_ips}
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    for each in told.each_peer:
        if each.backend != "wireguard" or not names:
            yield each
            continue
        is_silent = each.subnets[0] in silent
        former = {session.subnet: session for session in known(each.sessions) or ()}
        sessions = []
        for subnet, net in zip(each.subnets, each.networks, strict=True):
            last = former.get(subnet, SessionStatus(subnet))
            state = "silent" if is_silent or last.state == "silent" else "idle"
            device, peer = found.get(net, (None, None))
            if device is not None and peer is not None:
                now_known = SessionStatus(
                    subnet,
                    state="established" if is_alive(peer, now) else state,
                    handshake=peer.last_handshake or None,
                    rx_bytes=peer.rx_bytes,
                    tx_bytes=peer.tx_bytes,
                    endpoint=where(peer),
                    port=device.listen_port,
                )
                sessions.append(now_known)
            elif is_silent:
                problem = f"{names} has no peer with this subnet; start the daemon: it adds the peer"
                sessions.append(replace(last, state="silent", problem=problem))
        yield replace(each, sessions=tuple(sessions))


@check("M", "handshakes", "each peer that is sent packets agrees on keys")
def handshakes(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        for session in known(peer.sessions) or ():
            if session.state == "silent":
                refused = not facts.refusing.isdisjoint(peer.public_ips)
                evidence, advice = _of_silence(session, is_refused=refused)
                yield Finding(
                    f"no handshake with the node of {session.subnet}",
                    evidence,
                    "no packet for its containers arrives",
                    advice,
                    about=session.subnet,
                )


def _of_silence(session: SessionStatus, *, is_refused: bool) -> tuple[str, str]:
    """Return evidence and advice for a peer with which no keys are agreed on."""
    where = session.endpoint or "no endpoint"
    if session.problem:
        problem, _, remedy = session.problem.rpartition("; ")
        return f"{'charon says of ' if session.endpoint else ''}{where}: {problem}", remedy
    is_ipsec = session.protocol == "ipsec"
    if is_refused:
        return (
            f"nothing listens at {where}: the node refuses the packets",
            f"see that flanneld {'and charon run' if is_ipsec else 'runs'} there with the same backend"
            f"{'' if is_ipsec else ' and port'}",
        )
    if is_ipsec:
        return (
            f"charon gets no answer from {where}",
            f"see whether flanneld and charon run there, and let in {listed(described('ipsec').flows)}"
            " on both nodes and on the way",
        )
    if session.rx_bytes and session.handshake is None:
        return (
            f"handshakes of {where} arrive with the right key, and no session comes of them",
            "see whether the PSK is the same on both nodes, and its UDP port is open on the way there",
        )
    return (
        f"packets are sent to {where} and nothing comes back",
        "see whether its daemon is up, its UDP port is open on the way, its device has the key of its"
        " lease (wg show), the PSK is the same on both nodes, and no clock was set back",
    )


_CHARON = {
    CharonState.NOT_INSTALLED: (
        "charon is not installed",
        "it is neither in PATH nor where distributions put it: flanneld exits with status 1",
        "install strongSwan with its VICI plug-in, then start flanneld; on Debian: apt-get install"
        " strongswan-charon strongswan-swanctl libstrongswan-standard-plugins",
    ),
    CharonState.NOT_RUNNING: (
        "charon does not run",
        "nothing listens at its control socket",
        "start flanneld, which starts charon; if it runs, its log says why charon does not start,"
        " often another process that has its UDP ports",
    ),
    CharonState.HANGS: (
        "charon does not answer",
        "its control socket exists, and a request was not answered",
        "wait 20 s: flanneld replaces the charon that it has started; restart another program's",
    ),
}


@check("M", "charon", "charon runs and answers")
def charon(facts: Facts) -> Iterator[Finding]:
    state = facts.charon
    refused = known(facts.status.refused) or ()
    is_missed = facts.origin != "daemon" or any(each.table == "charon" for each in refused)
    # The daemon may see a charon that we do not, as in a container with a /run of its own.
    if state in _CHARON and (is_missed or state is CharonState.HANGS):
        problem, evidence, advice = _CHARON[state]
        why = "no keys are negotiated: packets to peers are lost once the present SAs end"
        yield Finding(problem, evidence, why, advice)


def _conditions(
    facts: Facts,
    part: str,
    evidence: str,
    why: str,
    *,
    before: str = "",
    severity: Severity = Severity.PROBLEM,
) -> Iterator[Finding]:
    """Yield a finding for each of the daemon's conditions of a part; ``before`` comes before the remedy."""
    for each in facts.status.conditions:
        if each.part == part:
            problem, _, remedy = each.problem.partition("; ")
            yield Finding(problem, evidence, why, f"{before}{remedy}", severity=severity)


@check("M", "bypass", "no route or policy leads past the encryption")
def bypass(facts: Facts) -> Iterator[Finding]:
    yield from _conditions(
        facts,
        "encryption",
        "read from the kernel by the daemon",
        "what should be encrypted can be read on the way, so this node is not ready",
        before="see who needs it, then ",
    )


@check("M", "symmetric NAT", "in a mesh, peers behind NAT can meet this node")
def symmetric_nat(facts: Facts) -> Iterator[Finding]:
    yield from _conditions(
        facts,
        "mesh",
        "asked of two peers inside the tunnel by the daemon",
        "packets between their containers and ours are lost",
        severity=Severity.HINT,
    )


@check("M", "cloned keys", "each node has a key of its own")
def cloned_keys(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer.code == "cloned key":
            yield Finding(
                f"the node of {peer.name} has our key",
                peer.reason.partition("; ")[0],
                "other nodes reach only one of both",
                "on the machine that is the clone remove the key file, and restart flanneld there",
                about=peer.name,
            )
