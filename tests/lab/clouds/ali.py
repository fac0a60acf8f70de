"""Alibaba Cloud in the lab: the VPC and ECS APIs, and the metadata service.

Signatures are checked by the published algorithm of RPC style calls, version 1.0: HMAC-SHA1 over the sorted
query. Fields are those of the models in alibabacloud-vpc20160428 and alibabacloud-ecs20140526.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from flanneld.backends.cloud.contract import ErrorKind
from tests.lab.clouds.service import Answer, Asked, Request, said
from tests.lab.clouds.vpc import Route, VpcService

TABLE = "vtb-lab"
_PAGE = 3
_SIGNING = ("Signature", "SignatureNonce", "Timestamp")


@dataclass
class AliService(VpcService):
    """``never_ends``: new entries stay Pending."""

    kind: ClassVar[str] = "ali-vpc"
    actions: ClassVar[Mapping[str, str]] = {
        "place": "DescribeVSwitchAttributes",
        "list": "DescribeRouteEntryList",
        "create": "CreateRouteEntry",
        "replace": "ModifyRouteEntry",
        "delete": "DeleteRouteEntry",
    }
    codes: ClassVar[Mapping[ErrorKind, tuple[int, str]]] = {
        ErrorKind.THROTTLED: (400, "Throttling.User"),
        ErrorKind.DENIED: (403, "Forbidden.RAM"),
        ErrorKind.CREDENTIALS: (400, "InvalidSecurityToken.Expired"),
        ErrorKind.FULL: (400, "QuotaExceeded.RouteEntry"),
        ErrorKind.EXISTS: (400, "RouterEntryConflict.Duplicated"),
        ErrorKind.ABSENT: (404, "InvalidRouteEntry.NotFound"),
        ErrorKind.BUSY: (400, "IncorrectRouteEntryStatus"),
        ErrorKind.NO_TABLE: (404, "InvalidRouteTableId.NotFound"),
        ErrorKind.OTHER: (500, "InternalError"),
    }
    never_ends: bool = False

    def hop_of(self, name: str, address: str) -> str:
        del address
        return name

    def understand(self, request: Request) -> Asked:
        query = request.query
        return Asked(query.get("Action", ""), {each: query[each] for each in query if each not in _SIGNING})

    def is_signed(self, request: Request) -> bool:
        query = request.query
        given = query.pop("Signature", "")
        name, secret = self.key
        if query.get("AccessKeyId") != name:
            return False
        text = "&".join(f"{_escaped(each)}={_escaped(query[each])}" for each in sorted(query))
        signed = f"{request.method}&{_escaped('/')}&{_escaped(text)}"
        digest = hmac.new(f"{secret}&".encode(), signed.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(base64.b64encode(digest).decode(), given)

    def answer(self, asked: Asked, request: Request) -> Answer:
        del request
        parameters = asked.parameters
        if asked.action != "DescribeInstances" and parameters.get("RouteTableId", TABLE) != TABLE:
            return self.refusal(*self.codes[ErrorKind.NO_TABLE])
        match asked.action:
            case "DescribeVSwitchAttributes":
                table = {"RouteTableId": TABLE, "RouteTableType": "System"}
                return said({"RequestId": "1", "VSwitchId": parameters["VSwitchId"], "RouteTable": table})
            case "DescribeInstances":
                return self._described(json.loads(parameters["InstanceIds"]))
            case "DescribeRouteEntryList":
                return self._list(parameters)
            case "CreateRouteEntry" | "ModifyRouteEntry" | "DeleteRouteEntry":
                return self._change(asked.action, parameters)
        return self.refusal(400, "InvalidAction.NotFound")

    def _described(self, wanted: list[str]) -> Answer:
        found = [{"InstanceId": each.name} for each in self.instances.values() if each.name in wanted]
        return said({"RequestId": "1", "Instances": {"Instance": found}, "TotalCount": len(found)})

    def _list(self, parameters: Mapping[str, str]) -> Answer:
        entries = [_entry("198.18.0.0/24", Route("", "rte-0"), "System")]
        entries += [_entry(destination, route, "Custom") for destination, route in self.table.items()]
        start = int(parameters.get("NextToken", "0"))
        page: dict[str, Any] = {
            "RequestId": "1",
            "RouteEntrys": {"RouteEntry": entries[start : start + _PAGE]},
        }
        if start + _PAGE < len(entries):
            page["NextToken"] = str(start + _PAGE)
        return said(page)

    def _change(self, action: str, parameters: Mapping[str, str]) -> Answer:
        destination = parameters["DestinationCidrBlock"]
        there = self.table.get(destination)
        if action == "CreateRouteEntry":
            if there:
                return self.refusal(*self.codes[ErrorKind.EXISTS])
            if len(self.table) >= self.limit:
                return self.refusal(*self.codes[ErrorKind.FULL])
            self.set_route(destination, parameters["NextHopId"], "Pending" if self.never_ends else None)
        elif there is None:
            return self.refusal(*self.codes[ErrorKind.ABSENT])
        elif action == "ModifyRouteEntry":
            there.hop = parameters["NewNextHopId"]
        elif there.hop == parameters["NextHopId"]:
            del self.table[destination]
        return said({"RequestId": "1"})

    def refusal(self, status: int, code: str) -> Answer:
        return said({"RequestId": "1", "HostId": "lab", "Code": code, "Message": f"the lab: {code}"}, status)

    def metadata(self, address: str, request: Request) -> Answer:
        instance = self.of(address)
        path = request.path.removeprefix("/latest/meta-data/").rstrip("/")
        values = {
            "region-id": "cn-lab",
            "instance-id": instance.name,
            "vpc-id": "vpc-lab",
            "vswitch-id": "vsw-lab",
            "ram/security-credentials": "flanneld",
            "ram/security-credentials/flanneld": json.dumps(
                {
                    "Code": "Success",
                    "AccessKeyId": self.key[0],
                    "AccessKeySecret": self.key[1],
                    "SecurityToken": "lab-token",
                }
            ),
        }
        if path not in values:
            return Answer(404, b"", "text/plain")
        return Answer(200, values[path].encode(), "text/plain")


def _entry(destination: str, route: Route, kind: str) -> dict[str, Any]:
    hop = {"NextHopId": route.hop, "NextHopType": "Instance", "Enabled": 1, "Weight": 0}
    return {
        "RouteTableId": TABLE,
        "RouteEntryId": route.name,
        "DestinationCidrBlock": destination,
        "Type": kind,
        "Status": route.state or "Available",
        "IpVersion": "ipv4",
        "NextHops": {"NextHop": [hop]} if route.hop else {},
    }


def _escaped(text: str) -> str:
    return quote(text, safe="-_.~")
