"""The switch: its table of routes over HTTP, and the driver that keeps our part of it right.

GET    /routes               answers {"10.5.7.0/24": {"nextHop": "192.0.2.11"}, ...}
PUT    /routes/10.5.7.0/24   takes {"nextHop": "192.0.2.11"}
DELETE /routes/10.5.7.0/24   answers 404 when there is no such route
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar
from urllib.parse import urlsplit

from flanneld.errors import Fatal, Retryable
from flanneld.model import IPAddress, IPNetwork
from flanneld.network.resources import Key, Kind


@dataclass(frozen=True, slots=True)
class Announcement:
    """A route in the switch."""

    kind: ClassVar[Kind] = Kind.OUTSIDE
    subnet: IPNetwork
    next_hop: IPAddress

    @property
    def key(self) -> Key:
        return (self.kind, self.subnet)

    def __str__(self) -> str:
        return f"switch route {self.subnet} via {self.next_hop}"


class Switch:
    """One switch, asked with a new connection each time. ``timeout`` is in seconds.

    Raises ``Fatal`` for a URL that names no switch.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme != "http" or parts.username or parts.query or parts.fragment:
            raise Fatal("Backend.SwitchURL is no plain http URL", "set it to one like http://192.0.2.1:8080")
        self._path = parts.path.rstrip("/")
        self._timeout = timeout

    def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer, 2xx or 404. Raises ``Retryable`` when there is none of these."""
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, HTTPException) as failure:
            raise Retryable(
                f"the switch does not answer {method} {path} ({failure or type(failure).__name__})",
                "see whether it is up, and whether Backend.SwitchURL is right",
            ) from failure
        finally:
            connection.close()
        if response.status != 404 and not 200 <= response.status < 300:
            raise Retryable(f"the switch answers {method} {path} with {response.status}", "see the switch's log")
        return response.status, content


class SwitchDriver:
    """Ours are the routes whose next hop we are: nobody else announces those."""

    handles: type = Announcement

    def __init__(self, switch: Switch, next_hops: Collection[IPAddress]) -> None:
        self._switch = switch
        self._next_hops = next_hops

    def read(self) -> list[Announcement]:
        status, content = self._switch.ask("GET", "/routes")
        try:
            table = json.loads(content)
        except (ValueError, RecursionError):
            table = None
        # What cannot be read is a failure: taken for an empty table it would be written again for ever.
        if status == 404 or not isinstance(table, dict):
            raise Retryable("GET /routes does not answer a table of routes", "check Backend.SwitchURL")
        found = (_announcement(subnet, route) for subnet, route in table.items())
        return [each for each in found if each is not None and each.next_hop in self._next_hops]

    def put(self, resource: Announcement) -> None:
        status, _ = self._switch.ask("PUT", f"/routes/{resource.subnet}", {"nextHop": str(resource.next_hop)})
        if status == 404:
            raise Retryable("the switch knows no PUT /routes/...", "check Backend.SwitchURL")

    def drop(self, resource: Announcement) -> None:
        self._switch.ask("DELETE", f"/routes/{resource.subnet}")

    def close(self) -> None:
        """Outsiders shall not be sent to a node that nobody looks after."""
        for announcement in self.read():
            self.drop(announcement)


def _announcement(subnet: str, route: Any) -> Announcement | None:
    """None for what others may have written and we cannot read: it is not ours."""
    if not isinstance(route, dict) or not isinstance(route.get("nextHop"), str):
        return None
    try:
        return Announcement(ip_network(subnet), ip_address(route["nextHop"]))
    except ValueError:
        return None
