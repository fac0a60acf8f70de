"""Options in ``Backend`` that several clouds share (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from flanneld.backends.contract import Option
from flanneld.compat.json import Fields
from flanneld.errors import Fatal

_REMEDY = "correct Backend in the network config"
#: Option that replaces the URL of a cloud's API: for private endpoints.
ENDPOINT = "Endpoint"
#: Option that replaces the URL of a metadata service: for private editions of a cloud.
METADATA = "MetadataEndpoint"
#: Options with an access key. Their fields are the variables that replace them, both as in upstream.
ACCESS_KEY = (Option("AccessKeyID", "ACCESS_KEY_ID", ""), Option("AccessKeySecret", "ACCESS_KEY_SECRET", ""))


def table_option(name: str) -> Option:
    """Return an option that names tables: one, several or none. Its errors are upstream's."""

    def made(value: Any) -> tuple[str, ...]:
        if isinstance(value, str | None):
            return (value,) if value else ()
        if not isinstance(value, list):
            raise Fatal(f"Unexpected {name} type. Must be string or array of strings", _REMEDY)
        if not all(isinstance(each, str) and each for each in value):
            raise Fatal(f"Unexpected type in {name} slice. Must be strings", _REMEDY)
        return tuple(dict.fromkeys(value))

    return Option(name, "tables", (), made=made)


def access_keys(options: Fields, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return id and secret of an access key; None if the SDK must find credentials.

    As in upstream, both come from the environment if one of the options is empty.
    """
    given = [each.of(options) for each in ACCESS_KEY]
    if not all(given):
        given = [environ.get(each.field, "") for each in ACCESS_KEY]
    return (given[0], given[1]) if all(given) else None


def url_option(name: str) -> Option:
    """Return an option that replaces the URL of a server; empty if it does not."""

    def made(url: str) -> str:
        try:
            parts = urlsplit(url)
            is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        except ValueError:
            is_fine = False
        if url and not is_fine:
            remedy = f"{_REMEDY}: https://HOST or https://HOST:PORT"
            raise Fatal(f"Backend.{name} is no URL of a server", remedy)
        return url

    return Option(name, name, "", made=made)


def endpoint(options: Fields, name: str = ENDPOINT) -> str:
    """Return such a URL, or an empty text, for a cloud that declares no options. Raises ``Fatal``."""
    return str(url_option(name).of(options))


TABLES = table_option("RouteTableID")
API, METADATA_API, INSTANCE_API = map(url_option, (ENDPOINT, METADATA, "InstanceEndpoint"))
