"""Options in ``Backend`` that several clouds share (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from flanneld.compat.json import Fields
from flanneld.errors import Fatal

_REMEDY = "correct Backend in the network config"
#: Option that replaces the URL of a cloud's API: for private endpoints.
ENDPOINT = "Endpoint"
#: Option that replaces the URL of a metadata service: for private editions of a cloud.
METADATA = "MetadataEndpoint"
#: Options with a secret, and the variables that replace them, both as in upstream.
_KEYS = {"AccessKeyID": "ACCESS_KEY_ID", "AccessKeySecret": "ACCESS_KEY_SECRET"}


def table_ids(options: Fields, name: str) -> tuple[str, ...]:
    """Return the tables in an option: one, several or none. Raises ``Fatal`` as upstream does."""
    value = options.raw(name)
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise Fatal(f"Unexpected {name} type. Must be string or array of strings", _REMEDY)
    if not all(isinstance(each, str) and each for each in value):
        raise Fatal(f"Unexpected type in {name} slice. Must be strings", _REMEDY)
    return tuple(dict.fromkeys(value))


def access_keys(options: Fields, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return id and secret of an access key; None if the SDK must find credentials.

    As in upstream, both come from the environment if one of the options is empty.
    """
    given = [options.string(name, "") for name in _KEYS]
    if not all(given):
        given = [environ.get(variable, "") for variable in _KEYS.values()]
    return (given[0], given[1]) if all(given) else None


def endpoint(options: Fields, name: str = ENDPOINT) -> str:
    """Return the URL that replaces an API's, or an empty text. Raises ``Fatal`` for an invalid URL."""
    url = options.string(name, "")
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_fine = False
    if url and not is_fine:
        raise Fatal(f"Backend.{name} is no URL of a server", f"{_REMEDY}: https://HOST or https://HOST:PORT")
    return url
