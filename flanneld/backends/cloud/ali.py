"""ali-vpc: client of Alibaba Cloud's VPC and ECS APIs for routes, with aliyun-python-sdk-core.

Behaves as upstream's backend/alivpc of 0.12, whose options and variables it takes. Without them the
credentials are those of the instance's RAM role. Actions, fields and codes: VPC API 2016-04-28, ECS API
2014-05-26.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any
from urllib.parse import urlsplit

from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.calls import BATCH, Metadata, SdkCloud, batches, by_token
from flanneld.backends.cloud.contract import (
    ACCESS_KEY,
    API,
    INSTANCE_API,
    METADATA_API,
    TABLES,
    ApiCall,
    CloudError,
    CloudNode,
    CloudTableEntry,
    CloudTerms,
    ErrorKind,
    Health,
    access_keys,
    missing_extra,
)
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields

TYPE = "ali-vpc"
_METADATA = "http://100.100.100.200/latest/meta-data"
_ROLE = "ram/security-credentials/"
#: API and version of an action. Every other action belongs to the VPC API.
_OF_ECS = frozenset({"DescribeInstances"})
_VERSIONS = {"ecs": "2014-05-26", "vpc": "2016-04-28"}
#: Seconds for a connection, for an answer, and for a call with both.
_CONNECT_LIMIT, _READ_LIMIT, _CALL_LIMIT = 5, 10, 20.0

WORDS = CloudTerms(
    cloud="Alibaba Cloud",
    codes={
        "Throttling": ErrorKind.THROTTLED,
        "ServiceUnavailable": ErrorKind.THROTTLED,
        "Forbidden": ErrorKind.DENIED,
        "NoPermission": ErrorKind.DENIED,
        "InvalidAccessKeyId": ErrorKind.CREDENTIALS,
        "InvalidAccessKeySecret": ErrorKind.CREDENTIALS,
        "SignatureDoesNotMatch": ErrorKind.CREDENTIALS,
        "InvalidSecurityToken": ErrorKind.CREDENTIALS,
        "SDK.InvalidCredential": ErrorKind.CREDENTIALS,
        "QuotaExceeded": ErrorKind.FULL,
        "InvalidRouteTableId": ErrorKind.NO_TABLE,
        "InvalidRouteEntry": ErrorKind.ABSENT,
        "RouterEntryConflict": ErrorKind.EXISTS,
        "OperationConflict": ErrorKind.BUSY,
        "TaskConflict": ErrorKind.BUSY,
        "IncorrectRouteEntryStatus": ErrorKind.BUSY,
        "IncorrectRouteTableStatus": ErrorKind.BUSY,
        "IncorrectVpcStatus": ErrorKind.BUSY,
    },
    credentials="give the instance a RAM role, or correct ACCESS_KEY_ID and ACCESS_KEY_SECRET",
    quota="raise the VPC quota of custom route entries in a route table",
    permission="vpc:{}",
    table_option=TABLES.name,
)


class Ali(SdkCloud):
    """Client of the APIs in this instance's region. Raises ``Fatal`` for unusable options."""

    words, limit = WORDS, _CALL_LIMIT

    def __init__(self, options: Fields, services: HostServices) -> None:
        super().__init__(services)
        self._tables = TABLES.of(options)
        self._keys = access_keys(options, os.environ)
        ecs = INSTANCE_API.of(options) or os.environ.get("ECS_ENDPOINT", "")
        self._endpoints = {"vpc": API.of(options), "ecs": ecs}
        self._metadata = Metadata(services.http, METADATA_API.of(options) or _METADATA)
        self._region = ""

    # ---- reading -----------------------------------------------------------------------------

    def place(self, address: IPv4Address) -> CloudNode:
        del address  # a route leads to the instance, not to an address
        self._region, instance, vpc, switch = self._metadata.read(
            "region-id", "instance-id", "vpc-id", "vswitch-id"
        )
        if self._tables:
            return CloudNode(self._tables, instance, instance, vpc)
        found = self.ask(ApiCall("DescribeVSwitchAttributes", {"VSwitchId": switch}))
        return CloudNode((str(found["RouteTable"]["RouteTableId"]),), instance, instance, vpc)

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        found = []
        for table in place.tables:
            call = ApiCall("DescribeRouteEntryList", {"RouteTableId": table, "MaxResult": BATCH})
            for page in by_token(self.ask, call, "NextToken", "NextToken"):
                routes = page["RouteEntrys"]["RouteEntry"]
                found += [
                    _entry(table, route) for route in routes if ":" not in route["DestinationCidrBlock"]
                ]
        return found

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        del place
        hops = sorted({each.hop for each in entries if each.hop.startswith("i-")})
        there: set[str] = set()
        for some in batches(hops):
            which = {"InstanceIds": json.dumps(list(some)), "PageSize": BATCH}
            answer = self.ask(ApiCall("DescribeInstances", which, "ecs:DescribeInstances"))
            there |= {str(each["InstanceId"]) for each in answer["Instances"]["Instance"]}
        return [each for each in entries if each.hop in hops and each.hop not in there]

    # ---- changes -----------------------------------------------------------------------------

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        del place
        where = {"RouteTableId": entry.table, "DestinationCidrBlock": str(entry.destination)}
        if was:
            new = {"NewNextHopType": "Instance", "NewNextHopId": entry.hop}
            return [ApiCall("ModifyRouteEntry", {**where, **new})]
        return [ApiCall("CreateRouteEntry", {**where, "NextHopType": "Instance", "NextHopId": entry.hop})]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        where = {"RouteTableId": entry.table, "DestinationCidrBlock": str(entry.destination)}
        return [ApiCall("DeleteRouteEntry", {**where, "NextHopId": entry.hop})]

    # ---- the API -----------------------------------------------------------------------------

    def _call(self, client: Any, call: ApiCall) -> Any:
        from aliyunsdkcore.acs_exception.exceptions import ClientException, ServerException
        from aliyunsdkcore.request import CommonRequest

        api = "ecs" if call.action in _OF_ECS else "vpc"
        url = urlsplit(self._endpoints[api] or f"https://{api}.{self._region}.aliyuncs.com")
        request = CommonRequest(domain=url.netloc, version=_VERSIONS[api], action_name=call.action)
        request.set_protocol_type(url.scheme)
        for name, value in {"RegionId": self._region, **call.parameters}.items():
            request.add_query_param(name, value)
        try:
            return json.loads(client.do_action_with_exception(request))
        except ServerException as error:
            raise WORDS.error(call, str(error.get_error_code())) from None
        except ClientException as error:
            code = str(error.get_error_code())
            raise WORDS.error(call, code) if code in WORDS.codes else WORDS.no_answer(call, code) from None

    def _connect(self) -> Any:
        try:
            from aliyunsdkcore.auth.credentials import EcsRamRoleCredential
            from aliyunsdkcore.client import AcsClient
        except ImportError:
            raise missing_extra("ali", "aliyun-python-sdk-core") from None

        # The SDK logs the signed text with each refusal. Our own messages give the reason.
        logging.getLogger("aliyunsdkcore").setLevel(logging.CRITICAL + 1)
        limits = {"connect_timeout": _CONNECT_LIMIT, "timeout": _READ_LIMIT, "auto_retry": False}
        if self._keys:
            return AcsClient(*self._keys, region_id=self._region, **limits)
        role = EcsRamRoleCredential(self._role())
        return AcsClient(region_id=self._region, credential=role, **limits)

    def _role(self) -> str:
        """Return the instance's role. Raises ``CloudError`` with upstream's text if it has none."""
        try:
            return self._metadata.read(_ROLE)[0].split()[0]
        except CloudError:
            problem = (
                "ACCESS_KEY_ID and ACCESS_KEY_SECRET must be provided, and this instance has no RAM role"
            )
            raise CloudError(ErrorKind.CREDENTIALS, problem, WORDS.credentials) from None


def _entry(table: str, route: Mapping[str, Any]) -> CloudTableEntry:
    hops = route.get("NextHops", {}).get("NextHop") or [{}]
    return CloudTableEntry(
        table,
        IPv4Network(route["DestinationCidrBlock"]),
        str(hops[0].get("NextHopId") or route.get("Type", "an unknown hop")),
        Health.ACTIVE if route["Status"] == "Available" else Health.PENDING,
        str(route.get("RouteEntryId", "")),
    )


build = CloudFactory(TYPE, Ali, TABLES.name, options=(TABLES, *ACCESS_KEY, API, INSTANCE_API, METADATA_API))
