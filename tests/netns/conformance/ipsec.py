"""Tables of the ipsec backend under test: policies of the kernel, and charon's keys and connections."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from unittest.mock import patch

from flanneld.backends.ipsec.resources import Charon, IkeConnection, SharedKey
from flanneld.backends.ipsec.tables import CharonTable, ConnectionTable
from flanneld.model import Secret
from flanneld.network.xfrm import guards, tunnel_policies
from flanneld.network.xfrm_table import XfrmPolicyTable
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Table
from tests.calls import at_once
from tests.lab.namespace import Namespace
from tests.lab.wait import wait_for
from tests.netns.conformance.host import OnHost

NETWORK, OWN = IPv4Network("10.1.0.0/16"), IPv4Network("10.1.5.0/24")
HERE = IPv4Address("192.0.2.1")
PEERS = {IPv4Network(f"10.1.{number}.0/24"): IPv4Address(f"192.0.2.{number}") for number in (7, 8)}

_OUT = "src 10.1.5.0/24 dst 10.1.7.0/24 dir out"
_IN = "src 10.1.8.0/24 dst 10.1.5.0/24 dir in"
_BLOCK = "src 10.1.0.0/16 dst 10.1.0.0/16 dir out"
_TO_7 = "src 192.0.2.1 dst 192.0.2.7 proto esp reqid 11 mode tunnel"


class XfrmPolicies(OnHost):
    """Guards, and the tunnels to two peers."""

    resources = (
        *guards(NETWORK, OWN),
        *(policy for peer, remote in PEERS.items() for policy in tunnel_policies(OWN, peer, HERE, remote)),
    )
    drifts = (
        f"ip xfrm policy delete {_OUT}",
        f"ip xfrm policy update {_OUT} priority 5 tmpl {_TO_7}",
        f"ip xfrm policy update {_OUT} priority 0 tmpl {_TO_7.replace('.7 ', '.99 ')}",
        f"ip xfrm policy update {_OUT} priority 0 tmpl {_TO_7.replace('esp', 'ah')}",
        f"ip xfrm policy update {_OUT} priority 0 action block tmpl {_TO_7}",
        f"ip xfrm policy delete {_IN}",
        f"ip xfrm policy update {_BLOCK} priority 4294967295",
        f"ip xfrm policy delete {_BLOCK}",
        f"ip xfrm policy add src 10.1.5.0/24 dst 10.1.99.0/24 dir out tmpl {_TO_7}",
        "ip xfrm policy add src 10.1.66.0/24 dst 10.1.66.0/24 dir in priority 4294967294",
        "ip xfrm policy flush",
    )
    #: Beside ours with a mark, inside our network, and elsewhere.
    foreign = (
        f"ip xfrm policy add {_OUT} mark 7 action block",
        "ip xfrm policy add src 10.1.5.0/24 dst 10.1.44.0/24 dir out priority 9 tmpl"
        " src 192.0.2.1 dst 192.0.2.44 proto esp reqid 44 mode tunnel",
        "ip xfrm policy add src 10.8.0.0/24 dst 10.9.0.0/24 dir fwd action block",
    )
    shows_foreign = "ip xfrm policy | grep -A2 -E 'mark|10.1.44|10.8.0' | grep -vE '10.1.0.0/16|priority 42'"

    def make(self) -> XfrmPolicyTable:
        return XfrmPolicyTable(NETWORK)

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        assert isinstance(table, XfrmPolicyTable)
        assert table._kernel
        table._kernel.close()
        yield


class CharonConnections(OnHost):
    """Keys and connections of a charon on the host. It tells no key, so each run loads them again."""

    writes_anew = True
    resources: Sequence[Resource] = (
        *(SharedKey(owner, Secret(b"a secret of tests")) for owner in (HERE, *PEERS.values())),
        *(
            IkeConnection(HERE, HERE, OWN, peer, remote, "aes128gcm16-ecp256")
            for peer, remote in PEERS.items()
        ),
    )
    shows_foreign = "swanctl --list-conns | grep -A3 ^other"

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._directory = tempfile.TemporaryDirectory(prefix="conformance-")
        other = Path(self._directory.name) / "other.conf"
        other.write_text(
            "connections { other { remote_addrs = 192.0.2.44\n children { other { mode = tunnel } } } }\n"
        )
        none = Path(self._directory.name) / "none.conf"
        none.write_text("")
        self.foreign = (f"swanctl --load-conns --file {other}",)
        self.drifts = (
            f"swanctl --load-conns --file {none}",
            f"swanctl --load-creds --clear --noprompt --file {none}",
        )
        self._charon = CharonTable(lambda _: None, "conformance", at_once)
        assert self._charon.put([Put(Charon())]).failed == []

    def make(self) -> ConnectionTable:
        return ConnectionTable(NETWORK, at_once)

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        with patch.object(table, "_path", "/nonexistent"):
            yield

    def close(self) -> None:
        self._charon.close(remove=True)
        wait_for(lambda: not self._charon._process.pid, 20, "charon to end")
        self._directory.cleanup()
