"""For tests of what holds in each of etcd's APIs."""

import pytest

both_apis = pytest.mark.parametrize("api", ["v2", "v3"])

#: For what takes a while: v2 in the long form only.
v2_if_long = pytest.mark.parametrize("api", ["v3", pytest.param("v2", marks=pytest.mark.long)])
