"""From a request to its answer: who asks, what for, may they, and what comes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.lab.kube_api import nodes, refusals
from tests.lab.kube_api.access import ROLES, Access, User
from tests.lab.kube_api.lists import node_list
from tests.lab.kube_api.patches import merge, strategic_merge
from tests.lab.kube_api.store import Store, dump
from tests.lab.kube_api.watch import BOOKMARK_INTERVAL, NODE, Watch

JSON = "application/json"
PLAIN = "text/plain; charset=utf-8"
STRATEGIC, MERGE = "application/strategic-merge-patch+json", "application/merge-patch+json"
_PATH = re.compile(
    r"/api/v1(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_METHODS = {
    ("nodes", False): ("GET", "POST"),
    ("nodes", True): ("GET", "PUT", "PATCH", "DELETE"),
    ("pods", True): ("GET",),
    ("events", False): ("POST",),
}
VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "98b35193b2ac7a23a673325f5e9b830ecd5ba406",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "go1.27.3",
    "compiler": "gc",
    "platform": "linux/amd64",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What came over the wire; header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    certificate: str = ""  # the common name in the client's

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))


@dataclass(frozen=True, slots=True)
class Subject:
    """What a request is about, in RBAC's words; ``resource`` is empty for a path that is no resource."""

    verb: str
    resource: str = ""
    name: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``body`` in pieces; or a watch, whose lines go out as they come."""

    status: int
    body: Iterable[bytes] = ()
    watch: Watch | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": JSON})


def subject(request: Request) -> Subject:
    """Read method and path as the server does before it asks who may."""
    found = _PATH.fullmatch(request.path)
    if found is None:
        return Subject(request.method.lower())
    name = found["name"] or ""
    verb = _VERBS.get(request.method, "get" if name else "list")
    if verb == "list" and request.query.get("watch") in ("true", "1"):
        verb = "watch"
    resource = found["kind"] + (f"/{found['sub']}" if found["sub"] else "")
    return Subject(verb, resource, name, found["namespace"] or "")


def refused(refusal: refusals.Refusal) -> Answer:
    """The answer that says so; the one about representations is indented, and has no line end."""
    headers = {"Content-Type": JSON}
    if refusal.code == 403:
        headers["X-Content-Type-Options"] = "nosniff"
    if after := refusal.retry_after():
        headers["Retry-After"] = str(after)
    if refusal.code == 406:
        return Answer(406, [json.dumps(refusal.status(), indent=2).encode()])
    return Answer(refusal.code, [dump(refusal.status()) + b"\n"], headers=headers)


class Api:
    """The server without its wire."""

    def __init__(self, store: Store, access: Access) -> None:
        self.store = store
        self.access = access
        self.bookmark_interval = BOOKMARK_INTERVAL
        self.patience = 3.0  # seconds for a version that is yet to come

    def user(self, request: Request) -> User:
        return self.access.user(request.headers.get("authorization"), request.certificate)

    def answer(self, request: Request) -> Answer:
        """Answer, or raise ``Refusal``."""
        user, about = self.user(request), subject(request)
        if not about.resource:
            return self._beside(request, user)
        if not user.may(about.verb, about.resource):
            raise refusals.forbidden(user.name, about.verb, about.resource, about.name, about.namespace)
        _check(request, about)
        if about.verb == "list":
            return Answer(200, node_list(self.store, request.query, self.patience))
        if about.verb == "watch":
            watch = Watch(self.store, request.query, self.bookmark_interval, self.patience)
            return Answer(200, watch=watch)
        kind = about.resource.partition("/")[0]
        if kind == "events":
            return self._create_event(about.namespace, _decoded(request.body))
        if about.verb == "create":
            return self._create_node(_decoded(request.body))
        name = about.name if kind == "nodes" else f"{about.namespace}/{about.name}"
        if about.verb == "delete":
            return self.delete_node(name)
        return self._one(kind, name, request, about)

    def _beside(self, request: Request, user: User) -> Answer:
        """The paths that are no resources."""
        if request.path in ("/healthz", "/readyz", "/livez"):
            headers = {"Content-Type": PLAIN, "X-Content-Type-Options": "nosniff"}
            return Answer(200, [b"ok"], headers=headers)
        if request.path == "/version":
            return Answer(200, [json.dumps(VERSION, indent=2).encode()])
        if user.rules != ROLES["admin"] and request.path != "/api":
            message = f'forbidden: User "{user.name}" cannot {request.method.lower()} path "{request.path}"'
            raise refusals.Refusal(403, "Forbidden", message, {})
        if request.path != "/api":
            raise refusals.no_such_path()
        address = {"clientCIDR": "0.0.0.0/0", "serverAddress": request.headers.get("host", "")}
        found = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [address]}
        return Answer(200, [dump(found) + b"\n"])

    def _one(self, kind: str, name: str, request: Request, about: Subject) -> Answer:
        with self.store.lock:
            old = self.store.get(kind, name)
            if old is None:
                raise refusals.not_found(kind, about.name)
            if about.verb == "get":
                return _object(dump(old), kind)
            new = _patched(old, request) if about.verb == "patch" else _decoded(request.body)
            version = (new.get("metadata") or {}).get("resourceVersion")
            if version and version != old["metadata"]["resourceVersion"]:
                raise refusals.conflict(kind, about.name)
            kept = nodes.changed(old, new, about.resource.partition("/")[2])
            if "deletionTimestamp" in kept["metadata"] and "finalizers" not in kept["metadata"]:
                self.store.delete(kind, name)
                return _object(dump(kept), kind)
            return _object(self.store.put(kind, name, kept), kind)

    def _create_node(self, node: dict[str, Any]) -> Answer:
        name = str((node.get("metadata") or {}).get("name", ""))
        nodes.check_patch(node)
        new = nodes.new_node(node)
        nodes.check(new)
        with self.store.lock:
            if self.store.get("nodes", name) is not None:
                raise refusals.already_exists("nodes", name)
            return _object(self.store.put("nodes", name, new), "nodes", 201)

    def delete_node(self, name: str) -> Answer:
        """Delete a node, or only mark it when a finalizer holds it."""
        with self.store.lock:
            old = self.store.get("nodes", name)
            if old is None:
                raise refusals.not_found("nodes", name)
            if old["metadata"].get("finalizers"):
                old["metadata"].setdefault("deletionTimestamp", nodes.now())
                return _object(self.store.put("nodes", name, nodes.shaped(old)), "nodes")
            self.store.delete("nodes", name)
        details = {"name": name, "kind": "nodes", "uid": old["metadata"]["uid"]}
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return Answer(200, [dump(done) + b"\n"])

    def _create_event(self, namespace: str, event: dict[str, Any]) -> Answer:
        """Keep an event. One about a node, which has no namespace, belongs into "default"."""
        metadata = nodes.born(event.get("metadata") or {}) | {"namespace": namespace}
        name = metadata.get("name") or f"{metadata.get('generateName', '')}{metadata['uid'][:5]}"
        about = (event.get("involvedObject") or {}).get("namespace", "")
        if about != namespace and not (about == "" and namespace == "default"):
            problem = f'Invalid value: "{about}": does not match event.namespace'
            cause = ("FieldValueInvalid", problem, "involvedObject.namespace")
            raise refusals.invalid("Event", name, [cause])
        key = f"{namespace}/{name}"
        with self.store.lock:
            if self.store.get("events", key) is not None:
                raise refusals.already_exists("events", name)
            item = self.store.put("events", key, event | {"metadata": metadata | {"name": name}})
        return _object(item, "events", 201)


def _check(request: Request, about: Subject) -> None:
    """Refuse what the server does not serve: resources, methods and representations."""
    methods = _METHODS.get((about.resource.partition("/")[0], bool(about.name)))
    if methods is None or about.resource not in ("nodes", "nodes/status", "pods", "events"):
        raise refusals.no_such_path()
    if request.method not in methods:
        raise refusals.method_not_allowed()
    accepted = request.headers.get("accept", "*/*")
    if not any(kind in accepted for kind in (JSON, "*/*", "application/*")):
        raise refusals.not_acceptable()


def _patched(old: Mapping[str, Any], request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind not in (STRATEGIC, MERGE):
        raise refusals.unsupported_media_type()
    patch = _decoded(request.body)
    nodes.check_patch(patch)
    try:
        patched = merge(old, patch) if kind == MERGE else strategic_merge(old, patch)
    except ValueError as error:
        raise refusals.Refusal(500, "", str(error)) from None
    assert isinstance(patched, dict)
    return patched


def _decoded(body: bytes) -> dict[str, Any]:
    """A JSON object; the messages are those of Go's encoding/json for the two usual mistakes."""
    try:
        value = json.loads(body)
    except ValueError:
        raise refusals.bad_request("unexpected end of JSON input") from None
    if not isinstance(value, dict):
        kind = "array" if isinstance(value, list) else "string" if isinstance(value, str) else "number"
        raise refusals.bad_request(
            f"json: cannot unmarshal {kind} into Go value of type map[string]interface {{}}"
        )
    return value


def _object(item: bytes, kind: str, status: int = 200) -> Answer:
    head = NODE if kind == "nodes" else b'{"kind":"%b","apiVersion":"v1",' % kind[:-1].capitalize().encode()
    return Answer(status, [head + item[1:] + b"\n"])


def lines_of(answer: Answer) -> Iterator[list[bytes]]:
    """The batches of a watch, or the whole body in one."""
    if answer.watch is not None:
        yield from answer.watch
    else:
        yield list(answer.body)
