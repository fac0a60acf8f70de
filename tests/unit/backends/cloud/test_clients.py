"""What the client of each cloud asks for, and how it reads the answers, without the cloud and its SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any, TypeVar

import pytest

from flanneld.backends.cloud.ali import Ali
from flanneld.backends.cloud.aws import Aws
from flanneld.backends.cloud.contract import (
    ApiCall,
    CloudError,
    CloudNode,
    CloudTableEntry,
    ErrorKind,
    Health,
)
from flanneld.backends.cloud.gce import Gce
from flanneld.backends.cloud.tencent import Tencent
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

HERE = IPv4Address("10.0.0.5")
NET = IPv4Network("10.5.1.0/24")
Answers = Sequence[tuple[str, Mapping[str, Any]]]


class Asked:
    """Stands for a cloud's API: gives answers in their order, and keeps the calls for them."""

    def __init__(self, answers: Answers, refusals: Mapping[str, ErrorKind]) -> None:
        self.answers = list(answers)
        self.refusals = refusals
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        self.calls.append((call.action, call.parameters))
        if call.action in self.refusals:
            raise CloudError(self.refusals[call.action], "refused")
        action, answer = self.answers.pop(0)
        assert action == call.action
        return answer


AnyCloud = TypeVar("AnyCloud", Aws, Gce, Ali, Tencent)


def client(
    kind: type[AnyCloud],
    *answers: tuple[str, Mapping[str, Any]],
    values: Mapping[str, str] | None = None,
    refusals: Mapping[str, ErrorKind] | None = None,
    **options: Any,
) -> tuple[AnyCloud, Asked]:
    """Return a client, and what its calls go to. ``values`` are those of the metadata service, by path."""

    def http(request: HttpRequest) -> HttpAnswer:
        path = request.url.split("/meta-data/")[-1].split("/computeMetadata/v1/")[-1]
        value = (values or {}).get(path)
        return HttpAnswer(404 if value is None else 200, {}, (value or "").encode())

    asked = Asked(answers, refusals or {})

    class Answered(kind):  # type: ignore[misc, valid-type]
        def ask(self, call: ApiCall) -> Mapping[str, Any]:
            return asked.ask(call)

    made: AnyCloud = Answered(Fields(options, "Backend"), HostServices(http=http))
    return made, asked


def entry(
    hop: str, health: Health = Health.ACTIVE, name: str = "", net: IPv4Network = NET
) -> CloudTableEntry:
    return CloudTableEntry("rtb-1", net, hop, health, name)


def told(calls: Sequence[ApiCall]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(each.action, each.parameters) for each in calls]


# ---- AWS -------------------------------------------------------------------------------------------

INTERFACES = [
    {"NetworkInterfaceId": "eni-1", "SubnetId": "subnet-1", "VpcId": "vpc-1",
     "PrivateIpAddresses": [{"PrivateIpAddress": "10.0.0.4"}]},
    {"NetworkInterfaceId": "eni-2", "SubnetId": "subnet-2", "VpcId": "vpc-1", "SourceDestCheck": True,
     "PrivateIpAddresses": [{"PrivateIpAddress": "10.0.0.6"}, {"PrivateIpAddress": str(HERE)}]},
]  # fmt: skip
INSTANCES = {"Reservations": [{"Instances": [{}]}, {"Instances": [{"NetworkInterfaces": INTERFACES}]}]}
AWS_VALUES = {"instance-id": "i-1"}


def aws_tables(*names: str) -> tuple[str, Mapping[str, Any]]:
    return "DescribeRouteTables", {"RouteTables": [{"RouteTableId": name} for name in names]}


