"""Tencent Cloud in the lab: the VPC API, and the metadata service.

Signatures are checked by the published algorithm TC3-HMAC-SHA256, with the SDK's own derivation of the key.
Fields are those of the models in tencentcloud-sdk-python-vpc.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tencentcloud.common.sign import Sign

from flanneld.backends.cloud.contract import ErrorKind
from tests.lab.clouds.service import Answer, Asked, Request, said
from tests.lab.clouds.vpc import Route, VpcService

TABLE = "rtb-lab"
_AUTHORIZATION = re.compile(
    r"TC3-HMAC-SHA256 Credential=(?P<id>[^/]+)/(?P<date>[^/]+)/vpc/tc3_request, "
    r"SignedHeaders=content-type;host, Signature=(?P<signature>[0-9a-f]+)"
)


@dataclass
class TencentService(VpcService):
    """A next hop is an instance's address."""

    kind: ClassVar[str] = "tencent-vpc"
    actions: ClassVar[Mapping[str, str]] = {
        "place": "DescribeRouteTables",
        "list": "DescribeRouteTables",
        "create": "CreateRoutes",
        "replace": "ReplaceRoutes",
        "delete": "DeleteRoutes",
    }
    codes: ClassVar[Mapping[ErrorKind, tuple[int, str]]] = {
        ErrorKind.THROTTLED: (200, "RequestLimitExceeded"),
        ErrorKind.DENIED: (200, "UnauthorizedOperation"),
        ErrorKind.CREDENTIALS: (200, "AuthFailure.SignatureFailure"),
        ErrorKind.FULL: (200, "LimitExceeded"),
        ErrorKind.EXISTS: (200, "InvalidParameterValue.Duplicate"),
        ErrorKind.ABSENT: (200, "InvalidRouteId.NotFound"),
        ErrorKind.BUSY: (200, "UnsupportedOperation"),
        ErrorKind.NO_TABLE: (200, "ResourceNotFound"),
        ErrorKind.OTHER: (200, "InternalError"),
    }

    def hop_of(self, name: str, address: str) -> str:
        del name
        return address

    def understand(self, request: Request) -> Asked:
        return Asked(request.headers.get("x-tc-action", ""), json.loads(request.body or b"{}"))

    def is_signed(self, request: Request) -> bool:
        headers = request.headers
        match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if match is None or match["id"] != self.key[0]:
            return False
        shown = f"content-type:{headers['content-type']}\nhost:{headers['host']}\n"
        payload = hashlib.sha256(request.body).hexdigest()
        canonical = f"{request.method}\n/\n\n{shown}\ncontent-type;host\n{payload}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        scope = f"{match['date']}/vpc/tc3_request"
        text = f"TC3-HMAC-SHA256\n{headers['x-tc-timestamp']}\n{scope}\n{digest}"
        wanted = str(Sign.sign_tc3(self.key[1], match["date"], "vpc", text))
        return hmac.compare_digest(wanted, match["signature"])

    def answer(self, asked: Asked, request: Request) -> Answer:
        del request
        parameters = asked.parameters
        named = parameters.get("RouteTableIds") or [parameters.get("RouteTableId", TABLE)]
        if any(each != TABLE for each in named):
            return self.refusal(*self.codes[ErrorKind.NO_TABLE])
        match asked.action:
            case "DescribeRouteTables":
                only_ours = "RouteTableIds" in parameters
                return self._tables(int(parameters["Offset"]), int(parameters["Limit"]), others=not only_ours)
            case "DescribeVpcPrivateIpAddresses":
                found = [{"PrivateIpAddress": each} for each in parameters["PrivateIpAddresses"]]
                return _response(
                    VpcPrivateIpAddressSet=[
                        each for each in found if each["PrivateIpAddress"] in self.instances
                    ]
                )
            case "CreateRoutes":
                return self._created(parameters["Routes"][0])
            case "ReplaceRoutes" | "DeleteRoutes":
                return self._changed(asked.action, parameters["Routes"][0])
            case "EnableRoutes":
                for route in self.table.values():
                    if int(route.name) in parameters["RouteIds"]:
                        route.state = True
                return _response()
        return self.refusal(200, "InvalidAction")

    def _tables(self, offset: int, limit: int, *, others: bool) -> Answer:
        """Return a page; there are so many tables of other subnets that ours is on the second."""
        first = [
            {
                "VpcId": "vpc-lab",
                "RouteTableId": f"rtb-{i}",
                "Main": i == 0,
                "AssociationSet": [],
                "RouteSet": [],
            }
            for i in range(100 if others else 0)
        ]
        routes = [_route(destination, route) for destination, route in self.table.items()]
        ours = {
            "VpcId": "vpc-lab",
            "RouteTableId": TABLE,
            "Main": False,
            "AssociationSet": [{"SubnetId": "subnet-lab", "RouteTableId": TABLE}],
            "RouteSet": routes,
        }
        tables = [*first, ours]
        return _response(TotalCount=len(tables), RouteTableSet=tables[offset : offset + limit])

    def _created(self, route: Mapping[str, Any]) -> Answer:
        if route["DestinationCidrBlock"] in self.table:
            return self.refusal(*self.codes[ErrorKind.EXISTS])
        if len(self.table) >= self.limit:
            return self.refusal(*self.codes[ErrorKind.FULL])
        self.set_route(route["DestinationCidrBlock"], route["GatewayId"])
        return _response(TotalCount=1)

    def _changed(self, action: str, wanted: Mapping[str, Any]) -> Answer:
        for destination, route in self.table.items():
            if int(route.name) == wanted["RouteId"]:
                if action == "DeleteRoutes":
                    del self.table[destination]
                else:
                    route.hop, route.state = wanted["GatewayId"], None
                return _response()
        return self.refusal(*self.codes[ErrorKind.ABSENT])

    def refusal(self, status: int, code: str) -> Answer:
        error = {"Code": code, "Message": f"the lab says {code}"}
        return said({"Response": {"Error": error, "RequestId": "1"}}, status)

    def metadata(self, address: str, request: Request) -> Answer:
        instance = self.of(address)
        path = request.path.removeprefix("/latest/meta-data/").rstrip("/")
        of_mac = "network/interfaces/macs/52:54:00:00:00:01"
        values = {
            "placement/region": "ap-lab",
            "instance-id": instance.name,
            "mac": "52:54:00:00:00:01",
            f"{of_mac}/vpc-id": "vpc-lab",
            f"{of_mac}/subnet-id": "subnet-lab",
        }
        if path.replace("%3A", ":") not in values:
            return Answer(404, b"", "text/plain")
        return Answer(200, values[path.replace("%3A", ":")].encode(), "text/plain")


def _route(destination: str, route: Route) -> dict[str, Any]:
    return {
        "DestinationCidrBlock": destination,
        "GatewayType": "NORMAL_CVM",
        "GatewayId": route.hop,
        "RouteId": int(route.name),
        "RouteType": "USER",
        "Enabled": route.state is not False,
    }


def _response(**values: Any) -> Answer:
    return said({"Response": {**values, "RequestId": "1"}})
