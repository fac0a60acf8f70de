"""What lies in etcd, to the byte: what we write, and what other versions of flannel have written.

The recorded values are those of Go flanneld 0.12, 0.20 and 0.28.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.lab import Lab, Node
from tests.lab.etcd import TTL
from tests.netns.apis import both_apis

# ---- what we write -----------------------------------------------------------------------------


def written(lab: Lab, node: Node) -> tuple[str, str, int]:
    """Key, value and TTL of the only lease."""
    (found,) = lab.etcd.children("subnets")
    assert found["key"] == f"/coreos.com/network/subnets/{node.subnet().replace('/', '-')}"
    return found["key"], found["value"], (lab.etcd.lease(node.subnet()) or {})["ttl"]


def as_in(lab: Lab, value: str) -> str:
    """Versions of flannel that use v3 name PublicIPv6 always."""
    return value if lab.etcd.api == "v2" else value.replace(',"B', ',"PublicIPv6":null,"B', 1)


@both_apis
def test_a_vxlan_lease_is_written_as_others_read_it(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan", "VNI": 7}, nodes=1)
    mac = (node.link("flannel.7") or {})["address"]
    _, value, ttl = written(lab, node)
    assert value == as_in(
        lab,
        '{"PublicIP":"198.18.0.1","BackendType":"vxlan","BackendData":{"VNI":7,"VtepMAC":"' + mac + '"}}',
    )
    assert TTL - 10 < ttl <= TTL


@both_apis
def test_a_host_gw_lease_is_written_as_others_read_it(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    _, value, ttl = written(lab, node)
    assert value == as_in(lab, '{"PublicIP":"198.18.0.1","BackendType":"host-gw"}')
    assert TTL - 10 < ttl <= TTL


def test_the_value_stays_the_same_over_a_restart(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    before = written(lab, node)[:2]
    node.stop()
    node.start()
    node.wait_ready()
    assert written(lab, node)[:2] == before


def test_an_announced_address_of_ones_own_is_written(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    node.start("-iface=eth0", "-public-ip=203.0.113.7")
    node.wait_ready()
    assert written(lab, node)[1].startswith('{"PublicIP":"203.0.113.7","BackendType":"vxlan",')


# ---- what others wrote -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """A lease for 10.5.7.0/24 at 198.18.0.9, as one version wrote it."""

    writer: str
    value: str


HOST_GW = [
    Recorded("0.12", '{"PublicIP":"198.18.0.9","BackendType":"host-gw"}'),
    Recorded("0.20", '{"PublicIP":"198.18.0.9","PublicIPv6":null,"BackendType":"host-gw"}'),
    Recorded("0.20-dual", '{"PublicIP":"198.18.0.9","PublicIPv6":"fd00:18::9","BackendType":"host-gw"}'),
]
MAC = "9e:1c:4f:00:d2:09"
VXLAN = [
    Recorded(
        "0.12", '{"PublicIP":"198.18.0.9","BackendType":"vxlan","BackendData":{"VtepMAC":"' + MAC + '"}}'
    ),
    Recorded(
        "0.20-and-0.28",
        '{"PublicIP":"198.18.0.9","PublicIPv6":null,"BackendType":"vxlan",'
        '"BackendData":{"VNI":1,"VtepMAC":"' + MAC + '"}}',
    ),
    Recorded(
        "0.28-dual",
        '{"PublicIP":"198.18.0.9","PublicIPv6":"fd00:18::9","BackendType":"vxlan",'
        '"BackendData":{"VNI":1,"VtepMAC":"' + MAC + '"},'
        '"BackendV6Data":{"VNI":1,"VtepMAC":"9e:1c:4f:00:d2:0a"}}',
    ),
]


def relevant(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: row[name] for name in names if name in row} for row in rows]


def put(lab: Lab, recorded: Recorded) -> None:
    lab.etcd.set("subnets/10.5.7.0-24", recorded.value, TTL)


@pytest.mark.parametrize("recorded", HOST_GW, ids=lambda recorded: recorded.writer)
def test_a_host_gw_lease_of_others_leads_there(lab: Lab, recorded: Recorded) -> None:
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    put(lab, recorded)
    route = node.wait_for_route("10.5.7.0/24")
    assert (route["gateway"], route["dev"], route["flags"]) == ("198.18.0.9", "eth0", [])


@pytest.mark.parametrize("recorded", VXLAN, ids=lambda recorded: recorded.writer)
def test_a_vxlan_lease_of_others_leads_there(lab: Lab, recorded: Recorded) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, SubnetMin="10.5.100.0")
    put(lab, recorded)
    route = node.wait_for_route("10.5.7.0/24")
    assert (route["gateway"], route["dev"], route["flags"]) == ("10.5.7.0", "flannel.1", ["onlink"])
    assert relevant(node.neighbors("flannel.1"), "dst", "lladdr") == [{"dst": "10.5.7.0", "lladdr": MAC}]
    assert relevant(node.fdb("flannel.1"), "mac", "dst") == [{"mac": MAC, "dst": "198.18.0.9"}]


@both_apis
@pytest.mark.parametrize("recorded", VXLAN, ids=lambda recorded: recorded.writer)
def test_a_node_takes_over_its_own_lease_from_another_version(lab: Lab, recorded: Recorded) -> None:
    """An upgrade on a machine that was booted afresh: subnet, MAC and reservation are still there."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    lab.etcd.set("subnets/10.5.7.0-24", recorded.value.replace("198.18.0.9", "198.18.0.1"))
    (node,) = lab.add_nodes()
    node.start()
    node.wait_ready()
    assert node.subnet() == "10.5.7.0/24"
    assert (node.link("flannel.1") or {})["address"] == MAC
    assert "ttl" not in (lab.etcd.lease("10.5.7.0/24") or {})
