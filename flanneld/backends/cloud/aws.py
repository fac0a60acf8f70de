"""aws-vpc: client of the EC2 API for the route tables of a VPC, with botocore.

Behaves as upstream's backend/awsvpc of 0.12, whose option ``RouteTableID`` it takes. Credentials come from
botocore's chain: environment, web identity, ~/.aws, the instance's role. Actions and error codes: EC2 API
Reference, version 2016-11-15.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from msgspec.structs import replace

from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.calls import Metadata, MetadataSession, SdkCloud
from flanneld.backends.cloud.contract import (
    API,
    TABLES,
    ApiCall,
    CloudError,
    CloudNode,
    CloudTableEntry,
    CloudTerms,
    ErrorKind,
    Health,
    check_scope,
    missing_extra,
)
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields

TYPE = "aws-vpc"
_METADATA = "http://169.254.169.254"
#: Version 2 of the metadata service, which an instance may require.
_TOKEN = MetadataSession(
    "latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
)
#: Seconds for one attempt of a call, for a connection, and for a call with its one repetition.
_READ_LIMIT, _CONNECT_LIMIT, _CALL_LIMIT = 10, 5, 40.0
#: Kinds of next hops that belong to an instance: after its deletion a route is in state blackhole.
_OF_INSTANCES = ("eni-", "i-")

WORDS = CloudTerms(
    cloud="AWS",
    codes={
        "RequestLimitExceeded": ErrorKind.THROTTLED,
        "Throttling": ErrorKind.THROTTLED,
        "ThrottlingException": ErrorKind.THROTTLED,
        "UnauthorizedOperation": ErrorKind.DENIED,
        "AccessDenied": ErrorKind.DENIED,
        "AuthFailure": ErrorKind.CREDENTIALS,
        "ExpiredToken": ErrorKind.CREDENTIALS,
        "ExpiredTokenException": ErrorKind.CREDENTIALS,
        "IDPRejectedClaim": ErrorKind.CREDENTIALS,
        "InvalidIdentityToken": ErrorKind.CREDENTIALS,
        "RequestExpired": ErrorKind.CREDENTIALS,
        "InvalidClientTokenId": ErrorKind.CREDENTIALS,
        "SignatureDoesNotMatch": ErrorKind.CREDENTIALS,
        "NoCredentialsError": ErrorKind.CREDENTIALS,
        "PartialCredentialsError": ErrorKind.CREDENTIALS,
        "CredentialRetrievalError": ErrorKind.CREDENTIALS,
        "RouteLimitExceeded": ErrorKind.FULL,
        "InvalidRouteTableID": ErrorKind.NO_TABLE,
        "InvalidRouteTableId": ErrorKind.NO_TABLE,
        "InvalidRoute.NotFound": ErrorKind.ABSENT,
        "RouteAlreadyExists": ErrorKind.EXISTS,
    },
    credentials="give the instance a role, or correct AWS_ACCESS_KEY_ID, the web identity or ~/.aws",
    quota="raise the quota 'Routes per route table' of Amazon VPC",
    permission="ec2:{}",
    table_option=TABLES.name,
)


class Aws(SdkCloud):
    """Client of the EC2 API in this instance's region. Raises ``Fatal`` for unusable options."""

    words, limit = WORDS, _CALL_LIMIT
    filters_addresses = True

    def __init__(self, options: Fields, services: HostServices) -> None:
        super().__init__(services)
        self._tables = TABLES.of(options)
        self._endpoint = API.of(options)
        url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA
        self._metadata = Metadata(services.http, url, token=_TOKEN)

    # ---- reading -----------------------------------------------------------------------------

    def place(self, address: IPv4Address) -> CloudNode:
        (instance,) = self._metadata.read("latest/meta-data/instance-id")
        answer = self.ask(ApiCall("DescribeInstances", {"InstanceIds": [instance]}))
        interface = _interface(answer, str(address))
        if interface is None:
            raise CloudError(
                ErrorKind.OTHER,
                f"{instance} has no network interface with {address}",
                "choose the interface that has it in the VPC with -iface",
            )
        tables = self._tables or (self._table_of(interface["SubnetId"], interface["VpcId"]),)
        return CloudNode(
            tables,
            interface["NetworkInterfaceId"],
            instance,
            interface["VpcId"],
            forwards=not interface.get("SourceDestCheck", False),
        )

    def _table_of(self, subnet: str, vpc: str) -> str:
        """Return the route table of a subnet, else the main one of the VPC, as upstream does."""
        for filters in (
            {"association.subnet-id": subnet},
            {"association.main": "true", "vpc-id": vpc},
        ):
            named = [{"Name": name, "Values": [value]} for name, value in filters.items()]
            found = self.ask(ApiCall("DescribeRouteTables", {"Filters": named}))["RouteTables"]
            if found:
                return str(found[0]["RouteTableId"])
        raise CloudError(ErrorKind.NO_TABLE, "main route table not found", f"set Backend.{TABLES.name}")

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        found = []
        call = ApiCall("DescribeRouteTables", {"RouteTableIds": list(place.tables)})
        for table in self.ask(call)["RouteTables"]:
            check_scope(table["RouteTableId"], table["VpcId"], place, TABLES.name)
            routes = (route for route in table["Routes"] if "DestinationCidrBlock" in route)
            found += [_entry(table["RouteTableId"], route) for route in routes]
        return found

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        del place  # the entry already shows it, without another call
        return [each for each in entries if each.health is Health.DEAD and each.hop.startswith(_OF_INSTANCES)]

    # ---- changes -----------------------------------------------------------------------------

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        del place
        return [
            ApiCall(
                "ReplaceRoute" if was else "CreateRoute",
                {
                    "RouteTableId": entry.table,
                    "DestinationCidrBlock": str(entry.destination),
                    "NetworkInterfaceId": entry.hop,
                },
            )
        ]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        where = {"RouteTableId": entry.table, "DestinationCidrBlock": str(entry.destination)}
        return [ApiCall("DeleteRoute", where)]

    def forwarding_calls(self, place: CloudNode) -> list[ApiCall]:
        off = {"NetworkInterfaceId": place.hop, "SourceDestCheck": {"Value": False}}
        return [ApiCall("ModifyNetworkInterfaceAttribute", off)]

    def forwarding_remedy(self, place: CloudNode) -> str:
        return (
            "run: aws ec2 modify-network-interface-attribute --no-source-dest-check"
            f" --network-interface-id {place.hop}, or allow ec2:ModifyNetworkInterfaceAttribute"
        )

    # ---- the API -----------------------------------------------------------------------------

    def _call(self, client: Any, call: ApiCall) -> Any:
        from botocore import xform_name
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(client, xform_name(call.action))(**call.parameters)
        except ClientError as error:
            raise WORDS.error(call, str(error.response.get("Error", {}).get("Code", "no code"))) from None
        except BotoCoreError as error:
            name = type(error).__name__
            raise WORDS.error(call, name) if name in WORDS.codes else WORDS.no_answer(call, name) from None

    def _connect(self) -> Any:
        try:
            from botocore.config import Config
            from botocore.session import Session
        except ImportError:
            raise missing_extra("aws", "botocore") from None

        limits = Config(
            connect_timeout=_CONNECT_LIMIT,
            read_timeout=_READ_LIMIT,
            retries={"total_max_attempts": 2, "mode": "standard"},
        )
        session = Session()
        return session.create_client(
            "ec2",
            region_name=session.get_config_variable("region") or self._region(),
            endpoint_url=self._endpoint or None,
            config=limits,
            **_old_names(),
        )

    def _region(self) -> str:
        try:
            return self._metadata.read("latest/meta-data/placement/region")[0]
        except CloudError:
            return self._metadata.read("latest/meta-data/placement/availability-zone")[0][:-1]


