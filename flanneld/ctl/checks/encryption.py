"""Checks of an encrypted network."""

from __future__ import annotations

from collections.abc import Iterator

from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, check


@check("M", "handshakes", "each peer that is sent packets agrees on keys")
def handshakes(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        for session in peer.get("sessions", ()):
            if session["state"] == "silent":
                yield Finding(
                    f"no handshake with the node of {session['subnet']}",
                    f"packets are sent to {session['endpoint'] or 'no endpoint'} and no session comes of it",
                    "no packet for its containers arrives",
                    Advice(
                        "see whether its daemon is up, its UDP port is open on the way, the PSK is the same"
                        " on both nodes, and no clock was set back"
                    ),
                    about=session["subnet"],
                )


@check("M", "bypass", "no route leads past the encryption")
def bypass(facts: Facts) -> Iterator[Finding]:
    for each in facts.section("health").get("conditions", ()):
        if each["part"] == "encryption":
            problem, _, remedy = each["problem"].partition("; ")
            yield Finding(
                problem,
                "read from the kernel's main routing table by the daemon",
                "what should be encrypted can be read on the way, so this node is not ready",
                Advice(f"see who needs that route, then {remedy}"),
            )


@check("M", "cloned keys", "each node has a key of its own")
def cloned_keys(facts: Facts) -> Iterator[Finding]:
    for peer in facts.peers:
        if peer["state"] == "refused" and "our own public key" in peer["reason"]:
            yield Finding(
                f"the node of {','.join(peer['subnets'])} has our key",
                peer["reason"].partition("; ")[0],
                "other nodes reach only one of both",
                Advice("on the machine that is the clone remove the key file, and restart flanneld there"),
                about=",".join(peer["subnets"]),
            )
