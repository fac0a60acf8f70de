"""Kubernetes nodes: flannel's annotations, the leases they describe, and patches (pure functions).

Names, values and the prefix rule are those of Go flanneld (pkg/subnet/kube/annotations.go, kube.go), so both
can share a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from sys import intern
from typing import Any, TypedDict

import msgspec
from msgspec import Struct

from flanneld.compat import json as gojson
from flanneld.compat.json import GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal, Refused, Retryable
from flanneld.model import (
    FAMILIES,
    Family,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseAttrs,
    LeaseKey,
    family_of,
    lies_in,
    prefix,
)

DEFAULT_PREFIX = "flannel.alpha.coreos.com"
MANAGED, TYPE = "kube-subnet-manager", "backend-type"
#: Annotations per family: backend data, announced public IP, the operator's override, and the node's own IP.
DATA: Mapping[Family, str] = {4: "backend-data", 6: "backend-v6-data"}
PUBLIC: Mapping[Family, str] = {4: "public-ip", 6: "public-ipv6"}
OVERWRITE: Mapping[Family, str] = {4: "public-ip-overwrite", 6: "public-ipv6-overwrite"}
OWN_PUBLIC: Mapping[Family, str] = {4: "node-public-ip", 6: "node-public-ipv6"}
#: A node's name in a mesh and its endpoints, with a space between them.
ENDPOINTS = "endpoints"
SUFFIXES = (
    MANAGED,
    TYPE,
    ENDPOINTS,
    *(names[family] for names in (DATA, PUBLIC, OVERWRITE, OWN_PUBLIC) for family in (4, 6)),
)

_PREFIX = re.compile(r"(?:[a-z0-9_-]+\.)+[a-z0-9_-]+/(?:[a-z0-9_-]+-)?")
_ADDRESS: Mapping[Family, type[IPAddress]] = {4: IPv4Address, 6: IPv6Address}
_NO_DIGITS = str.maketrans("", "", "-:TZ")
#: podCIDRs of a node, at most: one of each family.
_MOST_CIDRS = 2


_Metadata = TypedDict(
    "_Metadata",
    {
        "name": Any,
        "uid": Any,
        "creationTimestamp": Any,
        "annotations": Any,
        "resourceVersion": Any,
        "continue": Any,
    },
    total=False,
)


class _Spec(TypedDict, total=False):
    podCIDR: Any
    podCIDRs: Any
    nodeName: Any


class _Object(TypedDict, total=False):
    """The fields that are read of a node, pod or Status."""

    metadata: _Metadata | None
    spec: _Spec | None
    code: Any
    message: Any


class _Answer(_Object, total=False):
    """An object, a list of objects, or a watch event."""

    items: list[_Object] | None
    type: Any
    object: _Object


_DECODER = msgspec.json.Decoder(_Answer)


class KubeNode(Struct, frozen=True, gc=False, rename={"cidrs": "podCIDRs", "notes": "annotations"}):
    """The fields of a node that are used.

    ``notes`` maps annotation names, without their prefix, to values. ``created`` orders nodes by their
    creation, 0 if it is unknown.
    """

    name: str
    uid: str
    cidrs: tuple[str, ...]
    notes: Mapping[str, str]
    created: int = 0

    @property
    def is_managed(self) -> bool:
        return self.notes.get(MANAGED) == "true"


def full_prefix(text: str) -> str:
    """Return the annotation prefix: ``example.org/``, or ``example.org/one-`` for ``example.org/one``.

    Raises ``Fatal`` for a prefix that Go flanneld refuses.
    """
    prefix = text if "/" in text else f"{text}/"
    if not prefix.endswith(("/", "-")):
        prefix += "-"
    if text.count("/") > 1 or not _PREFIX.fullmatch(prefix):
        raise Fatal(
            f"-kube-annotation-prefix: {gojson.compact(text[:80])} cannot be used",
            f"give a domain in lower case, with one slash at most: {DEFAULT_PREFIX} or example.org/one",
        )
    return prefix


def decoded(text: bytes) -> Any:
    """Decode the used fields of the API's JSON.

    Skipping the rest saves most of the time, above all for status.

    Raises ``ValueError`` or ``RecursionError``.
    """
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # an unexpected shape: keep it all for the reader to judge


class NodeReader:
    """Parser of nodes in the API's JSON. Any field may be missing or null."""

    def __init__(self, prefix: str) -> None:
        self._names = {f"{prefix}{suffix}": suffix for suffix in SUFFIXES}
        self._full = {suffix: name for name, suffix in self._names.items()}

    def read(self, obj: Any) -> KubeNode:
        """Return the node in ``obj``. Raises ``Refused`` if it has no name."""
        meta = child(obj, "metadata")
        name = meta.get("name")
        if not isinstance(name, str) or not name:
            raise Refused("the API server sent a node without a name", "is that a Kubernetes API server?")
        notes = {
            suffix: value
            for key, value in child(meta, "annotations").items()
            if (suffix := self._names.get(key)) and isinstance(value, str)
        }
        created = _order(meta.get("creationTimestamp"))
        return KubeNode(name, str(meta.get("uid", "")), _cidrs(child(obj, "spec")), notes, created)

    def patch(self, changes: Mapping[str, str]) -> str:
        """Return the strategic-merge patch that sets these annotations.

        It equals Go flanneld's byte for byte.
        """
        annotations = {self._full[suffix]: changes[suffix] for suffix in changes}
        return gojson.compact({"metadata": {"annotations": dict(sorted(annotations.items()))}})


