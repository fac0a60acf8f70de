"""Checks of an encrypted network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flanneld.ctl.evidence.encryption import CharonState
from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, check


@check("M", "handshakes", "each peer that is sent packets agrees on keys")
def handshakes(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        for session in peer.get("sessions", ()):
            if session["state"] == "silent":
                refused = not facts.refusing.isdisjoint(peer["public_ips"])
                evidence, advice = _of_silence(session, is_refused=refused)
                yield Finding(
                    f"no handshake with the node of {session['subnet']}",
                    evidence,
                    "no packet for its containers arrives",
                    Advice(advice),
                    about=session["subnet"],
                )


def _of_silence(session: Mapping[str, Any], *, is_refused: bool) -> tuple[str, str]:
    """Return evidence and advice for a peer with which no keys are agreed on."""
    where = session["endpoint"] or "no endpoint"
    if session.get("problem"):
        problem, _, remedy = session["problem"].rpartition("; ")
        return f"{'charon says of ' if session['endpoint'] else ''}{where}: {problem}", remedy
    is_ipsec = session.get("protocol") == "ipsec"
    if is_refused:
        return (
            f"nothing listens at {where}: the node refuses the packets",
            f"see that flanneld {'and charon run' if is_ipsec else 'runs'} there with the same backend"
            f"{'' if is_ipsec else ' and port'}",
        )
    if is_ipsec:
        return (
            f"charon gets no answer from {where}",
            "see whether flanneld and charon run there, and let in UDP 500, UDP 4500 and IP protocol 50"
            " on both nodes and on the way",
        )
    if session["rx_bytes"] and session["handshake"] is None:
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
        " often another process that uses UDP 500 or 4500",
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
    is_missed = facts.origin != "daemon" or any(
        each.get("table") == "charon" for each in facts.document.get("refused", ())
    )
    # The daemon may see a charon that we do not, as in a container with a /run of its own.
    if state in _CHARON and (is_missed or state is CharonState.HANGS):
        problem, evidence, advice = _CHARON[state]
        why = "no keys are negotiated: packets to peers are lost once the present SAs end"
        yield Finding(problem, evidence, why, Advice(advice))


@check("M", "bypass", "no route or policy leads past the encryption")
def bypass(facts: Facts) -> Iterator[Finding]:
    for each in facts.section("health").get("conditions", ()):
        if each["part"] == "encryption":
            problem, _, remedy = each["problem"].partition("; ")
            yield Finding(
                problem,
                "read from the kernel by the daemon",
                "what should be encrypted can be read on the way, so this node is not ready",
                Advice(f"see who needs it, then {remedy}"),
            )


@check("M", "cloned keys", "each node has a key of its own")
def cloned_keys(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer.get("code") == "cloned key":
            yield Finding(
                f"the node of {','.join(peer['subnets'])} has our key",
                peer["reason"].partition("; ")[0],
                "other nodes reach only one of both",
                Advice("on the machine that is the clone remove the key file, and restart flanneld there"),
                about=",".join(peer["subnets"]),
            )
