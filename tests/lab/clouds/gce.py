"""Google Cloud in the lab: Compute's routes, instances and operations, and the metadata service.

A bearer token counts if the metadata service has handed it out, or for a JWT whose RS256 signature
google-auth itself finds right. Shapes are those of the Compute API's discovery document, version v1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import exceptions, jwt

from flanneld.backends.cloud.contract import ErrorKind
from tests.lab.clouds.service import Answer, Asked, Request, said
from tests.lab.clouds.vpc import Route, VpcService

_SELF = "https://www.googleapis.com/compute/v1/projects/lab"
NETWORK = f"{_SELF}/global/networks/default"
_ZONE = "zones/lab-a"
_PAGE = 3


@cache
def _account_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@dataclass
class GceService(VpcService):
    """``never_ends`` operations stay PENDING."""

    kind: ClassVar[str] = "gce"
    actions: ClassVar[Mapping[str, str]] = {
        "place": "instances.get",
        "list": "routes.list",
        "create": "routes.insert",
        "replace": "routes.insert",
        "delete": "routes.delete",
    }
    codes: ClassVar[Mapping[ErrorKind, tuple[int, str]]] = {
        ErrorKind.THROTTLED: (403, "rateLimitExceeded"),
        ErrorKind.DENIED: (403, "forbidden"),
        ErrorKind.CREDENTIALS: (401, "authError"),
        ErrorKind.FULL: (403, "quotaExceeded"),
        ErrorKind.EXISTS: (409, "alreadyExists"),
        ErrorKind.ABSENT: (404, "notFound"),
        ErrorKind.BUSY: (400, "resourceInUseByAnotherResource"),
        ErrorKind.NO_TABLE: (404, "notFound"),
        ErrorKind.OTHER: (500, "backendError"),
    }
    never_ends: bool = False
    tokens: set[str] = field(default_factory=lambda: {"lab-token"})
    #: Public key of a service account, in PEM.
    account: bytes = b""

    def hop_of(self, name: str, address: str) -> str:
        del address
        return f"{_SELF}/{_ZONE}/instances/{name}"

    def named(self, destination: str) -> str:
        del destination
        return f"route-{self.number}"

    def revoke(self) -> None:
        with self.lock:
            self.tokens = {f"lab-token-{self.number}-new"}

    def make_account(self, path: Path, url: str) -> None:
        """Write the key file of a service account whose tokens are handed out at ``url``."""
        key = _account_key()
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.account = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        content = {"type": "service_account", "client_email": "flanneld@lab", "private_key": text.decode()}
        path.write_text(json.dumps({**content, "token_uri": f"{url}/token"}))

    def understand(self, request: Request) -> Asked:
        path = request.path.split("?")[0]
        _, _, rest = path.partition("/projects/lab/")
        body = _json(request)
        match (request.method, rest.split("/")):
            case ("GET", ["global", "routes"]):
                return Asked("routes.list", request.query)
            case ("POST", ["global", "routes"]):
                return Asked("routes.insert", body)
            case ("DELETE", ["global", "routes", name]):
                return Asked("routes.delete", {"route": name})
            case ("GET", ["zones", _, "instances", name]):
                return Asked("instances.get", {"instance": name})
            case ("POST", ["global", "operations", name, "wait"]):
                return Asked("operations.wait", {"operation": name})
            case ("POST", _) if path == "/token":
                return Asked("token", request.form)
        return Asked("unknown", {"path": path})

    def is_signed(self, request: Request) -> bool:
        if request.path == "/token":
            try:
                jwt.decode(request.form["assertion"], certs=self.account, audience=None)
            except (ValueError, KeyError, exceptions.GoogleAuthError):
                return False
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme == "Bearer" and token in self.tokens

    def answer(self, asked: Asked, request: Request) -> Answer:
        del request
        parameters = asked.parameters
        match asked.action:
            case "token":
                return said(_token(min(self.tokens)))
            case "instances.get":
                return self._instance(parameters["instance"])
            case "routes.list":
                return self._list(parameters)
            case "routes.insert":
                return self._insert(parameters)
            case "routes.delete":
                found = [each for each, route in self.table.items() if route.name == parameters["route"]]
                if not found:
                    return self.refusal(*self.codes[ErrorKind.ABSENT])
                return self._operation(lambda: self.table.pop(found[0]))
            case "operations.wait":
                return said(_operation(parameters["operation"], "PENDING" if self.never_ends else "DONE"))
        return self.refusal(404, "notFound")

    def _instance(self, name: str) -> Answer:
        for each in self.instances.values():
            if each.name == name:
                interface = {"networkIP": each.address, "network": NETWORK, "name": "nic0"}
                found = {"kind": "compute#instance", "name": name, "selfLink": each.hop}
                return said(
                    {
                        **found,
                        "canIpForward": each.forwards,
                        "networkInterfaces": [interface],
                        "status": "RUNNING",
                    }
                )
        return self.refusal(*self.codes[ErrorKind.ABSENT])

    def _list(self, parameters: Mapping[str, str]) -> Answer:
        if parameters.get("filter") != f'network="{NETWORK}"':
            return self.refusal(400, "invalid")
        items = [
            {
                "kind": "compute#route",
                "name": "default-subnet",
                "network": NETWORK,
                "destRange": "198.18.0.0/24",
            }
            | {"nextHopNetwork": NETWORK, "priority": 0},
            *(self._route(destination, route) for destination, route in self.table.items()),
        ]
        start = int(parameters.get("pageToken", "0"))
        page: dict[str, Any] = {"kind": "compute#routeList", "items": items[start : start + _PAGE]}
        if start + _PAGE < len(items):
            page["nextPageToken"] = str(start + _PAGE)
        return said(page)

    def _route(self, destination: str, route: Route) -> dict[str, Any]:
        found = {"kind": "compute#route", "name": route.name, "network": NETWORK, "destRange": destination}
        found |= {"nextHopInstance": route.hop, "priority": 1000}  # type: ignore[dict-item]
        if route.hop not in {each.hop for each in self.instances.values()}:
            found["warnings"] = [{"code": "NEXT_HOP_INSTANCE_NOT_FOUND"}]  # type: ignore[assignment]
        return found

    def _insert(self, route: Mapping[str, Any]) -> Answer:
        if any(each.name == route["name"] for each in self.table.values()):
            return self.refusal(*self.codes[ErrorKind.EXISTS])
        if len(self.table) >= self.limit:
            return self.refusal(*self.codes[ErrorKind.FULL])
        if route["network"] != NETWORK:
            return self.refusal(*self.codes[ErrorKind.NO_TABLE])

        def insert() -> None:
            self.table[route["destRange"]] = Route(route["nextHopInstance"], route["name"])

        return self._operation(insert)

    def _operation(self, act: Any) -> Answer:
        self.number += 1
        if not self.never_ends:
            act()
        return said(_operation(f"operation-{self.number}", "PENDING"))

    def refusal(self, status: int, code: str) -> Answer:
        errors = [{"reason": code, "message": f"the lab says {code}", "domain": "global"}]
        return said({"error": {"code": status, "message": f"the lab says {code}", "errors": errors}}, status)

    def metadata(self, address: str, request: Request) -> Answer:
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403, b"", "text/plain")
        instance = self.of(address)
        path = request.path.split("?")[0].removeprefix("/computeMetadata/v1").strip("/")
        values = {
            "": "instance/\nproject/",
            "project/project-id": "lab",
            "instance/zone": "projects/1/zones/lab-a",
            "instance/hostname": f"{instance.name}.c.lab.internal",
            "instance/service-accounts/default/email": "lab@lab",
        }
        account = "instance/service-accounts/default"
        objects = {
            f"{account}/token": _token(min(self.tokens)),
            account: {"email": "lab@lab", "scopes": [], "aliases": ["default"]},
        }
        flavor = {"Metadata-Flavor": "Google"}
        if path in objects:
            return Answer(200, json.dumps(objects[path]).encode(), headers=flavor)
        if path not in values:
            return Answer(404, b"", "text/plain")
        return Answer(200, values[path].encode(), "text/plain", flavor)


def _token(text: str) -> dict[str, Any]:
    return {"access_token": text, "expires_in": 3600, "token_type": "Bearer"}


def _operation(name: str, status: str) -> dict[str, Any]:
    return {"kind": "compute#operation", "name": name, "status": status}


def _json(request: Request) -> dict[str, Any]:
    """Return a JSON body, empty for any other one."""
    try:
        found: dict[str, Any] = json.loads(request.body or b"{}")
    except ValueError:
        return {}
    return found