def child(parent: Any, name: str) -> dict[str, Any]:
    """Return the object in a field; an empty one if it is missing or of another type."""
    value = parent.get(name) if isinstance(parent, dict) else None
    return value if isinstance(value, dict) else {}


def items(listing: Any) -> list[Any]:
    """Return the items of a list; none if the field is missing or of another type."""
    found = listing.get("items") if isinstance(listing, dict) else None
    return found if isinstance(found, list) else []


def _order(timestamp: object) -> int:
    """Return the digits of a time such as 2026-01-31T23:59:59Z as a number, which grows with it; else 0."""
    digits = timestamp.translate(_NO_DIGITS) if isinstance(timestamp, str) and len(timestamp) == 20 else ""
    return int(digits) if len(digits) == 14 and digits.isdecimal() else 0


def _cidrs(spec: Mapping[str, Any]) -> tuple[str, ...]:
    several = spec.get("podCIDRs")
    found = several if isinstance(several, list) and several else [spec.get("podCIDR")]
    return tuple(text for text in found if isinstance(text, str) and text)


# ---- leases --------------------------------------------------------------------------------------


def key_of(node: KubeNode, config: Config) -> LeaseKey:
    """Return a node's subnets of the network's families. Raises ``Refused``."""
    if len(node.cidrs) > _MOST_CIDRS:
        raise _wrong(node, f"has {len(node.cidrs)} podCIDRs", "give it one, or one of each family")
    found: dict[int, IPNetwork] = {}
    for text in node.cidrs:
        net = _network(node, text)
        pool = config.range(family_of(net))
        if pool is None:
            continue
        if net.version in found:
            raise _wrong(node, "has two podCIDRs of one family", "give it one, or one of each family")
        if not lies_in(net, pool.network):
            raise _wrong(
                node,
                f"has the podCIDR {net}, which is outside Network {pool.network}",
                "make the network config and kube-controller-manager's --cluster-cidr agree",
            )
        found[net.version] = net
    subnet, ipv6_subnet = found.get(4), found.get(6)
    assert not isinstance(subnet, IPv6Network)
    assert not isinstance(ipv6_subnet, IPv4Network)
    return (subnet, ipv6_subnet)


def own_key(node: KubeNode, config: Config) -> LeaseKey:
    """Return our own subnets, one for each family. Raises ``Retryable`` if one is missing or invalid."""
    try:
        key = key_of(node, config)
    except Refused as reason:
        raise Retryable(reason.problem, reason.remedy) from None
    missing = [family for family, net in zip(FAMILIES, key, strict=True) if net is None]
    lacking = [
        f"IPv{family} " * (len(config.families) > 1) for family in missing if family in config.families
    ]
    if lacking:
        raise Retryable(
            f"node {node.name} has no {lacking[0]}podCIDR yet",
            "see that kube-controller-manager runs with --allocate-node-cidrs and --cluster-cidr,"
            " or set spec.podCIDR",
        )
    return key


