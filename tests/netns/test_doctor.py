"""The doctor on hosts that are broken: each fix that it prints heals, and none cuts the host off."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.doctor import examine
from flanneld.ctl.findings import Fix
from tests.faults.table import FAULTS
from tests.lab import Lab, Node, wait_for
from tests.lab.kept import Kept
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_seeing import BACKEND, PATIENCE, answer, flannelctl
from tests.unit.ctl.test_checks import CASES
from tests.unit.network.firewall.test_rules import GOLDEN

#: The daemon leaves the host's firewall alone, so that nothing but the fix lets packets through.
NO_RULES = ("--iptables-forward-rules=false",)
#: Another default route than through the uplink, which makes a strict filter drop packets.
OTHER_DEFAULT = (
    "ip link add eth1 up type bridge",
    "ip address add 192.0.2.2/24 dev eth1",
    "ip route replace default via 192.0.2.1 dev eth1",
)
WALL = (
    "nft add table inet wall",
    "nft 'add chain inet wall passing { type filter hook forward priority 0; policy drop; }'",
)
#: Rules that an earlier run left in a place that the daemon was told to leave.
OWN_CHAINS = GOLDEN / "own-chains-both-ipv4.txt"
#: The link of the lab is inside this network: the mistake of a host whose LAN is.
AROUND_THE_LAN: dict[str, Any] = {"Network": "198.18.0.0/16", "SubnetMin": "198.18.100.0"}


#: Backend, flags, and True for dual stack and for a daemon that is asked.
Kind = tuple[str, tuple[str, ...], bool, bool]


@dataclass(frozen=True, slots=True)
class Illness:
    """Shell commands that break a host, and the check whose fix heals it.

    ``cuts`` says that no packet of a container reaches the peer meanwhile. The doctor asks the daemon, or
    without ``daemon`` the store.
    """

    check: str
    harm: tuple[str, ...]
    flags: tuple[str, ...] = ()
    backend: str = "vxlan"
    dual_stack: bool = False
    cuts: bool = False
    daemon: bool = True

    @property
    def kind(self) -> Kind:
        return self.backend, self.flags, self.dual_stack, self.daemon


#: Every check that offers a fix has a row here; a new check adds its own.
ILLNESSES = {
    "IPv4 is not forwarded": Illness("forwarding", ("sysctl -w net.ipv4.ip_forward=0",), cuts=True),
    "IPv6 is not forwarded": Illness(
        "forwarding", ("sysctl -w net.ipv6.conf.all.forwarding=0",), dual_stack=True, cuts=True
    ),
    "legacy policy": Illness("dropping", ("iptables-legacy -P FORWARD DROP",), NO_RULES, cuts=True),
    "policy": Illness("dropping", ("iptables-nft -P FORWARD DROP",), NO_RULES, cuts=True),
    "rule that refuses all": Illness("dropping", ("iptables-nft -I FORWARD -j REJECT",), NO_RULES, cuts=True),
    "policy for IPv6": Illness(
        "dropping", ("ip6tables-nft -P FORWARD DROP",), NO_RULES, dual_stack=True, cuts=True
    ),
    "table of others": Illness("dropping", WALL, NO_RULES, cuts=True),
    "rules left in iptables-legacy": Illness(
        "left rules",
        (f"iptables-legacy-restore {OWN_CHAINS}",),
        ("--iptables-flavour=nft",),
    ),
    "rules left in iptables-nft": Illness(
        "left rules",
        (f"iptables-nft-restore {OWN_CHAINS}",),
        ("--iptables-flavour=legacy",),
    ),
    "rules left in nftables": Illness(
        "left rules", (f"nft -f {GOLDEN}/native-ipv4.nft",), ("--iptables-flavour=nft",)
    ),
    "strict reverse path filter": Illness(
        "reverse path", (*OTHER_DEFAULT, "sysctl -w net.ipv4.conf.eth0.rp_filter=1")
    ),
    "MTU of the bridge": Illness("containers", ("ip link set cni0 mtu 1500",)),
    "uplink": Illness("uplink", ("ip link set eth0 down",), cuts=True),
    "MTU of the device": Illness("devices", ("ip link set flannel.1 mtu 1400",), daemon=False),
    "MTU of the TUN": Illness("devices", ("ip link set flannel0 mtu 1400",), backend="udp", daemon=False),
    "learning": Illness("devices", ("ip link set flannel.1 type vxlan id 1 learning",), daemon=False),
}


class Host:
    """A node that is well, and its peer."""

    def __init__(self, lab: Lab, backend: str, flags: tuple[str, ...], dual_stack: bool) -> None:
        self._lab = lab
        config = DUAL_STACK if dual_stack else {}
        self.node, self.peer = lab.cluster({"Type": backend}, flags=flags, **config)
        connect(self.node, self.peer)
        wait_for(lambda: flannelctl(self.node, "status").returncode == 0, PATIENCE, "a node that is well")

    def findings(self, *, daemon: bool) -> dict[str, dict[str, Any]]:
        """Return the doctor's findings by what the problem is."""
        store = "" if daemon else self._lab.etcd.endpoint
        return {each["problem"]: each for each in answer(self.node, "doctor", store=store)["findings"]}

    def is_cut(self) -> bool:
        targets = self.peer.container().addresses.values()
        return not all(self.node.container().reaches(target, 0.5) for target in targets)

    def run(self, *commands: str) -> None:
        self.node.run("sh", "-ec", "\n".join(commands))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Kept[Kind, Host]]:
    made: Kept[Kind, Host] = Kept(lambda kind, stack: Host(stack.enter_context(Lab()), *kind[:-1]))
    yield made
    made.close()


