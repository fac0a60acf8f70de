"""ksc-vpc: client of Kingsoft Cloud's VPC API for routes, over HTTP.

Requests are signed with AWS's Signature Version 4, which this cloud took over: service ``vpc``, API version
2016-03-04. Actions: DescribeRoutes, CreateRoute, DeleteRoute.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any
from urllib.parse import quote, urlsplit

from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.calls import Metadata, by_token
from flanneld.backends.cloud.contract import (
    ENDPOINT,
    METADATA,
    ApiCall,
    Cloud,
    CloudError,
    CloudNode,
    CloudTableEntry,
    CloudTerms,
    ErrorKind,
    endpoint,
)
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.errors import Fatal, Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.http_client import HttpRequest

TYPE = "ksc-vpc"
_METADATA = "http://169.254.169.254/latest/meta-data"
_VERSION = "2016-03-04"
#: Type of a route whose next hop is an instance.
_HOST = "Host"

WORDS = CloudTerms(
    cloud="Kingsoft Cloud",
    codes={
        "RequestLimitExceeded": ErrorKind.THROTTLED,
        "AccessDenied": ErrorKind.DENIED,
        "InvalidClientTokenId": ErrorKind.CREDENTIALS,
        "SignatureDoesNotMatch": ErrorKind.CREDENTIALS,
        "RouteLimitExceeded": ErrorKind.FULL,
        "InvalidVpcNotFound": ErrorKind.NO_TABLE,
        "RouteNotFound": ErrorKind.ABSENT,
        "RouteAlreadyExists": ErrorKind.EXISTS,
    },
    credentials="correct KSYUN_ACCESS_KEY_ID and KSYUN_SECRET_ACCESS_KEY",
    quota="raise the quota of routes in a VPC",
    permission="vpc:{}",
    table_option="VpcID",
)


class Ksc(Cloud):
    """Client of the VPC API in a region. The route table is that of the whole VPC."""

    def __init__(
        self, services: HostServices, region: str, vpc: str, url: str = "", metadata: str = ""
    ) -> None:
        self._http = services.http
        self._region = region
        self._vpc = vpc
        self._url = (url or f"https://vpc.{region}.api.ksyun.com").rstrip("/")
        self._metadata = Metadata(services.http, metadata or _METADATA)

    def place(self, address: IPv4Address) -> CloudNode:
        del address  # a route leads to the instance, not to an address
        (instance,) = self._metadata.read("instance-id")
        return CloudNode((self._vpc,), instance, instance, self._vpc)

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        of_vpc = {"Filter.1.Name": "vpc-id", "Filter.1.Value.1": place.scope, "MaxResults": "100"}
        pages = by_token(self.ask, ApiCall("DescribeRoutes", of_vpc), "NextToken", "NextToken")
        return [_entry(self._vpc, route) for page in pages for route in page["RouteSet"]]

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        """Return none: the cloud removes the routes of an instance that is deleted."""
        del place, entries
        return []

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        route = {"VpcId": place.scope, "DestinationCidrBlock": str(entry.destination)}
        made = ApiCall("CreateRoute", {**route, "RouteType": _HOST, "InstanceId": entry.hop})
        return [*(self.drop_calls(was) if was else ()), made]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        return [ApiCall("DeleteRoute", {"RouteId": entry.name})]

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        query = {"Action": call.action, "Version": _VERSION, **call.parameters}
        request = HttpRequest("GET", f"{self._url}/?{_joined(query)}", self._signature(query))
        try:
            answer = self._http(request)
        except Retryable as failure:
            raise WORDS.no_answer(call, failure.problem) from None
        try:
            found: Mapping[str, Any] = json.loads(answer.body)
            code = "" if answer.status < 300 else str(found["Error"]["Code"])
        except (ValueError, LookupError, TypeError):
            raise WORDS.no_answer(call, f"status {answer.status} without JSON") from None
        if code:
            raise WORDS.error(call, code)
        return found

    def _signature(self, query: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that sign a GET of ``/``. Raises ``CloudError`` without a key."""
        key, secret = os.environ.get("KSYUN_ACCESS_KEY_ID"), os.environ.get("KSYUN_SECRET_ACCESS_KEY")
        if not key or not secret:
            raise CloudError(ErrorKind.CREDENTIALS, f"{WORDS.cloud} needs a key", WORDS.credentials)
        time = clock.utc_text(clock.wall()).replace("-", "").replace(":", "")
        scope = f"{time[:8]}/{self._region}/vpc/aws4_request"
        host = urlsplit(self._url).netloc
        signed = f"GET\n/\n{_joined(query)}\nhost:{host}\nx-amz-date:{time}\n\nhost;x-amz-date\n{_hash(b'')}"
        text = f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{_hash(signed.encode())}"
        digest = f"AWS4{secret}".encode()
        for part in (*scope.split("/"), text):
            digest = hmac.new(digest, part.encode(), hashlib.sha256).digest()
        named = f"Credential={key}/{scope}, SignedHeaders=host;x-amz-date, Signature={digest.hex()}"
        return {
            "X-Amz-Date": time,
            "Authorization": f"AWS4-HMAC-SHA256 {named}",
            "Accept": "application/json",
        }


def _joined(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(table: str, route: Mapping[str, Any]) -> CloudTableEntry:
    hop = str(route.get("InstanceId") or route.get("RouteType"))
    return CloudTableEntry(table, IPv4Network(route["DestinationCidrBlock"]), hop, name=str(route["RouteId"]))


def connect(options: Fields, services: HostServices) -> Ksc:
    """Return the client for the options. Raises ``Fatal`` if one of them is missing."""
    region, vpc = options.string("Region", ""), options.string("VpcID", "")
    if not region or not vpc:
        raise Fatal("Backend has no Region or no VpcID", "set both in the network config")
    return Ksc(services, region, vpc, endpoint(options), endpoint(options, METADATA))


build = CloudFactory(TYPE, connect, kept=("Region", "VpcID", ENDPOINT, METADATA))