@pytest.mark.parametrize(
    ("answers", "table"),
    [([aws_tables("rtb-1", "rtb-2")], "rtb-1"), ([aws_tables(), aws_tables("rtb-3")], "rtb-3")],
    ids=["the subnet's", "the main one"],
)
def test_aws_finds_the_table_of_the_interface_that_has_our_address(answers: Answers, table: str) -> None:
    aws, asked = client(Aws, ("DescribeInstances", INSTANCES), *answers, values=AWS_VALUES)
    assert aws.place(HERE) == CloudNode((table,), "eni-2", "i-1", "vpc-1", forwards=False)
    filters = [{each["Name"]: each["Values"] for each in which["Filters"]} for _, which in asked.calls[1:]]
    assert (
        filters
        == [
            {"association.subnet-id": ["subnet-2"]},
            {"association.main": ["true"], "vpc-id": ["vpc-1"]},
        ][: len(answers)]
    )


def test_aws_takes_the_tables_of_the_config() -> None:
    aws, asked = client(Aws, ("DescribeInstances", INSTANCES), values=AWS_VALUES, RouteTableID=["a", "b"])
    assert aws.place(IPv4Address("10.0.0.4")) == CloudNode(("a", "b"), "eni-1", "i-1", "vpc-1")
    assert asked.calls == [("DescribeInstances", {"InstanceIds": ["i-1"]})]


@pytest.mark.parametrize(
    ("address", "kind", "problem"),
    [
        ("10.0.0.9", ErrorKind.OTHER, "i-1 has no network interface with 10.0.0.9"),
        (str(HERE), ErrorKind.NO_TABLE, "main route table not found"),
    ],
)
def test_aws_names_what_it_does_not_find(address: str, kind: ErrorKind, problem: str) -> None:
    answers = (("DescribeInstances", INSTANCES), aws_tables(), aws_tables())
    aws, _ = client(Aws, *answers, values=AWS_VALUES)
    with pytest.raises(CloudError, match=problem) as failed:
        aws.place(IPv4Address(address))
    assert failed.value.trouble is kind
    assert failed.value.remedy


AWS_ROUTES = [
    ({"NetworkInterfaceId": "eni-1", "InstanceId": "i-1", "InstanceOwnerId": "7"}, "eni-1"),
    ({"InstanceOwnerId": "7", "GatewayId": "igw-1"}, "igw-1"),
    ({}, "an unknown hop"),
]


def test_aws_routes_are_read_with_their_hops() -> None:
    routes = [{"DestinationCidrBlock": str(NET), **route} for route, _ in AWS_ROUTES]
    dead = {"DestinationCidrBlock": str(NET), "NetworkInterfaceId": "eni-9", "State": "blackhole"}
    six = {"DestinationIpv6CidrBlock": "fd00::/64", "GatewayId": "igw-1"}
    table = {"RouteTableId": "rtb-1", "VpcId": "vpc-1", "Routes": [*routes, six, dead]}
    aws, asked = client(Aws, ("DescribeRouteTables", {"RouteTables": [table]}))
    node = CloudNode(("rtb-1",), "eni-1", "i-1", "vpc-1")
    expected = [*(entry(hop) for _, hop in AWS_ROUTES), entry("eni-9", Health.DEAD)]
    assert aws.entries(node) == expected
    assert asked.calls == [("DescribeRouteTables", {"RouteTableIds": ["rtb-1"]})]
    assert aws.gone(node, [*expected, entry("i-9", Health.DEAD), entry("nat-1", Health.DEAD)]) == [
        entry("eni-9", Health.DEAD),
        entry("i-9", Health.DEAD),
    ]


@pytest.mark.parametrize("kind", [Aws, Tencent])
def test_table_of_another_network_is_refused(kind: type[Any]) -> None:
    table = {"RouteTableId": "rtb-1", "VpcId": "vpc-2", "Routes": [], "RouteSet": []}
    answer = {"RouteTables": [table], "RouteTableSet": [table]}
    made, _ = client(kind, ("DescribeRouteTables", answer))
    with pytest.raises(CloudError, match="rtb-1 is a table of vpc-2, this node is in vpc-1") as failed:
        made.entries(CloudNode(("rtb-1",), "hop", "i-1", "vpc-1"))
    assert failed.value.remedy == "correct Backend.RouteTableID"


