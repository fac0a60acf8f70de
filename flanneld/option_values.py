"""Parsers for the values of flags: each returns the value of the option, or raises ``Fatal`` (pure)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from flanneld.compat import flags
from flanneld.compat.flags import compile_re2
from flanneld.errors import Fatal
from flanneld.model import IPAddress

#: Parser of a flag's value; gets the flag's name for error messages. Raises ``Fatal``.
ParseValue = Callable[[Any, str], Any]


def as_it_is(value: Any, _source: str) -> Any:
    return value


def endpoints(text: str, source: str) -> tuple[str, ...]:
    """Read client URLs, split at commas; as in etcd's v3 client, ``host:port`` alone is one, too.

    Drop spaces around them and empty elements: Go flanneld runs with the other endpoints.
    """
    urls = [url.strip(" ") for url in text.split(",")]
    for number, url in enumerate(urls, 1):
        if not (url_parts(url) or (not url and any(urls))):
            # A stray comma or slash in a password leaves parts of it in any element.
            name = f"element {number}" if "@" in text else flags.quoted(url)
            raise Fatal(
                f"{source}: {name} is not an http or https URL",
                "give client URLs like http://10.0.0.1:2379, separated by commas",
            )
    return tuple(filter(None, urls))


class RemoteServer(Struct, frozen=True, gc=False):
    """Flannel server: one element of ``-remote``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        return str(self)


def servers(text: str, source: str) -> tuple[RemoteServer, ...]:
    """Read flannel servers, split at commas: ``host:port`` each, an IPv6 address in brackets."""
    servers = []
    for each in text.split(",") if text else ():
        parts = _host_and_port(each)
        if parts is None:
            raise Fatal(
                f"{source}: {flags.quoted(each)} is not host:port",
                "give servers like 10.0.0.1:8888, separated by single commas without spaces",
            )
        servers.append(RemoteServer(parts.hostname or "", parts.port or 0))
    return tuple(servers)


def is_network_name(text: str) -> bool:
    """Return True if a name is valid as a file name and as a key in the store."""
    return re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,62}", text) is not None


def network_names(text: str, source: str) -> tuple[str, ...]:
    names = tuple(name for each in text.split(",") if (name := each.strip()))
    for name in names:
        if not is_network_name(name):
            raise Fatal(
                f"{source}: {flags.quoted(name)} is no name of a network",
                "give names of letters, digits, _, - and dots, separated by commas",
            )
    return tuple(dict.fromkeys(names))


def url_parts(text: str) -> SplitResult | None:
    """Return the parts of an http or https URL, or of ``host:port`` alone; None for other texts."""
    if not text.isprintable() or " " in text:  # urlsplit would drop some of these silently
        return None
    with suppress(ValueError):
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    return _host_and_port(text)


def _host_and_port(text: str) -> SplitResult | None:
    if text.isascii() and text.isprintable() and not any(char in text for char in " /@?#"):
        with suppress(ValueError):
            parts = urlsplit(f"//{text}")
            if parts.hostname and parts.port:
                return parts
    return None


def _address_of(make: Callable[[str], IPAddress], example: str) -> ParseValue:
    def read(text: str, source: str) -> IPAddress | None:
        if not text:
            return None
        address = None
        if "%" not in text:  # a zone means nothing to other hosts
            with suppress(ValueError):
                address = make(text)
        if address is None:
            raise Fatal(f"{source}: {flags.quoted(text)} cannot be used", f"give an address like {example}")
        return address

    return read


ip = _address_of(ip_address, "192.0.2.1")
ipv4 = _address_of(IPv4Address, "192.0.2.1")
ipv6 = _address_of(IPv6Address, "2001:db8::1")


def patterns(texts: tuple[str, ...], source: str) -> tuple[str, ...]:
    for text in texts:
        try:
            compile_re2(text)
        except Fatal as error:
            raise Fatal(f"{source}: {error.problem}", error.remedy) from error
    return texts


def one_of(*choices: str) -> ParseValue:
    def read(text: str, source: str) -> str:
        if text not in choices:
            raise Fatal(f"{source}: {flags.quoted(text)} is unknown", f"give one of: {', '.join(choices)}")
        return text

    return read


def resync(seconds: int, source: str) -> int:
    """Read a period, at least 1 second: Go flanneld does not pause at all for less."""
    del source
    return max(1, seconds)


def is_host_name(text: str) -> bool:
    """Return True for a DNS name (RFC 1123). Its last label has a letter: no address is one."""
    labels = text.split(".")
    is_name = all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", each) for each in labels)
    return is_name and len(text) <= 253 and not labels[-1].isdecimal()


def host_name(text: str, source: str) -> str:
    if text and not is_host_name(text):
        raise Fatal(f"{source}: {flags.quoted(text)} is no DNS name", "give a name such as home.example.org")
    return text


def _number(lowest: float, highest: float, problem: str, remedy: str) -> ParseValue:
    """Return a reader of numbers within bounds. In a message ``problem`` follows the flag's name."""

    def read(number: int, source: str) -> int:
        if not lowest <= number <= highest:
            raise Fatal(f"{source}{problem.format(number)}", remedy)
        return number

    return read


_NO_PORT = ": there is no port {}"
margin = _number(1, 1439, " is {} minutes", "a lease lasts a day: give 1 to 1439")
wait = _number(0, math.inf, " is {} seconds", "give 0 or more")
probes = _number(0, 600, " is {} a minute", "give 0 to 600")
port = _number(-math.inf, 65535, _NO_PORT, "give 1 to 65535, or 0 for no health server")
own_port = _number(0, 65535, _NO_PORT, "give 1 to 65535, or 0 for ListenPort")
answer_port = _number(0, 65535, _NO_PORT, "give 1 to 65535, or 0 for no answers")
