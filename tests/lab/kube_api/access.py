"""Who asks, and whether they may: bearer tokens, client certificates and rules as RBAC has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.lab.kube_api import refusals
from tests.lab.kube_api.store import Store

Rules = frozenset[tuple[str, str]]

FLANNEL_USER = "system:serviceaccount:kube-flannel:flannel"
ANONYMOUS = "system:anonymous"
#: Rights by the name of a role; "flannel" has exactly what upstream's ClusterRole grants.
ROLES: dict[str, Rules] = {
    "admin": frozenset({("*", "*")}),
    "flannel": frozenset(
        {
            ("get", "pods"),
            ("get", "nodes"),
            ("list", "nodes"),
            ("watch", "nodes"),
            ("patch", "nodes/status"),
        }
    ),
    "nobody": frozenset(),
}


@dataclass(frozen=True, slots=True)
class User:
    name: str
    rules: Rules

    def may(self, verb: str, resource: str) -> bool:
        return bool({(verb, resource), ("*", "*")} & self.rules)


class Access:
    """Tokens are objects in the store and may change at any time; an open watch outlives its token."""

    def __init__(self, store: Store, anonymous: str = "nobody") -> None:
        self._store = store
        self._anonymous = User(ANONYMOUS, ROLES[anonymous])

    def put(
        self, token: str, name: str, role: str, extra: Sequence[tuple[str, str]], seconds: float | None
    ) -> None:
        """Let in whoever shows this token, for so many seconds or for good."""
        until = None if seconds is None else time.monotonic() + seconds
        rules = sorted(ROLES[role] | {(verb, resource) for verb, resource in extra})
        self._store.put("tokens", token, {"metadata": {}, "name": name, "rules": rules, "until": until})

    def revoke(self, token: str) -> None:
        self._store.delete("tokens", token)

    def user(self, authorization: str | None, certificate: str = "") -> User:
        """The user behind a request; ``certificate`` is the client's common name. Raises ``Refusal``."""
        if authorization is None:
            return User(certificate, ROLES["admin"]) if certificate else self._anonymous
        found = self._store.get("tokens", authorization.removeprefix("Bearer "))
        if found is None or (found["until"] is not None and time.monotonic() >= found["until"]):
            raise refusals.unauthorized()
        return User(found["name"], frozenset((verb, resource) for verb, resource in found["rules"]))
