"""Who asks, and whether they may: bearer tokens, client certificates and rules as RBAC has them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.lab.kube_api import refusals

Rules = frozenset[tuple[str, str]]

#: Exactly what upstream's ClusterRole grants.
FLANNEL: Rules = frozenset(
    {
        ("get", "pods"),
        ("get", "nodes"),
        ("list", "nodes"),
        ("watch", "nodes"),
        ("patch", "nodes/status"),
    }
)
EVERYTHING: Rules = frozenset({("*", "*")})
NOTHING: Rules = frozenset()
FLANNEL_USER = "system:serviceaccount:kube-flannel:flannel"
ANONYMOUS = "system:anonymous"


@dataclass(frozen=True, slots=True)
class User:
    """``until`` is a time of ``time.monotonic()``; afterwards the token is good for nothing."""

    name: str
    rules: Rules
    until: float = float("inf")

    def may(self, verb: str, resource: str) -> bool:
        return bool({(verb, resource), ("*", "*")} & self.rules)


class Access:
    """The table of tokens, to be changed at any time; an open watch outlives its token, as it really does."""

    def __init__(self, anonymous: Rules = NOTHING) -> None:
        self.tokens: dict[str, User] = {}
        self.anonymous = User(ANONYMOUS, anonymous)

    def user(self, authorization: str | None, certificate: str = "") -> User:
        """The user behind a request; ``certificate`` is the common name of the client's. Raises ``Refusal``."""
        if authorization is None:
            return User(certificate, EVERYTHING) if certificate else self.anonymous
        user = self.tokens.get(authorization.removeprefix("Bearer "))
        if user is None or time.monotonic() >= user.until:
            raise refusals.unauthorized()
        return user
