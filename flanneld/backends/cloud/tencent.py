"""tencent-vpc: client of Tencent Cloud's VPC API for routes, with tencentcloud-sdk-python-common.

Behaves as upstream's backend/tencentvpc of 0.28, whose options and variables it takes. Without them the SDK
looks for credentials: its variables and profile, and the instance's role. Actions, fields and codes: VPC API
2017-03-12.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any
from urllib.parse import urlsplit

from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.calls import Metadata, SdkCloud, batches, by_offset
from flanneld.backends.cloud.contract import (
    ACCESS_KEY,
    API,
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
    check_scope,
    missing_extra,
)
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields

TYPE = "tencent-vpc"
_METADATA = "http://metadata.tencentyun.com/latest/meta-data"
_VERSION = "2017-03-12"
#: Type of an instance as next hop, and type of a user's route.
_INSTANCE, _USER = "NORMAL_CVM", "USER"
#: Seconds for one request, and for a call.
_REQUEST_LIMIT, _CALL_LIMIT = 10, 20.0

WORDS = CloudTerms(
    cloud="Tencent Cloud",
    codes={
        "RequestLimitExceeded": ErrorKind.THROTTLED,
        "UnauthorizedOperation": ErrorKind.DENIED,
        "AuthFailure.UnauthorizedOperation": ErrorKind.DENIED,
        "AuthFailure": ErrorKind.CREDENTIALS,
        "ClientSideError": ErrorKind.CREDENTIALS,
        "LimitExceeded": ErrorKind.FULL,
        "ResourceNotFound": ErrorKind.NO_TABLE,
        "InvalidRouteId": ErrorKind.ABSENT,
        "InvalidParameterValue.Duplicate": ErrorKind.EXISTS,
        "ResourceInUse": ErrorKind.BUSY,
        "UnsupportedOperation": ErrorKind.BUSY,
    },
    credentials="give the instance a role, or correct ACCESS_KEY_ID and ACCESS_KEY_SECRET",
    quota="raise the VPC quota of route policies in a route table",
    permission="vpc:{}",
    table_option=TABLES.name,
)


class Tencent(SdkCloud):
    """Client of the VPC API in this instance's region. Raises ``Fatal`` for unusable options.

    A next hop is an instance's address, so a route follows a move of the uplink.
    """

    words, limit = WORDS, _CALL_LIMIT

    def __init__(self, options: Fields, services: HostServices) -> None:
        super().__init__(services)
        self._tables = TABLES.of(options)
        self._keys = access_keys(options, os.environ)
        self._url = urlsplit(API.of(options))
        self._metadata = Metadata(services.http, METADATA_API.of(options) or _METADATA)
        self._region = ""

    # ---- reading -----------------------------------------------------------------------------

    def place(self, address: IPv4Address) -> CloudNode:
        self._region, instance, mac = self._metadata.read("placement/region", "instance-id", "mac")
        of_mac = f"network/interfaces/macs/{mac}"
        vpc, subnet = self._metadata.read(f"{of_mac}/vpc-id", f"{of_mac}/subnet-id")
        tables = self._tables or (self._table_of(vpc, subnet),)
        return CloudNode(tables, str(address), instance, vpc)

    def _table_of(self, vpc: str, subnet: str) -> str:
        """Return the route table of a subnet, else the main one of the VPC."""
        tables = list(self._described({"Filters": [{"Name": "vpc-id", "Values": [vpc]}]}))
        for table in tables:
            if any(each.get("SubnetId") == subnet for each in table.get("AssociationSet") or ()):
                return str(table["RouteTableId"])
        for table in tables:
            if table.get("Main"):
                return str(table["RouteTableId"])
        raise CloudError(ErrorKind.NO_TABLE, f"{vpc} has no route table", f"set Backend.{TABLES.name}")

    def _described(self, which: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        return by_offset(self.ask, ApiCall("DescribeRouteTables", which), "RouteTableSet")

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        found = []
        for table in self._described({"RouteTableIds": list(place.tables)}):
            check_scope(table["RouteTableId"], table["VpcId"], place, TABLES.name)
            routes = table.get("RouteSet") or ()
            found += [
                _entry(table["RouteTableId"], route) for route in routes if route["DestinationCidrBlock"]
            ]
        return found

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        hops = sorted({each.hop for each in entries if _is_address(each.hop)})
        there: set[str] = set()
        for some in batches(hops):
            which = {"VpcId": place.scope, "PrivateIpAddresses": list(some)}
            answer = self.ask(ApiCall("DescribeVpcPrivateIpAddresses", which))
            there |= {str(each["PrivateIpAddress"]) for each in answer["VpcPrivateIpAddressSet"]}
        return [each for each in entries if each.hop in hops and each.hop not in there]

    # ---- changes -----------------------------------------------------------------------------

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        del place
        if was and was.hop == entry.hop:
            return [ApiCall("EnableRoutes", {"RouteTableId": entry.table, "RouteIds": [int(was.name)]})]
        route = {
            "DestinationCidrBlock": str(entry.destination),
            "GatewayType": _INSTANCE,
            "GatewayId": entry.hop,
            "Enabled": True,
        }
        if was:
            route["RouteId"] = int(was.name)
        action = "ReplaceRoutes" if was else "CreateRoutes"
        return [ApiCall(action, {"RouteTableId": entry.table, "Routes": [route]})]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        return [
            ApiCall("DeleteRoutes", {"RouteTableId": entry.table, "Routes": [{"RouteId": int(entry.name)}]})
        ]

    # ---- the API -----------------------------------------------------------------------------

    def _call(self, client: Any, call: ApiCall) -> Any:
        from tencentcloud.common.exception import TencentCloudSDKException

        try:
            return client.call_json(call.action, dict(call.parameters))["Response"]
        except TencentCloudSDKException as error:
            code = str(error.get_code())
            if code in ("ClientNetworkError", "ServerNetworkError"):
                raise WORDS.no_answer(call, code) from None
            raise WORDS.error(call, code) from None

    def _connect(self) -> Any:
        try:
            from tencentcloud.common.common_client import CommonClient
            from tencentcloud.common.credential import Credential
            from tencentcloud.common.profile.client_profile import ClientProfile
            from tencentcloud.common.profile.http_profile import HttpProfile
        except ImportError:
            raise missing_extra("tencent", "tencentcloud-sdk-python-common") from None

        credentials = Credential(*self._keys) if self._keys else _found()
        profile = HttpProfile(reqTimeout=_REQUEST_LIMIT)
        if self._url.netloc:
            profile.scheme, profile.endpoint = self._url.scheme, self._url.netloc
        return CommonClient("vpc", _VERSION, credentials, self._region, ClientProfile(httpProfile=profile))


def _found() -> Any:
    """Return the SDK's credentials. Raises ``CloudError`` if it finds none."""
    from tencentcloud.common.credential import DefaultCredentialProvider
    from tencentcloud.common.exception import TencentCloudSDKException

    try:
        return DefaultCredentialProvider().get_credential()
    except (TencentCloudSDKException, OSError, LookupError, TypeError):
        problem = "ACCESS_KEY_ID and ACCESS_KEY_SECRET must be provided, and this instance has no role"
        raise CloudError(ErrorKind.CREDENTIALS, problem, WORDS.credentials) from None


def _is_address(hop: str) -> bool:
    try:
        IPv4Address(hop)
    except ValueError:
        return False
    return True


def _entry(table: str, route: Mapping[str, Any]) -> CloudTableEntry:
    is_instances = route.get("GatewayType") == _INSTANCE and route.get("RouteType", _USER) == _USER
    hop = str(route.get("GatewayId") or "an unknown hop")
    return CloudTableEntry(
        table,
        IPv4Network(route["DestinationCidrBlock"]),
        hop if is_instances else f"{route.get('GatewayType')} {hop}",
        Health.ACTIVE if route["Enabled"] else Health.DEAD,
        str(route["RouteId"]),
    )


build = CloudFactory(TYPE, Tencent, TABLES.name, options=(TABLES, *ACCESS_KEY, API, METADATA_API))