def test_aws_replaces_a_route_and_switches_the_check_off() -> None:
    aws, _ = client(Aws)
    node = CloudNode(("rtb-1",), "eni-1", "i-1")
    where = {"RouteTableId": "rtb-1", "DestinationCidrBlock": str(NET)}
    route = {**where, "NetworkInterfaceId": "eni-1"}
    assert told(aws.put_calls(node, entry("eni-1"), None)) == [("CreateRoute", route)]
    assert told(aws.put_calls(node, entry("eni-1"), entry("eni-2"))) == [("ReplaceRoute", route)]
    assert told(aws.drop_calls(entry("eni-1"))) == [("DeleteRoute", where)]
    off = {"NetworkInterfaceId": "eni-1", "SourceDestCheck": {"Value": False}}
    assert told(aws.forwarding_calls(node)) == [("ModifyNetworkInterfaceAttribute", off)]
    assert "--network-interface-id eni-1" in aws.forwarding_remedy(node)


# ---- Google Cloud ------------------------------------------------------------------------------------

GCE_NET = "https://compute/projects/p/global/networks/lan"
GCE_VALUES = {
    "project/project-id": "p", "instance/zone": "projects/7/zones/z-1", "instance/hostname": "n1.c.p.internal"
}  # fmt: skip
GCE_SELF = "https://compute/projects/p/zones/z-1/instances/n1"


@pytest.mark.parametrize(("facts", "forwards"), [({}, False), ({"canIpForward": True}, True)])
def test_gce_finds_the_network_of_the_interface_that_has_our_address(
    facts: Mapping[str, Any], forwards: bool
) -> None:
    interfaces = [
        {"networkIP": "10.9.0.5", "network": "other"}, {"networkIP": str(HERE), "network": GCE_NET}
    ]  # fmt: skip
    found = {"selfLink": GCE_SELF, "networkInterfaces": interfaces, **facts}
    answers = [("compute.instances.get", found)] * 2
    gce, asked = client(Gce, *answers, values=GCE_VALUES)
    assert gce.place(HERE) == CloudNode(("lan",), GCE_SELF, "n1", GCE_NET, forwards)
    assert asked.calls == [("compute.instances.get", {"zone": "z-1", "instance": "n1"})]
    with pytest.raises(CloudError, match=r"n1 has no network interface with 10\.0\.0\.9; choose .* -iface"):
        gce.place(IPv4Address("10.0.0.9"))


def test_gce_routes_are_read_from_all_pages() -> None:
    def route(name: str, **facts: Any) -> dict[str, Any]:
        return {"name": name, "network": GCE_NET, "destRange": str(NET), **facts}

    gone = {"code": "NEXT_HOP_INSTANCE_NOT_FOUND"}
    pages: list[dict[str, Any]] = [
        {"items": [route("a", nextHopInstance=GCE_SELF, nextHopIp="10.0.0.5"), route("b", network="other")],
         "nextPageToken": "more"},
        {"items": [route("c", nextHopGateway="gw", warnings=[{"code": "OTHER"}])],
         "nextPageToken": "even more"},
        {"items": [route("d", destRange="fd00::/64"),
                   route("e", nextHopIp="10.0.0.7", warnings=[{}, gone]), route("f", nextHopPriority=7)]},
    ]  # fmt: skip
    gce, asked = client(Gce, *(("compute.routes.list", page) for page in pages))
    assert gce.entries(CloudNode(("lan",), GCE_SELF, "n1", GCE_NET)) == [
        CloudTableEntry("lan", NET, GCE_SELF, name="a"),
        CloudTableEntry("lan", NET, "gw", name="c"),
        CloudTableEntry("lan", NET, "10.0.0.7", Health.DEAD, "e"),
        CloudTableEntry("lan", NET, "an unknown hop", name="f"),
    ]
    assert [which.get("pageToken") for _, which in asked.calls] == [None, "more", "even more"]
    assert {which["filter"] for _, which in asked.calls} == {f'network="{GCE_NET}"'}


GCE_OTHER = "https://compute/projects/p/zones/z-2/instances/n2"


