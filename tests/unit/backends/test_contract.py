"""The optional parts of a backend, and what a ``Host`` gives."""

from __future__ import annotations

import pytest

from flanneld.backends.contract import ExitPolicy, Host, exit_policy
from flanneld.backends.host_gw import HostGw
from flanneld.model import Uplink
from tests.unit.backends.test_host_gw import made, nothing


def test_resources_stay_at_exit_unless_the_backend_declares_otherwise() -> None:
    class Announcing(HostGw):
        exit_policy = ExitPolicy.REMOVE

    assert exit_policy(made()) is ExitPolicy.KEEP
    assert exit_policy(made(kind=Announcing)) is ExitPolicy.REMOVE


def test_a_host_made_from_plain_values_says_that_it_lacks_a_service() -> None:
    host = Host(Uplink("eth0", 2, 1500), None, nothing, nothing, bytes)
    with pytest.raises(NotImplementedError, match="without that service"):
        host.secret("wgkey")
