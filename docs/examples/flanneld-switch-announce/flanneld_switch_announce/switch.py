"""Client of the switch's route table over HTTP, and the reconciler table of our routes in it.

GET    /routes               answers {"10.5.7.0/24": {"nextHop": "192.0.2.11"}, ...}
PUT    /routes/10.5.7.0/24   takes {"nextHop": "192.0.2.11"}
DELETE /routes/10.5.7.0/24   answers 404 when there is no such route
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar
from urllib.parse import urlsplit

from flanneld.errors import Fatal, Retryable
from flanneld.model import IPAddress, IPNetwork
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest
from flanneld.state.resources import Key, Kind, Resource
from flanneld.state.table import Failure, Put, Report, Scope, Seen


@dataclass(frozen=True, slots=True)
class Announcement:
    """Route in the switch."""

    kind: ClassVar[Kind] = Kind.REMOTE
    subnet: IPNetwork
    next_hop: IPAddress

    @property
    def key(self) -> Key:
        return (SwitchTable.name, str(self.subnet))

    def __str__(self) -> str:
        return f"switch route {self.subnet} via {self.next_hop}"


class Switch:
    """Client of one switch through ``Host.http``. ``timeout`` is in seconds.

    Raises ``Fatal`` for a URL that names no switch.
    """

    def __init__(self, url: str, timeout: float, http: Callable[[HttpRequest], HttpAnswer]) -> None:
        try:
            parts = urlsplit(url)
            is_plain = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_plain = False
        if not is_plain or parts.username or parts.query or parts.fragment:
            raise Fatal("Backend.SwitchURL is no plain http URL", "set it to one like http://192.0.2.1:8080")
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._http = http

    def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> bytes | None:
        """Return the answer; None for 404. Raises ``Retryable`` for no answer or another refusal."""
        request = HttpRequest(
            method,
            self._url + path,
            {"Content-Type": "application/json"},
            None if body is None else json.dumps(body).encode(),
            timeout=self._timeout,
            at_exit=True,  # announcements are withdrawn at the exit
        )
        answer = self._http(request)
        if answer.status == 404:
            return None
        if not 200 <= answer.status < 300:
            raise Retryable(
                f"the switch answers {method} {path} with {answer.status}", "see the switch's log"
            )
        return answer.body


class SwitchTable:
    """Table of the switch's routes with this node as next hop, which no other node announces.

    It has a thread of its own, because a silent switch must not block the kernel's tables.
    """

    name = "switch"
    what = "the routes in the switch"
    worker = "switch"
    vital = False
    needs: frozenset[str] = frozenset()
    audit: float | None = 30.0

    def __init__(self, switch: Switch, next_hops: Collection[IPAddress]) -> None:
        self._switch = switch
        self._next_hops = next_hops

    def read(self, scope: Scope) -> list[Seen]:
        """Return this node's announcements. A malformed answer is a failure, and no empty table."""
        del scope
        try:
            table = json.loads(self._switch.ask("GET", "/routes") or b"")
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise Retryable("the switch answers GET /routes without a table", "check Backend.SwitchURL")
        found = (_announcement(subnet, route) for subnet, route in table.items())
        return [Seen(each) for each in found if each is not None and each.next_hop in self._next_hops]

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for want in (put.want for put in puts if isinstance(put.want, Announcement)):
            answer = self._switch.ask("PUT", f"/routes/{want.subnet}", {"nextHop": str(want.next_hop)})
            if answer is None:
                report.failed.append(Failure(want, "the switch has no place for routes"))
            else:
                report.made.append(want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        for announcement in found:
            assert isinstance(announcement, Announcement)
            self._switch.ask("DELETE", f"/routes/{announcement.subnet}")
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Withdraw the announcements if the backend's exit policy is to remove them."""
        if remove:
            self.drop([seen.resource for seen in self.read(Scope({}))])


def _announcement(subnet: str, route: Any) -> Announcement | None:
    """Parse a route of the switch; None for a malformed one, which another program wrote."""
    if not isinstance(route, dict) or not isinstance(route.get("nextHop"), str):
        return None
    try:
        return Announcement(ip_network(subnet), ip_address(route["nextHop"]))
    except ValueError:
        return None
