"""Options of the clouds, as upstream reads them."""

from __future__ import annotations

from typing import Any

import pytest

from flanneld.backends.cloud.contract import API, TABLES, access_keys
from flanneld.compat.json import Fields
from flanneld.errors import Fatal

VARIABLES = {"ACCESS_KEY_ID": "id", "ACCESS_KEY_SECRET": "secret"}


@pytest.mark.parametrize(
    ("value", "tables"),
    [(None, ()), ("", ()), ("a", ("a",)), ([], ()), (["a", "b", "a"], ("a", "b"))],
)
def test_tables_are_one_several_or_none(value: Any, tables: tuple[str, ...]) -> None:
    assert TABLES.of(Fields({"routetableid": value})) == tables


@pytest.mark.parametrize("value", [7, True, {}])
def test_tables_of_another_type_are_refused_with_upstreams_words(value: Any) -> None:
    with pytest.raises(Fatal, match=r"^Unexpected RouteTableID type\. Must be string or array of strings"):
        TABLES.of(Fields({"RouteTableID": value}))


@pytest.mark.parametrize("value", [[7], ["a", None], [""]])
def test_a_table_that_is_no_name_is_refused_with_upstreams_words(value: Any) -> None:
    with pytest.raises(Fatal, match=r"^Unexpected type in RouteTableID slice\. Must be strings"):
        TABLES.of(Fields({"RouteTableID": value}))


@pytest.mark.parametrize("url", ["vpc.example.org", "ftp://host", "http://", "http://user@host", "http://["])
def test_an_endpoint_that_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(Fatal, match=r"^Backend\.Endpoint is no URL of a server"):
        API.of(Fields({"Endpoint": url}))


@pytest.mark.parametrize(
    ("options", "variables", "key"),
    [
        ({"AccessKeyID": "a", "AccessKeySecret": "b"}, VARIABLES, ("a", "b")),
        ({"AccessKeyID": "a"}, VARIABLES, ("id", "secret")),
        ({}, VARIABLES, ("id", "secret")),
        ({"AccessKeySecret": "b"}, {"ACCESS_KEY_ID": "id"}, None),
        ({}, {}, None),
    ],
)
def test_an_access_key_is_that_of_the_options_or_of_the_environment_as_a_whole(
    options: dict[str, str], variables: dict[str, str], key: tuple[str, str] | None
) -> None:
    assert access_keys(Fields(options), variables) == key
