"""What tests ask of etcd's v3 API, told as v2 tells it: a node has a ``value``, and a ``ttl`` if it ends."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

#: Posts an object to a path below the gateway's root and returns the one that comes back.
Post = Callable[[str, Mapping[str, Any]], dict[str, Any]]


class V3Keys:
    """The keys of an etcd, as an operator with ``etcdctl`` sees and changes them."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def put(self, key: str, value: str | bytes, ttl: int | None = None, lease: str = "0") -> int:
        """Write a key, with a lease of its own if it has a TTL in seconds; return its revision."""
        if ttl is not None:
            lease = self.grant(ttl)
        data = value.encode() if isinstance(value, str) else value
        put = {"key": coded(key), "value": b64encode(data).decode(), "lease": lease}
        return int(self._post("/kv/put", put)["header"]["revision"])

    def put_often(self, key: str, times: int, value: str = "x") -> None:
        for _ in range(times):
            self.put(key, value)

    def put_all(self, values: Mapping[str, str]) -> int:
        """Write several keys in one transaction."""
        puts = [{"request_put": {"key": coded(key), "value": coded(value)}} for key, value in values.items()]
        return int(self._post("/kv/txn", {"success": puts})["header"]["revision"])

    def get(self, key: str) -> dict[str, Any] | None:
        nodes = self._range({"key": coded(key)})
        return self._with_ttl(nodes[0]) if nodes else None

    def children(self, key: str) -> list[dict[str, Any]]:
        """All keys below a path, without their TTL."""
        return self._range(below(key))

    def delete(self, key: str) -> None:
        """Delete a key and all below it, in one transaction."""
        deletions = [{"request_delete_range": each} for each in ({"key": coded(key)}, below(key))]
        self._post("/kv/txn", {"success": deletions})

    def delete_span(self, first: str, end: str) -> None:
        """Delete all keys from the first on and before the end, in one transaction."""
        self._post("/kv/deleterange", {"key": coded(first), "range_end": coded(end)})

    def grant(self, ttl: int) -> str:
        return str(self._post("/lease/grant", {"TTL": str(ttl)})["ID"])

    def revoke(self, lease: str) -> None:
        self._post("/kv/lease/revoke", {"ID": lease})

    def leases(self) -> list[str]:
        """The IDs of all leases, also of those that no key hangs on."""
        return [each["ID"] for each in self._post("/kv/lease/leases", {}).get("leases", [])]

    def compact(self) -> None:
        """Forget all of the history."""
        revision = self._post("/kv/range", {"key": coded("x")})["header"]["revision"]
        self._post("/kv/compaction", {"revision": revision, "physical": True})

    def read_at(self, key: str, revision: int) -> None:
        """Read a key as it was; etcd refuses if it has forgotten."""
        self._post("/kv/range", {"key": coded(key), "revision": str(revision)})

    def require_login(self, user: str, password: str, prefix: str, writable: str = "/subnets") -> None:
        """Let in root, with the same password, and a user with no more rights than a daemon needs."""
        for name in ("root", user):
            self._post("/auth/user/add", {"name": name, "password": password})
        for role in ("root", "daemon"):
            self._post("/auth/role/add", {"name": role})
        for path, kind in ((prefix, "READ"), (prefix + writable, "READWRITE")):
            permission = {"permType": kind, **below(path)}
            self._post("/auth/role/grant", {"name": "daemon", "perm": permission})
        self._post("/auth/user/grant", {"user": "root", "role": "root"})
        self._post("/auth/user/grant", {"user": user, "role": "daemon"})
        self._post("/auth/enable", {})

    def token(self, user: str, password: str) -> str:
        return str(self._post("/auth/authenticate", {"name": user, "password": password})["token"])

    def _range(self, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "key": b64decode(kv["key"]).decode(),
                "value": b64decode(kv.get("value", "")).decode(errors="replace"),
                "modifiedIndex": int(kv["mod_revision"]),
                "lease": kv.get("lease", "0"),
            }
            for kv in self._post("/kv/range", wanted).get("kvs", [])
        ]

    def _with_ttl(self, node: dict[str, Any]) -> dict[str, Any]:
        if node["lease"] == "0":
            return node
        return node | {"ttl": int(self._post("/kv/lease/timetolive", {"ID": node["lease"]})["TTL"])}


def coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def below(key: str) -> dict[str, str]:
    return {"key": coded(f"{key}/"), "range_end": coded(f"{key}0")}