def lease_of(node: KubeNode, config: Config) -> Lease:
    """Return a peer's lease, for the families it has a podCIDR and a public IP of. Raises ``Refused``."""
    key = key_of(node, config)
    attrs = announced(node, config)
    subnet, ipv6_subnet = key[0] if attrs.public_ip else None, key[1] if attrs.public_ipv6 else None
    if subnet is None and ipv6_subnet is None:
        raise _wrong(node, "has no podCIDR with a public IP of its family", "restart flanneld on it")
    return Lease(attrs, subnet, ipv6_subnet, created=node.created, node=node.name)


def announced(node: KubeNode, config: Config) -> LeaseAttrs:
    """Return the attributes in a node's annotations, for the network's families. Raises ``Refused``."""
    public: dict[Family, IPAddress | None] = {4: None, 6: None}
    data: dict[Family, Any] = {4: None, 6: None}
    for family in config.families:
        public[family] = _public_ip(node, PUBLIC[family], family)
        data[family] = _data(node, DATA[family])
    return LeaseAttrs(
        public[4] if isinstance(public[4], IPv4Address) else None,
        public[6] if isinstance(public[6], IPv6Address) else None,
        intern(node.notes.get(TYPE, "")),
        data[4],
        data[6],
    )


def own_public_ip(node: KubeNode, family: Family) -> IPAddress | None:
    """Return the public IP that the operator set for this node, or None. Raises ``Refused``."""
    return _public_ip(node, OWN_PUBLIC[family], family)


def overwrite(node: KubeNode, family: Family) -> IPAddress | None:
    """Return the address the operator wants announced in place of our own, or None. Raises ``Refused``."""
    return _public_ip(node, OVERWRITE[family], family)


def wanted_notes(attrs: LeaseAttrs, node: KubeNode) -> dict[str, str]:
    """Return the annotations that announce our attributes. An invalid public IP override is ignored."""
    notes = {MANAGED: "true", TYPE: attrs.backend_type}
    for family in FAMILIES:
        public = attrs.public(family)
        if public is None:
            continue
        with suppress(Refused):
            public = overwrite(node, family) or public
        notes[PUBLIC[family]] = str(public)
        notes[DATA[family]] = gojson.compact(attrs.data(family))
    return notes


def changed_notes(attrs: LeaseAttrs, node: KubeNode) -> dict[str, str]:
    """Return the desired annotations that differ from the node's."""
    return {name: text for name, text in wanted_notes(attrs, node).items() if node.notes.get(name) != text}


def _public_ip(node: KubeNode, name: str, family: Family) -> IPAddress | None:
    text = node.notes.get(name, "")
    if not text:
        return None
    try:
        address = _ADDRESS[family](text.replace("%", "/"))  # a zone identifier is meaningless to other nodes
    except ValueError:
        problem = f"has {gojson.compact(text[:60])} in its annotation {name}, which is no IPv{family} address"
        raise _wrong(node, problem, "correct it, or restart flanneld there") from None
    return address if int(address) else None


def _data(node: KubeNode, name: str) -> Any:
    text = node.notes.get(name, "")
    if not text or text == "null":
        return None
    try:
        return gojson.parse(text)
    except GoJsonError as error:
        raise _wrong(
            node, f"has no JSON in its annotation {name}: {error}", "restart flanneld there"
        ) from None


def _network(node: KubeNode, text: str) -> IPNetwork:
    try:
        length = int(text.partition("/")[2])  # refuses netmasks and a missing length
        net = prefix(ip_network(text, strict=False))
    except ValueError:
        problem = f"has the podCIDR {gojson.compact(text[:60])}, which is no network"
        raise _wrong(node, problem, "correct it") from None
    if not 0 < length < net.max_prefixlen:
        raise _wrong(node, f"has the podCIDR {net}, which is no subnet", "correct it")
    return net


def _wrong(node: KubeNode, problem: str, remedy: str) -> Refused:
    return Refused(f"node {node.name} {problem}", remedy)