@pytest.mark.parametrize(
    ("hop", "health", "refusal", "is_gone"),
    [
        (GCE_OTHER, Health.DEAD, ErrorKind.ABSENT, True),
        (GCE_OTHER, Health.DEAD, None, False),
        (GCE_OTHER, Health.ACTIVE, ErrorKind.ABSENT, False),
        ("https://compute/projects/p/global/gateways/n2", Health.DEAD, ErrorKind.ABSENT, False),
    ],
    ids=["an instance that is deleted", "one that is off", "one that works", "no instance"],
)
def test_gce_asks_for_the_instances_that_routes_no_longer_reach(
    hop: str, health: Health, refusal: ErrorKind | None, is_gone: bool
) -> None:
    refusals = {"compute.instances.get": refusal} if refusal else {}
    gce, asked = client(Gce, ("compute.instances.get", {}), refusals=refusals)
    assert gce.gone(CloudNode(("lan",), GCE_SELF, "n1"), [entry(hop, health)]) == (
        [entry(hop, health)] if is_gone else []
    )
    assert asked.calls in ([], [("compute.instances.get", {"zone": "z-2", "instance": "n2"})])


def test_gce_does_not_take_an_instance_for_gone_that_it_may_not_see() -> None:
    gce, _ = client(Gce, refusals={"compute.instances.get": ErrorKind.DENIED})
    with pytest.raises(CloudError, match="refused"):
        gce.gone(CloudNode(("lan",), GCE_SELF, "n1"), [entry(GCE_OTHER, Health.DEAD)])


def test_gce_removes_the_route_that_it_replaces() -> None:
    gce, _ = client(Gce)
    node = CloudNode(("lan",), GCE_SELF, "n1", GCE_NET)
    new = {
        "name": "flannel-10-5-1-0-24",
        "destRange": str(NET),
        "network": GCE_NET,
        "nextHopInstance": GCE_SELF,
        "priority": 1000,
    }
    insert = ("compute.routes.insert", new)
    assert told(gce.put_calls(node, entry(GCE_SELF), None)) == [insert]
    assert told(gce.put_calls(node, entry(GCE_SELF), entry(GCE_OTHER, name="old"))) == [
        ("compute.routes.delete", {"route": "old"}),
        insert,
    ]
    assert told(gce.drop_calls(entry(GCE_SELF))) == [
        ("compute.routes.delete", {"route": "flannel-10-5-1-0-24"})
    ]
    assert gce.forwarding_calls(node) == []
    assert gce.forwarding_remedy(node).startswith("recreate n1 with: ")


# ---- Alibaba Cloud -----------------------------------------------------------------------------------

ALI_VALUES = {"region-id": "r-1", "instance-id": "i-1", "vpc-id": "vpc-1", "vswitch-id": "vsw-1"}


def test_ali_finds_the_table_of_its_switch_or_takes_those_of_the_config() -> None:
    answer = ("DescribeVSwitchAttributes", {"RouteTable": {"RouteTableId": "vtb-1"}})
    ali, asked = client(Ali, answer, values=ALI_VALUES)
    assert ali.place(HERE) == CloudNode(("vtb-1",), "i-1", "i-1", "vpc-1")
    assert asked.calls == [("DescribeVSwitchAttributes", {"VSwitchId": "vsw-1"})]
    ali, asked = client(Ali, values=ALI_VALUES, RouteTableID=["a", "b"])
    assert ali.place(HERE) == CloudNode(("a", "b"), "i-1", "i-1", "vpc-1")
    assert asked.calls == []