@pytest.mark.parametrize("illness", ILLNESSES.values(), ids=ILLNESSES.keys())
def test_a_fix_heals_the_host_that_it_was_printed_for(
    hosts: Kept[Kind, Host], illness: Illness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    with hosts.get(illness.kind) as host:
        if not illness.daemon and host.node.running:
            host.node.stop()
        before = host.findings(daemon=illness.daemon)
        host.run(*illness.harm)
        after = host.findings(daemon=illness.daemon)
        found = [after[new] for new in after.keys() - before.keys() if after[new]["check"] == illness.check]
        assert found
        assert {each["severity"] for each in found} == {"problem"}
        assert flannelctl(host.node, "doctor").returncode == 1
        assert host.is_cut() == illness.cuts
        host.run(*(shlex.join(command) for each in found for command in each["fix"]))
        wait_for(
            lambda: host.findings(daemon=illness.daemon).keys() == before.keys(),
            PATIENCE,
            "a doctor who is content",
        )
        assert (flannelctl(host.node, "doctor").returncode == 0) == illness.daemon
        wait_for(lambda: not host.is_cut(), PATIENCE, "packets to flow")


def test_each_check_with_a_fix_is_among_the_illnesses() -> None:
    findings = [found for cases in CASES.values() for facts in cases for found in examine(facts)]
    offered = {check.name for check, finding in findings if isinstance(finding.remedy, Fix)}
    fixed = {fault.check for fault in FAULTS.values() if fault.harm and not fault.heal}
    assert offered == {illness.check for illness in ILLNESSES.values()} | fixed


# ---- what is no reason to remove anything -------------------------------------------------------


def test_a_lan_inside_the_network_is_never_told_to_be_deleted(lab: Lab) -> None:
    node, peer = lab.cluster(BACKEND, **AROUND_THE_LAN)
    node.wait_for_route(peer.subnet(), PATIENCE)
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    told = answer(node, "doctor")["findings"]
    (found,) = [each for each in told if each["about"] == "eth0"]
    assert found["problem"] == f"eth0 has {node.address}, which is inside the cluster network"
    assert found["fix"] is None
    assert "delete" not in str(told)


def test_a_bridge_that_nothing_is_plugged_into_is_no_problem(lab: Lab) -> None:
    (node,) = lab.cluster(BACKEND, nodes=1)
    gateway = node.env()["FLANNEL_SUBNET"]
    node.namespace.ip("link add cni0 up type bridge", f"address add {gateway} dev cni0")
    node.namespace.ip("link add old0 up type bridge", "address add 10.5.251.1/24 dev old0")
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    assert [each for each in answer(node, "doctor")["findings"] if each["about"] in ("cni0", "old0")] == []
    assert flannelctl(node, "doctor").returncode == 0


def test_a_route_of_the_administrator_inside_the_network_is_not_called_left_over(lab: Lab) -> None:
    (node,) = lab.cluster(BACKEND, nodes=1)
    wait_for(lambda: flannelctl(node, "status").returncode == 0, PATIENCE, "a node that is well")
    node.namespace.ip("route add 10.5.9.0/24 via 198.18.0.77 dev eth0")
    assert flannelctl(node, "routes").returncode == 0
    assert "10.5.9.0/24" not in str(answer(node, "doctor"))


# ---- properties of a device ---------------------------------------------------------------------

#: A property of a device as it should be made, what it is made with instead, and how the doctor names both.
DRIFTS = {
    "vni": ("id 1", "id 2", "has vni 2, wanted 1"),
    "parent": ("dev eth0", "dev other0", "has parent other0, wanted eth0"),
    "local": ("local {local}", "local {other}", "has local {other}, wanted {local}"),
    "port": ("dstport 8472", "dstport 8473", "has port 8473, wanted 8472"),
    "learning": ("nolearning", "learning", "has learning on, wanted off"),
    "gbp": ("nolearning", "nolearning gbp", "has gbp on, wanted off"),
    "mtu": ("mtu {mtu}", "mtu 1400", "has mtu 1400, wanted {mtu}"),
    "up": ("up type", "type", "has up off, wanted on"),
}
DEVICE = " ".join(
    (
        "link add {name} address {mac} mtu {mtu} up type vxlan",
        "id 1 dev eth0 local {local} dstport 8472 nolearning",
    )
)


@pytest.fixture(scope="module")
def stopped() -> Iterator[tuple[Lab, Node]]:
    """A node with devices of both families, whose daemon is gone."""
    with Lab() as lab:
        node, peer = lab.cluster(BACKEND, **DUAL_STACK)
        node.wait_for_route(peer.subnet(), PATIENCE)
        node.stop()
        node.namespace.ip("link add other0 up type bridge")
        yield lab, node


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("what", DRIFTS)
def test_a_property_of_the_tunnel_that_differs_is_named(
    stopped: tuple[Lab, Node], what: str, family: int
) -> None:
    lab, node = stopped
    name = "flannel.1" if family == 4 else "flannel-v6.1"
    values = {
        "name": name,
        "mac": (node.link(name) or {})["address"],
        "mtu": 1450 if family == 4 else 1430,
        "local": node.address if family == 4 else node.ipv6_address,
        "other": "198.18.0.77" if family == 4 else "fd00:18::77",
    }
    right, wrong, told = DRIFTS[what]
    assert right in DEVICE
    node.namespace.ip(f"link del {name}", DEVICE.replace(right, wrong).format(**values))
    done = answer(node, "doctor", store=lab.etcd.endpoint)["findings"]
    found = [each["problem"] for each in done if each["check"] == "devices" and each["about"] == name]
    assert found == [f"{name} {told.format(**values)}"]
    routes = answer(node, "routes", store=lab.etcd.endpoint)["objects"]
    (entry,) = [each for each in routes if each["state"] == "different"]
    assert [each["property"] for each in entry["differences"]] == [what]
    node.namespace.ip(f"link del {name}", DEVICE.format(**values))
    assert "devices" not in [
        each["check"] for each in answer(node, "doctor", store=lab.etcd.endpoint)["findings"]
    ]
