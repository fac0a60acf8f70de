"""gce: client of Compute's REST API for the routes of a Google Cloud network, with google-auth.

Behaves as upstream's backend/gce of 0.12, whose names of routes it keeps. Credentials are Google's
application default ones: a file, gcloud's, or the service account of the instance. Shapes: Compute API v1,
``routes``, ``instances`` and ``globalOperations``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from flanneld.backends.cloud.backend import CloudFactory
from flanneld.backends.cloud.calls import Metadata, SdkCloud, by_token
from flanneld.backends.cloud.contract import (
    API,
    ApiCall,
    CloudError,
    CloudNode,
    CloudTableEntry,
    CloudTerms,
    ErrorKind,
    Health,
    missing_extra,
)
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields

TYPE = "gce"
_API = "https://compute.googleapis.com/compute/v1"
_SCOPE = "https://www.googleapis.com/auth/compute"
_METADATA = "169.254.169.254"
#: Priority of routes, the API's default and upstream's. For one destination the lowest number wins.
_PRIORITY = 1000
#: Seconds for one request, for the wait for an operation, and for a call with both.
_REQUEST_LIMIT, _WAIT_LIMIT, _CALL_LIMIT = 10.0, 15.0, 40.0
#: Warnings for a route with an instance that was deleted or does not run.
_LEADS_NOWHERE = frozenset({"NEXT_HOP_NOT_RUNNING", "NEXT_HOP_INSTANCE_NOT_FOUND"})

WORDS = CloudTerms(
    cloud="Google Cloud",
    codes={
        "rateLimitExceeded": ErrorKind.THROTTLED,
        "userRateLimitExceeded": ErrorKind.THROTTLED,
        "429": ErrorKind.THROTTLED,
        "forbidden": ErrorKind.DENIED,
        "insufficientPermissions": ErrorKind.DENIED,
        "accessNotConfigured": ErrorKind.DENIED,
        "authError": ErrorKind.CREDENTIALS,
        "required": ErrorKind.CREDENTIALS,
        "401": ErrorKind.CREDENTIALS,
        "RefreshError": ErrorKind.CREDENTIALS,
        "DefaultCredentialsError": ErrorKind.CREDENTIALS,
        "quotaExceeded": ErrorKind.FULL,
        "QUOTA_EXCEEDED": ErrorKind.FULL,
        "notFound": ErrorKind.ABSENT,
        "alreadyExists": ErrorKind.EXISTS,
        "resourceInUseByAnotherResource": ErrorKind.BUSY,
        "resourceNotReady": ErrorKind.BUSY,
        "RESOURCE_NOT_READY": ErrorKind.BUSY,
    },
    credentials="give the instance a service account with the scope compute-rw,"
    " or correct GOOGLE_APPLICATION_CREDENTIALS",
    quota="raise the quota 'Routes' of the project",
    permission="{}",
)

#: Method and path of each action, below the project.
_PATHS = {
    "compute.instances.get": ("GET", "zones/{zone}/instances/{instance}"),
    "compute.routes.list": ("GET", "global/routes"),
    "compute.routes.insert": ("POST", "global/routes"),
    "compute.routes.delete": ("DELETE", "global/routes/{route}"),
    "compute.globalOperations.wait": ("POST", "global/operations/{operation}/wait"),
}
#: Parameters that belong to the path.
_IN_PATH = frozenset({"zone", "instance", "route", "operation"})


class Gce(SdkCloud):
    """Client for the routes of this instance's network. Raises ``Fatal`` for unusable options."""

    words, limit = WORDS, _CALL_LIMIT
    filters_addresses = True

    def __init__(self, options: Fields, services: HostServices) -> None:
        super().__init__(services)
        self._api = (API.of(options) or _API).rstrip("/")
        self._project = ""
        host = os.environ.get("GCE_METADATA_HOST") or _METADATA
        url = f"http://{host}/computeMetadata/v1"
        self._metadata = Metadata(services.http, url, headers={"Metadata-Flavor": "Google"})

    # ---- reading -----------------------------------------------------------------------------

    def place(self, address: IPv4Address) -> CloudNode:
        self._project, zone, host = self._metadata.read(
            "project/project-id", "instance/zone", "instance/hostname"
        )
        name = host.split(".")[0]
        which = {"zone": zone.rsplit("/", 1)[-1], "instance": name}
        instance = self.ask(ApiCall("compute.instances.get", which))
        for interface in instance["networkInterfaces"]:
            if interface.get("networkIP") == str(address):
                network = str(interface["network"])
                forwards = bool(instance.get("canIpForward", False))
                return CloudNode((_last(network),), str(instance["selfLink"]), name, network, forwards)
        raise CloudError(
            ErrorKind.OTHER,
            f"{name} has no network interface with {address}",
            "choose its interface with -iface",
        )

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        only = {"filter": f'network="{place.scope}"', "maxResults": "500"}
        pages = by_token(self.ask, ApiCall("compute.routes.list", only), "nextPageToken", "pageToken")
        routes = (route for page in pages for route in page.get("items") or ())
        return [
            _entry(place.tables[0], route)
            for route in routes
            if route["network"] == place.scope and ":" not in route["destRange"]
        ]

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        """Return the entries that the API warns of, and whose instance does not exist."""
        del place
        return [each for each in entries if each.health is Health.DEAD and self._is_absent(each.hop)]

    def _is_absent(self, instance: str) -> bool:
        parts = instance.split("/")
        if parts[-2] != "instances":
            return False
        try:
            self.ask(ApiCall("compute.instances.get", {"zone": parts[-3], "instance": parts[-1]}))
        except CloudError as failure:
            if failure.trouble is ErrorKind.ABSENT:
                return True
            raise
        return False

    # ---- changes -----------------------------------------------------------------------------

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        """Return a removal of ``was``, which carries no packets, and an insertion: the API cannot replace."""
        new = {
            "name": _name(entry.destination),
            "destRange": str(entry.destination),
            "network": place.scope,
            "nextHopInstance": entry.hop,
            "priority": _PRIORITY,
        }
        return [
            *(self.drop_calls(was) if was else ()),
            ApiCall("compute.routes.insert", new, "compute.routes.create"),
        ]

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        return [ApiCall("compute.routes.delete", {"route": entry.name or _name(entry.destination)})]

    def forwarding_remedy(self, place: CloudNode) -> str:
        return f"recreate {place.instance} with: gcloud compute instances create --can-ip-forward"

    # ---- the API -----------------------------------------------------------------------------

    def _connect(self) -> Any:
        """Return a session with the application default credentials."""
        try:
            import google.auth
            from google.auth.exceptions import DefaultCredentialsError
            from google.auth.transport.requests import AuthorizedSession
        except ImportError:
            raise missing_extra("gce", "google-auth[requests]") from None

        try:
            credentials, _ = google.auth.default(scopes=[_SCOPE])
        except DefaultCredentialsError as error:
            raise WORDS.error(ApiCall("google.auth.default"), type(error).__name__) from None
        make: Callable[..., Any] = AuthorizedSession
        return make(credentials, max_refresh_attempts=1)

    def _call(self, session: Any, call: ApiCall) -> Any:
        """Make a call; after a change wait until its operation has ended. Raises ``CloudError``."""
        answer = self._sent(session, call, _REQUEST_LIMIT)
        if answer.get("kind") != "compute#operation":
            return answer
        operation = str(answer["name"])
        if answer.get("status") != "DONE":
            which = {"operation": operation}
            wait = ApiCall("compute.globalOperations.wait", which, "compute.globalOperations.get")
            answer = self._sent(session, wait, _WAIT_LIMIT)
        if answer.get("status") != "DONE":
            problem = f"the operation {operation} of {call.action} has not ended within {_WAIT_LIMIT:g} s"
            raise CloudError(ErrorKind.BUSY, problem, f"see: gcloud compute operations describe {operation}")
        for error in (answer.get("error") or {}).get("errors") or ():
            raise WORDS.error(call, str(error.get("code", "no code")))
        return answer

    def _sent(self, session: Any, call: ApiCall, limit: float) -> Any:
        """Send one request. Raises ``CloudError``."""
        from google.auth.exceptions import GoogleAuthError

        method, path = _PATHS[call.action]
        url = f"{self._api}/projects/{self._project}/{path.format(**call.parameters)}"
        rest = {name: value for name, value in call.parameters.items() if name not in _IN_PATH}
        body = {"json": rest} if method == "POST" else {"params": rest}
        try:
            answer = session.request(method, url, timeout=limit, max_allowed_time=limit, **body)
            found = json.loads(answer.text) if answer.status_code < 300 else None
        except GoogleAuthError as error:
            name = type(error).__name__
            raise WORDS.error(call, name) if name in WORDS.codes else WORDS.no_answer(call, name) from None
        if answer.status_code >= 300:
            raise WORDS.error(call, _code(answer.status_code, answer.text))
        return found


def _code(status: int, text: str) -> str:
    """Return the reason of a refusal, else the status."""
    try:
        errors = json.loads(text)["error"]["errors"]
        return str(errors[0]["reason"])
    except (ValueError, LookupError, TypeError):
        return str(status)


def _name(destination: IPv4Network) -> str:
    """Return upstream's name of a route: ``flannel-10-5-34-0-24``."""
    return f"flannel-{destination}".replace(".", "-").replace("/", "-")


def _last(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def _entry(table: str, route: Mapping[str, Any]) -> CloudTableEntry:
    warnings = {each.get("code") for each in route.get("warnings") or ()}
    hops = [value for name, value in route.items() if name.startswith("nextHop") and isinstance(value, str)]
    return CloudTableEntry(
        table,
        IPv4Network(route["destRange"]),
        str(route.get("nextHopInstance") or (hops[0] if hops else "an unknown hop")),
        Health.DEAD if warnings & _LEADS_NOWHERE else Health.ACTIVE,
        str(route["name"]),
    )


build = CloudFactory(TYPE, Gce, options=(API,))