def test_ali_routes_are_read_from_all_tables_and_pages() -> None:
    def page(*routes: Mapping[str, Any], token: str = "") -> tuple[str, Mapping[str, Any]]:
        whole = [{"DestinationCidrBlock": str(NET), "Status": "Available", **route} for route in routes]
        return "DescribeRouteEntryList", {"RouteEntrys": {"RouteEntry": whole}, "NextToken": token}

    def hop(name: str) -> dict[str, Any]:
        return {"NextHops": {"NextHop": [{"NextHopId": name}]}}

    ali, asked = client(
        Ali,
        page({**hop("i-1"), "RouteEntryId": "rte-1"}, {"DestinationCidrBlock": "fd00::/64"}, token="t"),
        page({**hop("i-2"), "Status": "Pending"}),
        page({"Type": "System"}, {"NextHops": {"NextHop": []}}),
    )
    assert ali.entries(CloudNode(("rtb-1", "rtb-2"), "i-1", "i-1")) == [
        entry("i-1", name="rte-1"),
        entry("i-2", Health.PENDING),
        CloudTableEntry("rtb-2", NET, "System"),
        CloudTableEntry("rtb-2", NET, "an unknown hop"),
    ]
    assert [(which["RouteTableId"], which.get("NextToken")) for _, which in asked.calls] == [
        ("rtb-1", None), ("rtb-1", "t"), ("rtb-2", None)
    ]  # fmt: skip


def test_ali_asks_for_a_hundred_instances_at_a_time() -> None:
    hops = [f"i-{number:03}" for number in range(150)]
    there = [{"Instances": {"Instance": [{"InstanceId": hop} for hop in some]}} for some in (hops[:99], [])]
    ali, asked = client(Ali, *(("DescribeInstances", each) for each in there))
    gone = ali.gone(CloudNode(("rtb-1",), "i-1", "i-1"), [*map(entry, hops), entry("ngw-1")])
    assert [each.hop for each in gone] == hops[99:]
    assert [len(which["InstanceIds"].split(",")) for _, which in asked.calls] == [100, 50]


def test_ali_changes_the_hop_of_a_route_in_its_place() -> None:
    ali, _ = client(Ali)
    node = CloudNode(("rtb-1",), "i-1", "i-1")
    where = {"RouteTableId": "rtb-1", "DestinationCidrBlock": str(NET)}
    assert told(ali.put_calls(node, entry("i-1"), None)) == [
        ("CreateRouteEntry", {**where, "NextHopType": "Instance", "NextHopId": "i-1"})
    ]
    assert told(ali.put_calls(node, entry("i-1"), entry("i-2"))) == [
        ("ModifyRouteEntry", {**where, "NewNextHopType": "Instance", "NewNextHopId": "i-1"})
    ]
    assert told(ali.drop_calls(entry("i-1"))) == [("DeleteRouteEntry", {**where, "NextHopId": "i-1"})]


# ---- Tencent Cloud -----------------------------------------------------------------------------------

MAC = "network/interfaces/macs/20:90:6f:00:00:01"
TENCENT_VALUES = {
    "placement/region": "r-1", "instance-id": "ins-1", "mac": "20:90:6f:00:00:01",
    f"{MAC}/vpc-id": "vpc-1", f"{MAC}/subnet-id": "subnet-1",
}  # fmt: skip


def tencent_table(name: str, *subnets: str, **facts: Any) -> dict[str, Any]:
    return {"RouteTableId": name, "AssociationSet": [{"SubnetId": each} for each in subnets], **facts}


@pytest.mark.parametrize(
    ("tables", "table"),
    [
        ([tencent_table("m", Main=True), tencent_table("s", "subnet-0", "subnet-1")], "s"),
        ([tencent_table("o", "subnet-0"), tencent_table("m", Main=True)], "m"),
        ([{"RouteTableId": "m", "Main": True}], "m"),
    ],
    ids=["the subnet's", "the main one", "one without subnets"],
)
def test_tencent_finds_the_table_of_its_subnet(tables: list[dict[str, Any]], table: str) -> None:
    answer = ("DescribeRouteTables", {"RouteTableSet": tables})
    tencent, asked = client(Tencent, answer, values=TENCENT_VALUES)
    assert tencent.place(HERE) == CloudNode((table,), str(HERE), "ins-1", "vpc-1")
    assert asked.calls[0][1]["Filters"] == [{"Name": "vpc-id", "Values": ["vpc-1"]}]


