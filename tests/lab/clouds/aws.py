"""AWS in the lab: moto's EC2, IAM and STS behind our faults, and the instance metadata service.

moto checks each request's signature and rights. What it does not know is added to its answers: a route whose
instance was terminated is a blackhole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from botocore.loaders import JSONFileLoader
from moto import settings
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionAuthenticatorMixin
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from moto.sts.models import sts_backends
from werkzeug.test import Client

from flanneld.backends.cloud.contract import ErrorKind
from tests.lab.clouds.service import VPC_NETWORK, Answer, Asked, Request, Service

# Some 1,300 images, which moto makes anew for each cloud and no test asks for.
os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"
# Each client of each test would parse the model of EC2's API, which takes half a second.
_load = cache(JSONFileLoader().load_file)
JSONFileLoader.load_file = lambda _, path: _load(path)
REGION = "us-east-1"
_RIGHTS = (
    "CreateRoute",
    "ReplaceRoute",
    "DeleteRoute",
    "DescribeRouteTables",
    "DescribeInstances",
    "ModifyNetworkInterfaceAttribute",
)
_TOKEN = "lab-token"
#: What a pod's service account shows to STS, for the role's keys.
WEB_IDENTITY = "lab-web-identity"
ROLE = "flanneld"
ROLE_ARN = f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:role/{ROLE}"
_EXCHANGED = """\
<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>
<SessionToken>{token}</SessionToken><Expiration>{end}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
_ITEM = re.compile(r"<item>(?:(?!</item>).)*?</item>", re.DOTALL)