def _old_names() -> dict[str, str]:
    """Return the access keys from variables that upstream reads and botocore does not."""
    environ = os.environ
    key, secret = environ.get("AWS_ACCESS_KEY"), environ.get("AWS_SECRET_KEY")
    if not key or not secret or "AWS_ACCESS_KEY_ID" in environ:
        return {}
    token = environ.get("AWS_SESSION_TOKEN")
    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    return keys | ({"aws_session_token": token} if token else {})


def _interface(answer: Mapping[str, Any], address: str) -> Mapping[str, Any] | None:
    """Return the network interface that has an address."""
    for reservation in answer["Reservations"]:
        for instance in reservation["Instances"]:
            for interface in instance.get("NetworkInterfaces", ()):
                addresses = [each["PrivateIpAddress"] for each in interface.get("PrivateIpAddresses", ())]
                if address in addresses:
                    found: Mapping[str, Any] = interface
                    return found
    return None


def _entry(table: str, route: Mapping[str, Any]) -> CloudTableEntry:
    entry = CloudTableEntry(table, IPv4Network(route["DestinationCidrBlock"]), _hop(route))
    return replace(entry, health=Health.DEAD) if route.get("State") == "blackhole" else entry


def _hop(route: Mapping[str, Any]) -> str:
    """Return the next hop: an interface if the API names one, else the gateway that it names."""
    hops = [value for name, value in route.items() if name.endswith("Id") and "Owner" not in name]
    return str(route.get("NetworkInterfaceId") or (hops[0] if hops else "an unknown hop"))


build = CloudFactory(TYPE, Aws, TABLES.name, options=(TABLES, API))
