"""For tests of what holds in each of etcd's APIs."""

import pytest

both_apis = pytest.mark.parametrize("api", ["v2", "v3"])

#: For tests that take long: the newer API always, the older one in the long form.
v2_if_long = pytest.mark.parametrize("api", ["v3", pytest.param("v2", marks=pytest.mark.long)])
