"""What the doctor says about sessions of encrypted networks, and about charon."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.backends.ipsec.resources import ConnectionSas
from flanneld.ctl.checks import Facts
from flanneld.ctl.checks.encryption import (
    CharonState,
    lacking_objects,
    sessions_of,
    standing,
    with_associations,
)
from flanneld.diagnostics.status import SessionStatus, known
from flanneld.network.genetlink import SeenDevice, SeenPeer
from tests.unit.ctl.documents import status_of
from tests.unit.ctl.findings import HINT, PROBLEM, document, evidence, said
from tests.unit.ctl.test_checks import DOCUMENT, SILENT, STUCK, peer

NOW = 1_000.0
SUBNETS = ("10.5.2.0/24", "10.5.3.0/24")


def wanted(text: str, table: str, *, is_there: bool = False) -> dict[str, Any]:
    return {"kind": "x", "text": text, "value": None, "in_kernel": is_there, "table": table}


def test_keys_and_policies_that_the_kernel_lacks_are_those_of_encryption() -> None:
    local = [
        wanted("key", "wireguard"),
        wanted("peer", "wireguard", is_there=True),
        wanted("policy", "xfrm-policies"),
        wanted("masquerading", "nft"),
    ]
    told = status_of({"local": local})
    assert [str(each.value) for each in lacking_objects(told)] == ["key", "policy"]


# ---- sessions -----------------------------------------------------------------------------------------


def node(number: int, *sessions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"subnets": [SUBNETS[number]], "backend": "wireguard", "sessions": sessions} | changes


def session(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"subnet": SUBNETS[number], "state": "established", "rx_bytes": 5, "tx_bytes": 5} | changes


def seen(number: int = 0, *, handshake: float = NOW, name: str = "flannel-wg") -> SeenDevice:
    nets = (ip_network(SUBNETS[number]),)
    there = SeenPeer(
        bytes(32), endpoint=None, last_handshake=handshake, rx_bytes=7, tx_bytes=8, allowed_ips=nets
    )
    return SeenDevice(7, name, 51820, 0, None, bytes(32), (there,))


def status(*peers: dict[str, Any], backend: str = "wireguard", also: str | None = None) -> Any:
    return status_of({"network": {"backend": backend, "also": also}, "peers": peers})


def sessions_now(told: Any, *devices: SeenDevice, silent: tuple[str, ...] = ()) -> list[Any]:
    return [known(each.sessions) for each in sessions_of(told, devices, silent, NOW)]


def test_session_is_that_of_the_device_with_the_peers_subnet() -> None:
    told = status(node(0, session()), node(1, session(1)))
    (first,), (second,) = sessions_now(told, seen(0), seen(1, handshake=0.0, name="flannel-wg-v6"))
    assert first == SessionStatus(SUBNETS[0], "established", NOW, rx_bytes=7, tx_bytes=8, port=51820)
    assert second == SessionStatus(SUBNETS[1], "idle", None, rx_bytes=7, tx_bytes=8, port=51820)


def test_session_that_no_device_has_is_told_for_a_silent_peer_only() -> None:
    told = status(node(0, session()), node(1, session(1)))
    (first,), second = sessions_now(told, seen(0), silent=(SUBNETS[1],))
    assert first.state == "established"
    assert [(each.state, each.rx_bytes) for each in second] == [("silent", 5)]
    assert second[0].problem.startswith("flannel-wg has no peer with this subnet; ")
    assert sessions_now(told, seen(0))[1] == ()


def test_peers_of_another_backend_and_without_a_device_stay_as_they_are() -> None:
    others = [node(0, session(state="silent"), backend=name) for name in ("vxlan", "xfrm-mesh")]
    for other in others:
        assert sessions_now(status(other), seen()) == [(SessionStatus(SUBNETS[0], "silent", None, 5, 5),)]
    assert sessions_now(status(node(0, session()))) == [
        (SessionStatus(SUBNETS[0], "established", None, 5, 5),)
    ]


@pytest.mark.parametrize(
    ("before", "after", "stuck"),
    [
        (session(), session(tx_bytes=6), True),
        (session(), session(tx_bytes=5), False),
        (session(), session(tx_bytes=4), False),
        (session(), session(tx_bytes=6, rx_bytes=6), False),
        (session(), session(tx_bytes=6, rx_bytes=4), False),
        (session(1), session(tx_bytes=6), False),
        (session(), session(tx_bytes=6, state="idle"), False),
    ],
    ids=["stuck", "nothing sent", "made again", "received", "counted anew", "new", "no session"],
)
def test_session_is_stuck_while_sent_bytes_grow_alone(
    before: dict[str, Any], after: dict[str, Any], stuck: bool
) -> None:
    def found(**backends: Any) -> list[str]:
        return list(standing(status(node(0, before)), status(node(0, after), **backends)))

    assert found() == found(backend="vxlan", also="wireguard") == [SUBNETS[0]] * stuck
    assert found(backend="vxlan") == []


def test_associations_are_those_of_the_peers_first_subnet() -> None:
    told = status(node(0, session(state="silent", problem="no answer")), node(1), backend="ipsec")
    sas = ConnectionSas(children=[{"encap": b"yes"}], endpoint="192.0.2.3:4500")
    first, second = with_associations(told, {SUBNETS[1]: sas})
    assert first == told.each_peer[0]
    assert known(second.sessions) == (
        SessionStatus(SUBNETS[1], "established", endpoint="192.0.2.3:4500", encapsulated=True),
    )


@pytest.mark.parametrize(
    ("standing", "silent", "devices", "found"),
    [
        (["10.5.2.0/24"], True, ["flannel-wg"], 1),
        (["10.5.2.0/24"], False, ["flannel-wg"], 0),
        (["10.5.9.0/24"], True, ["flannel-wg"], 0),
        ([], True, ["flannel-wg"], 0),
    ],
)
def test_device_that_takes_nothing_in_is_told_for_silent_peers(
    standing: list[str], silent: bool, devices: list[str], found: int
) -> None:
    paths = tuple(replace(each, carried=None if silent else 1450) for each in STUCK.paths)
    facts = replace(STUCK, standing=tuple(standing), paths=paths, status=document(devices=devices).status)
    cure = "if the peers do send: echo 0 >/sys/class/net/flannel-wg/threaded"
    seen = said("receiving", facts)
    assert seen == [(HINT, "nothing comes in from 1 peer with valid keys", cure)] * found
    assert not said("receiving", replace(facts, paths=(replace(paths[0], name="underlay"),)))


WHERE = "192.0.2.2:51820"


@pytest.mark.parametrize(
    ("changes", "is_refused", "told_by", "advice"),
    [
        ({}, False, f"packets are sent to {WHERE} and nothing comes back", "see whether its daemon is up"),
        (
            {"endpoint": ""},
            False,
            "packets are sent to no endpoint and nothing comes back",
            "see whether its",
        ),
        (
            {},
            True,
            f"nothing listens at {WHERE}: the node refuses the packets",
            "see that flanneld runs there with the same backend and port",
        ),
        (
            {"protocol": "ipsec"},
            True,
            f"nothing listens at {WHERE}: the node refuses the packets",
            "see that flanneld and charon run there with the same backend",
        ),
        (
            {"protocol": "ipsec"},
            False,
            f"charon gets no answer from {WHERE}",
            "see whether flanneld and charon",
        ),
        ({"problem": "a; b; do it"}, True, f"charon says of {WHERE}: a; b", "do it"),
        ({"problem": "a; do it", "endpoint": ""}, False, "no endpoint: a", "do it"),
        (
            {"rx_bytes": 148},
            False,
            f"handshakes of {WHERE} arrive with the right key, and no session comes of them",
            "see whether the PSK is the same on both nodes",
        ),
        (
            {"rx_bytes": 148, "handshake": NOW},
            False,
            f"packets are sent to {WHERE} and nothing comes back",
            "see whether its",
        ),
    ],
)
def test_silence_of_a_peer_is_told_by_what_is_known_of_it(
    changes: dict[str, Any], is_refused: bool, told_by: str, advice: str
) -> None:
    answered = {**SILENT, "state": "established"}
    facts = peer(sessions=[answered, {**SILENT, **changes}])
    facts = replace(facts, refusing=frozenset({"192.0.2.2"} if is_refused else {"192.0.2.3"}))
    ((severity, problem, cure),) = said("handshakes", facts)
    assert (severity, problem) == (PROBLEM, "no handshake with the node of 10.5.2.0/24")
    assert evidence("handshakes", facts) == [told_by]
    assert cure.startswith(advice)


# ---- charon, conditions and keys ----------------------------------------------------------------------


def charon(state: CharonState | None, table: str = "routes", origin: str = "daemon") -> Facts:
    facts = document(refused=[{"object": "x", "reason": "y", "table": table}])
    return replace(facts, charon=state, origin=origin)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (CharonState.NOT_INSTALLED, "charon is not installed"),
        (CharonState.NOT_RUNNING, "charon does not run"),
        (CharonState.HANGS, "charon does not answer"),
        (CharonState.ANSWERS, ""),
        (None, ""),
    ],
)
def test_charon_is_told_if_the_daemon_misses_it_or_it_hangs(state: CharonState | None, problem: str) -> None:
    def problems(facts: Facts) -> list[str]:
        return [what for _, what, _ in said("charon", facts)]

    wanted = [problem] * bool(problem)
    assert problems(charon(state, table="charon")) == problems(charon(state, origin="store")) == wanted
    assert problems(charon(state)) == (wanted if state is CharonState.HANGS else [])


@pytest.mark.parametrize(
    ("name", "part", "severity", "cure"),
    [
        ("bypass", "encryption", PROBLEM, "see who needs it, then remove it: ip route del x"),
        ("symmetric NAT", "mesh", HINT, "remove it: ip route del x"),
    ],
)
def test_condition_of_the_daemon_is_told_by_its_part(name: str, part: str, severity: Any, cure: str) -> None:
    parts = {"encryption", "mesh", "store", part}
    text = "a route leads past; remove it: ip route del x"
    facts = document(health={"conditions": [{"part": each, "problem": text} for each in parts]})
    assert said(name, facts) == [(severity, "a route leads past", cure)]


@pytest.mark.parametrize(("code", "found"), [("cloned key", 1), ("", 0), ("other", 0)])
def test_clone_with_our_key_is_told(code: str, found: int) -> None:
    facts = peer(state="refused", reason="they have one key; restart there", code=code)
    assert [what for _, what, _ in said("cloned keys", facts)] == [
        f"the node of {DOCUMENT['peers'][0]['subnets'][0]} has our key"
    ] * found
    assert evidence("cloned keys", facts) == ["they have one key"] * found