@dataclass
class AwsService(Service):
    """One VPC. ``demands_token`` refuses the first version of the metadata service."""

    kind: ClassVar[str] = "aws-vpc"
    actions: ClassVar[Mapping[str, str]] = {
        "place": "DescribeInstances",
        "list": "DescribeRouteTables",
        "create": "CreateRoute",
        "replace": "ReplaceRoute",
        "delete": "DeleteRoute",
        "forward": "ModifyNetworkInterfaceAttribute",
    }
    codes: ClassVar[Mapping[ErrorKind, tuple[int, str]]] = {
        ErrorKind.THROTTLED: (503, "RequestLimitExceeded"),
        ErrorKind.DENIED: (403, "UnauthorizedOperation"),
        ErrorKind.CREDENTIALS: (400, "ExpiredToken"),
        ErrorKind.FULL: (400, "RouteLimitExceeded"),
        ErrorKind.EXISTS: (400, "RouteAlreadyExists"),
        ErrorKind.ABSENT: (400, "InvalidRoute.NotFound"),
        ErrorKind.BUSY: (400, "IncorrectState"),
        ErrorKind.NO_TABLE: (400, "InvalidRouteTableID.NotFound"),
        ErrorKind.OTHER: (500, "InternalError"),
    }
    demands_token: bool = True
    limit: int = 50
    interfaces: dict[str, str] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._client = Client(DomainDispatcherApplication(create_backend_app))
        self._iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._ec2 = ec2_backends[DEFAULT_ACCOUNT_ID][REGION]
        self._iam.reset()
        self._ec2.reset()
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
        ActionAuthenticatorMixin.request_count = 0
        self._vpc = self._ec2.create_vpc(VPC_NETWORK)
        self._subnet = self._ec2.create_subnet(self._vpc.id, VPC_NETWORK, availability_zone=f"{REGION}a")
        self.main = self._ec2.create_route_table(self._vpc.id)
        self._ec2.associate_route_table(self.main.id, subnet_id=self._subnet.id)
        self._iam.create_user(region_name=REGION, user_name="flanneld")
        self._iam.create_role(ROLE, "{}", "/", None, "", [], None)
        self._allow(_RIGHTS)
        self._key = self._iam.create_access_key("flanneld")

    @property
    def key(self) -> tuple[str, str]:
        return self._key.access_key_id, self._key.secret_access_key

    def _allow(self, actions: Any) -> None:
        named = [f"ec2:{action}" for action in actions]
        statement = {"Effect": "Allow", "Action": named, "Resource": "*"}
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        self._iam.put_user_policy("flanneld", "routes", json.dumps(policy))
        self._iam.put_role_policy(ROLE, "routes", json.dumps(policy))

    # ---- what tests ask for --------------------------------------------------------------------

    def add_table(self) -> str:
        """Make another route table of the VPC."""
        return str(self._ec2.create_route_table(self._vpc.id).id)

    def add_node(self, address: str) -> str:
        with self.lock:
            reservation = self._ec2.run_instances(
                "ami-03cf127a",
                1,
                "",
                [],
                instance_type="t3.micro",
                region_name=REGION,
                is_instance_type_default=False,
                nics=[{"DeviceIndex": "0", "SubnetId": self._subnet.id, "PrivateIpAddress": address}],
            )
            instance = reservation.instances[0]
            self.instances[address] = instance.id
            self.interfaces[address] = instance.nics[0].id
            return str(instance.nics[0].id)

    def terminate(self, address: str) -> None:
        with self.lock:
            self.dead.add(self.interfaces.pop(address))
            del self.instances[address]

    def set_route(self, destination: str, hop: str, table: str = "") -> None:
        with self.lock:
            self._ec2.create_route(table or self.main.id, destination, interface_id=hop)

    def drop_route(self, destination: str) -> None:
        with self.lock:
            self._ec2.delete_route(self.main.id, destination)

    def routes(self, table: str = "") -> dict[str, str]:
        """Return the next hops by destination, the VPC's own aside."""
        with self.lock:
            found = self._ec2.get_route_table(table or self.main.id).routes
            return {str(each.destination_cidr_block): each.interface.id for each in found if each.interface}

    def deny(self, purpose: str) -> None:
        with self.lock:
            self._allow([each for each in _RIGHTS if each != self.actions[purpose]])

    def heal(self) -> None:
        super().heal()
        with self.lock:
            self._allow(_RIGHTS)

    def revoke(self) -> None:
        """Delete the key that was good, and make another."""
        with self.lock:
            self._iam.delete_access_key(self.key[0], "flanneld")
            self._key = self._iam.create_access_key("flanneld")

    def forwards(self, address: str) -> bool:
        """Return True if the source/destination check is off."""
        return not self._ec2.get_network_interface(self.interfaces[address]).source_dest_check

    # ---- the service ---------------------------------------------------------------------------

    def understand(self, request: Request) -> Asked:
        form = request.form
        return Asked(form.get("Action", ""), {name: form[name] for name in form if name != "Action"})

    def is_signed(self, request: Request) -> bool:
        """Return True: moto looks itself."""
        del request
        return True

    def answer(self, asked: Asked, request: Request) -> Answer:
        if asked.action == "AssumeRoleWithWebIdentity":
            return self._exchange(asked.parameters)
        if asked.action == "CreateRoute" and len(self.routes(asked.parameters["RouteTableId"])) >= self.limit:
            return self.refusal(*self.codes[ErrorKind.FULL])
        found = self._client.open(
            request.path,
            method=request.method,
            headers=dict(request.headers),
            data=request.body,
            base_url=f"http://{request.headers['host']}",
        )
        text = found.get_data(as_text=True)
        if asked.action == "DescribeRouteTables":
            text = _ITEM.sub(self._route, text)
        return Answer(found.status_code, text.encode(), "text/xml")

    def _exchange(self, asked: Mapping[str, str]) -> Answer:
        """Give keys of the role for a web identity: moto asks for a signature, which STS does not."""
        if asked["WebIdentityToken"] != WEB_IDENTITY or asked["RoleArn"] != ROLE_ARN:
            return self.refusal(400, "InvalidIdentityToken")
        made = sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assume_role_with_web_identity(
            region_name=REGION,
            role_session_name=asked["RoleSessionName"],
            role_arn=ROLE_ARN,
            policy=None,
            duration=3600,
            external_id=None,
        )
        keys = {"key": made.access_key_id, "secret": made.secret_access_key, "token": made.session_token}
        end = f"{made.expiration:%Y-%m-%dT%H:%M:%SZ}"
        return Answer(200, _EXCHANGED.format(**keys, end=end).encode(), "text/xml")

    def _route(self, match: re.Match[str]) -> str:
        item = match[0]
        is_dead = any(f"<networkInterfaceId>{hop}<" in item for hop in self.dead)
        return item.replace("<state>active<", "<state>blackhole<") if is_dead else item

    def refusal(self, status: int, code: str) -> Answer:
        error = f"<Error><Code>{code}</Code><Message>the lab says {code}</Message></Error>"
        text = f"<Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>"
        return Answer(status, text.encode(), "text/xml")

    def metadata(self, address: str, request: Request) -> Answer:
        if request.method == "PUT":
            return Answer(200, _TOKEN.encode(), "text/plain")
        if self.demands_token and request.headers.get("x-aws-ec2-metadata-token") != _TOKEN:
            return Answer(401, b"", "text/plain")
        role = "latest/meta-data/iam/security-credentials"
        credentials = {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "LastUpdated": "2016-01-01T00:00:00Z",
            "Expiration": "2116-01-01T00:00:00Z",
            "AccessKeyId": self.key[0],
            "SecretAccessKey": self.key[1],
            "Token": "",
        }
        values = {
            "latest/meta-data/instance-id": self.instances.get(address)
            or next(iter(self.instances.values())),
            "latest/meta-data/placement/region": REGION,
            "latest/meta-data/placement/availability-zone": f"{REGION}a",
            role: "flanneld",
            f"{role}/flanneld": json.dumps(credentials),
        }
        path = request.path.strip("/")
        if path not in values:
            return Answer(404, b"", "text/plain")
        return Answer(200, values[path].encode(), "text/plain")
