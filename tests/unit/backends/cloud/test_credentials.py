"""AWS's access keys in variables that upstream reads and botocore does not."""

from __future__ import annotations

import pytest

from flanneld.backends.cloud.aws import _old_names

OLD = {"AWS_ACCESS_KEY": "id", "AWS_SECRET_KEY": "secret"}
KEYS = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}


@pytest.mark.parametrize(
    ("variables", "keys"),
    [
        ({}, {}),
        (OLD, KEYS),
        (OLD | {"AWS_SESSION_TOKEN": "token"}, KEYS | {"aws_session_token": "token"}),
        (OLD | {"AWS_ACCESS_KEY_ID": "botocore's"}, {}),
        ({"AWS_ACCESS_KEY": "id"}, {}),
        ({"AWS_SECRET_KEY": "secret"}, {}),
    ],
)
def test_old_names_count_where_both_are_set_and_the_new_ones_are_not(
    variables: dict[str, str], keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*OLD, "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _old_names() == keys
