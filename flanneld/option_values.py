"""Parsers for the values of flags: each returns the value of the option, or raises ``Fatal`` (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

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
        if not (_is_http(url) or _is_host_and_port(url) or (not url and any(urls))):
            # A stray comma or slash in a password leaves parts of it in any element.
            name = f"element {number}" if "@" in text else flags.quoted(url)
            raise Fatal(
                f"{source}: {name} is not an http or https URL",
                "give client URLs like http://10.0.0.1:2379, separated by commas",
            )
    return tuple(filter(None, urls))


def servers(text: str, source: str) -> tuple[str, ...]:
    """Read flannel servers, split at commas: ``host:port`` each, an IPv6 address in brackets."""
    servers = tuple(text.split(",")) if text else ()
    for server in servers:
        if not _is_host_and_port(server):
            raise Fatal(
                f"{source}: {flags.quoted(server)} is not host:port",
                "give servers like 10.0.0.1:8888, separated by single commas without spaces",
            )
    return servers


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


def _is_host_and_port(text: str) -> bool:
    if not text.isascii() or not text.isprintable() or any(char in text for char in " /@?#"):
        return False
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


def _is_http(url: str) -> bool:
    if not url.isprintable() or " " in url:  # urlsplit would drop some of these silently
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


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


def margin(minutes: int, source: str) -> int:
    if not 1 <= minutes <= 1439:
        raise Fatal(f"{source} is {minutes} minutes", "a lease lasts a day: give 1 to 1439")
    return minutes


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


def port(number: int, source: str) -> int:
    if number > 65535:
        raise Fatal(f"{source}: there is no port {number}", "give 1 to 65535, or 0 for no health server")
    return number


def own_port(number: int, source: str) -> int:
    if not 0 <= number <= 65535:
        raise Fatal(f"{source}: there is no port {number}", "give 1 to 65535, or 0 for ListenPort")
    return number


def answer_port(number: int, source: str) -> int:
    if not 0 <= number <= 65535:
        raise Fatal(f"{source}: there is no port {number}", "give 1 to 65535, or 0 for no answers")
    return number


def probes(number: int, source: str) -> int:
    if not 0 <= number <= 600:
        raise Fatal(f"{source} is {number} a minute", "give 0 to 600")
    return number


def wait(seconds: int, source: str) -> int:
    if seconds < 0:
        raise Fatal(f"{source} is {seconds} seconds", "give 0 or more")
    return seconds
