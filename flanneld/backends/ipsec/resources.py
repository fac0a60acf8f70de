"""Resources of the ipsec backend beside XFRM policies: charon, its keys, connections and sessions (pure)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld.backends.ipsec.vici import ReadSection, Section, number, sections, text
from flanneld.model import IPNetwork, Secret
from flanneld.network.xfrm import REQID
from flanneld.state.resources import Key, Kind
from flanneld.state.table import TunnelSession

#: Names of the tables.
CHARON, CONNECTIONS = "charon", "charon-connections"
#: Prefix of our keys' names in charon.
KEY_PREFIX = "flannel-"

#: Upstream's proposals, which Go peers require.
_IKE_PROPOSAL = "aes256-sha256-modp4096"
#: Seconds without a packet from a peer before charon sends a dead peer detection request.
_DPD_DELAY = "30s"


class Charon(Struct, frozen=True, gc=False):
    """strongSwan's IKE daemon charon, as a process that answers."""

    kind: ClassVar[Kind] = Kind.REMOTE

    @property
    def key(self) -> Key:
        return (CHARON, "process")

    def __str__(self) -> str:
        return "charon"


class SharedKey(Struct, frozen=True, gc=False):
    """The PSK, loaded for one node's address."""

    kind: ClassVar[Kind] = Kind.REMOTE
    owner: IPv4Address
    secret: Secret

    @property
    def key(self) -> Key:
        return (CONNECTIONS, self.name)

    @property
    def name(self) -> str:
        return f"{KEY_PREFIX}{self.owner}"

    def message(self) -> Section:
        """Return the arguments of ``load-shared``."""
        owners = [str(self.owner)]
        return {"id": self.name, "type": "IKE", "data": self.secret.value, "owners": owners}

    def __str__(self) -> str:
        return f"key of {self.owner}"


class IkeConnection(Struct, frozen=True, gc=False):
    """Connection: parameters for the negotiation of the SAs with one peer.

    Packets leave from ``local``, which differs from ``public`` behind NAT.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    public: IPv4Address
    local: IPv4Address
    own: IPv4Network
    peer: IPv4Network
    remote: IPv4Address
    esp_proposal: str = ""
    udp_encap: bool = False

    @property
    def key(self) -> Key:
        return (CONNECTIONS, self.name)

    @property
    def subnet(self) -> IPNetwork:
        """Return the subnet whose unreadable lease keeps this connection."""
        return self.peer

    @property
    def name(self) -> str:
        """Return the connection's name, as in upstream."""
        return f"{self.public}-{self.own}-{self.peer}-{self.remote}"

    @property
    def child(self) -> str:
        return f"{self.own}-{self.peer}"

    def message(self) -> Section:
        """Return the arguments of ``load-conn``, as in upstream."""
        child: Section = {
            "local_ts": [str(self.own)],
            "remote_ts": [str(self.peer)],
            "esp_proposals": [self.esp_proposal],
            "start_action": "start",
            "close_action": "trap",
            "dpd_action": "restart",
            "rekey_time": "1h",
            "mode": "tunnel",
            "reqid": str(REQID),
            "policies": "no",
        }
        local = {"auth": "psk"} | ({} if self.local == self.public else {"id": str(self.public)})
        connection: Section = {
            "version": "2",
            "local_addrs": [str(self.local)],
            "remote_addrs": [str(self.remote)],
            "proposals": [_IKE_PROPOSAL],
            "keyingtries": "0",
            "dpd_delay": _DPD_DELAY,
            "encap": "yes" if self.udp_encap else "no",
            "local": local,
            "remote": {"auth": "psk"},
            "children": {self.child: child},
        }
        return {self.name: connection}

    def __str__(self) -> str:
        return f"connection of {self.own} with {self.peer} at {self.remote}"


def connection_of(name: str) -> IkeConnection | None:
    """Parse the name of a connection; None for one that flannel did not make."""
    try:
        public, own, peer, remote = name.split("-")
        ours, theirs = IPv4Address(public), IPv4Address(remote)
        return IkeConnection(ours, ours, IPv4Network(own), IPv4Network(peer), theirs)
    except ValueError:
        return None


def owner_of(name: str) -> IPv4Address | None:
    """Parse the name of a key; None for one that flannel did not load."""
    try:
        return IPv4Address(name.removeprefix(KEY_PREFIX)) if name.startswith(KEY_PREFIX) else None
    except ValueError:
        return None


class ConnectionSas(Struct):
    """SAs of one connection; ``is_negotiating`` is True while charon negotiates one.

    ``lost`` are those that charon takes for installed and the kernel lacks. ``unanswered`` are the numbers of
    those IKE SAs whose first request the peer has not answered.
    """

    is_negotiating: bool = False
    unanswered: list[str] = []
    children: list[ReadSection] = []
    lost: list[ReadSection] = []
    endpoint: str = ""


def by_connection(
    events: Iterable[ReadSection], spis: Container[str] | None = None
) -> dict[str, ConnectionSas]:
    """Group the events of ``list-sas`` by the connection's name.

    ``spis`` are those of the kernel's SAs, read after the events; without them charon is believed.
    """
    found: dict[str, ConnectionSas] = {}
    for name, ike in (item for event in events for item in sections(event).items()):
        known = found.setdefault(name, ConnectionSas())
        known.is_negotiating |= text(ike, "state") != "ESTABLISHED"
        if text(ike, "state") == "CONNECTING" and set(text(ike, "responder-spi")) == {"0"}:
            known.unanswered.append(text(ike, "uniqueid"))
        known.endpoint = f"{text(ike, 'remote-host')}:{text(ike, 'remote-port')}"
        children = ike.get("child-sas")
        for child in sections(children).values() if isinstance(children, dict) else ():
            if text(child, "state") in ("INSTALLED", "REKEYING", "REKEYED"):
                if spis is None or (text(child, "spi-in") in spis and text(child, "spi-out") in spis):
                    known.children.append(child)
                elif text(child, "state") == "INSTALLED":
                    known.lost.append(child)
                else:
                    known.is_negotiating = True  # charon is replacing it
            else:
                known.is_negotiating |= text(child, "state") not in ("DELETING", "DELETED", "DESTROYING")
    return found


def is_encapsulated(found: ConnectionSas) -> bool:
    """Return True if UDP carries the packets."""
    return any(text(each, "encap") == "yes" for each in found.children)


def session_of(
    connection: IkeConnection, found: ConnectionSas | None, now: float, problem: str = ""
) -> TunnelSession:
    """Return the session with one peer; its bytes are those of the current SAs.

    ``now`` is in seconds since 1970, ``problem`` the reason of a failed negotiation. charon negotiates with
    each peer as soon as it knows it, so a peer without an SA during a negotiation does not answer.
    """
    if found is None:
        endpoint = f"{connection.remote}:500" if problem else ""
        return TunnelSession(
            connection.peer,
            is_established=False,
            endpoint=endpoint,
            is_silent=bool(problem),
            problem=problem,
            protocol="ipsec",
        )
    children = found.children
    ages = [number(each, "install-time") for each in children]
    return TunnelSession(
        connection.peer,
        is_established=bool(children),
        handshake=now - min(ages) if ages else None,
        rx_bytes=sum(number(each, "bytes-in") for each in children),
        tx_bytes=sum(number(each, "bytes-out") for each in children),
        endpoint=found.endpoint,
        is_encapsulated=is_encapsulated(found),
        is_silent=(found.is_negotiating or bool(problem)) and not children,
        problem="" if children else problem,
        protocol="ipsec",
    )
