"""For tests of what holds in each of etcd's APIs."""

import pytest

both_apis = pytest.mark.parametrize("api", ["v2", "v3"])