def test_tencent_takes_the_tables_of_the_config_and_names_what_it_does_not_find() -> None:
    tencent, asked = client(Tencent, values=TENCENT_VALUES, RouteTableID="rtb-1")
    assert tencent.place(HERE) == CloudNode(("rtb-1",), str(HERE), "ins-1", "vpc-1")
    assert asked.calls == []
    none = ("DescribeRouteTables", {"RouteTableSet": [tencent_table("o", "subnet-0")]})
    tencent, _ = client(Tencent, none, values=TENCENT_VALUES)
    with pytest.raises(CloudError, match=r"vpc-1 has no route table; set Backend\.RouteTableID") as failed:
        tencent.place(HERE)
    assert failed.value.trouble is ErrorKind.NO_TABLE


def test_tencent_routes_are_read_from_all_pages() -> None:
    def route(number: int, **facts: Any) -> dict[str, Any]:
        facts = {"DestinationCidrBlock": str(NET), "GatewayType": "NORMAL_CVM", "Enabled": True, **facts}
        return {"RouteId": number, **facts}

    many = [{"RouteTableId": f"rtb-{number}", "VpcId": "vpc-1"} for number in range(99)]
    routes = [
        route(1, GatewayId="10.0.0.5"),
        route(2, GatewayId="10.0.0.6", Enabled=False, RouteType="USER"),
        route(3, GatewayId="10.0.0.7", RouteType="CCN"),
        route(4, GatewayId="vpn-1", GatewayType="VPN"),
        route(5),
        route(6, DestinationCidrBlock=""),
    ]
    whole = {"RouteTableId": "rtb-1", "VpcId": "vpc-1", "RouteSet": routes}
    answers: list[dict[str, Any]] = [{"RouteTableSet": [*many, whole]}, {"RouteTableSet": many[:1]}]
    tencent, asked = client(Tencent, *(("DescribeRouteTables", each) for each in answers))
    assert tencent.entries(CloudNode(("rtb-1",), "10.0.0.5", "ins-1", "vpc-1")) == [
        entry("10.0.0.5", name="1"),
        entry("10.0.0.6", Health.DEAD, "2"),
        entry("NORMAL_CVM 10.0.0.7", name="3"),
        entry("VPN vpn-1", name="4"),
        entry("an unknown hop", name="5"),
    ]
    assert [(which["Offset"], which["Limit"]) for _, which in asked.calls] == [("0", "100"), ("100", "100")]


def test_tencent_asks_for_addresses_of_instances_only() -> None:
    answer = {"VpcPrivateIpAddressSet": [{"PrivateIpAddress": "10.0.0.6"}]}
    tencent, asked = client(Tencent, ("DescribeVpcPrivateIpAddresses", answer))
    entries = [entry(hop) for hop in ("10.0.0.7", "10.0.0.6", "VPN vpn-1")]
    assert tencent.gone(CloudNode(("rtb-1",), "10.0.0.5", "ins-1", "vpc-1"), entries) == entries[:1]
    assert asked.calls[0][1] == {"VpcId": "vpc-1", "PrivateIpAddresses": ["10.0.0.6", "10.0.0.7"]}


def test_tencent_enables_its_own_route_and_replaces_another_ones() -> None:
    tencent, _ = client(Tencent)
    node = CloudNode(("rtb-1",), "10.0.0.5", "ins-1")
    where = {"DestinationCidrBlock": str(NET), "GatewayType": "NORMAL_CVM", "GatewayId": "10.0.0.5"}
    new = {**where, "Enabled": True}

    def put(was: CloudTableEntry | None) -> list[tuple[str, Mapping[str, Any]]]:
        return told(tencent.put_calls(node, entry("10.0.0.5"), was))

    assert put(None) == [("CreateRoutes", {"RouteTableId": "rtb-1", "Routes": [new]})]
    assert put(entry("10.0.0.6", name="7")) == [
        ("ReplaceRoutes", {"RouteTableId": "rtb-1", "Routes": [{**new, "RouteId": 7}]})
    ]
    assert put(entry("10.0.0.5", name="7")) == [("EnableRoutes", {"RouteTableId": "rtb-1", "RouteIds": [7]})]
    assert told(tencent.drop_calls(entry("10.0.0.5", name="7"))) == [
        ("DeleteRoutes", {"RouteTableId": "rtb-1", "Routes": [{"RouteId": 7}]})
    ]
