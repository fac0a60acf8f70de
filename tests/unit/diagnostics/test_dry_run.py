"""The lease that a dry run foresees is the one that a start gets."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.diagnostics.plan import Forecast
from flanneld.model import Lease, LeaseAttrs, LeaseKey
from flanneld.subnet.codec import format_attrs, format_key
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions
from flanneld.subnet.store import LocalFacts, Store
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import LocalEtcd

NOTHING: LeaseKey = (None, None)
WHOLE: LeaseKey = (IPv4Network("10.3.0.0/16"), None)


def subnet(number: int) -> LeaseKey:
    return (IPv4Network(f"10.3.{number}.0/24"), None)


def node(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None, "host-gw")


def opened(etcd: LocalEtcd, prefix: str) -> Store:
    return open_etcd(EtcdOptions((etcd.url,), prefix), "v3")


@pytest.mark.parametrize(
    ("leases", "previous", "written", "expected"),
    [
        ({5: 1, 6: 2}, NOTHING, None, subnet(5)),
        ({5: 1, 7: 1, 6: 2}, subnet(7), None, subnet(7)),
        ({9: 1, 5: 1, 7: 1}, NOTHING, None, subnet(5)),
        ({5: 9, 7: 1}, NOTHING, Lease(node(9), *subnet(5)), subnet(5)),
        ({5: 9, 3: 1}, NOTHING, Lease(node(9), *subnet(5)), subnet(5)),
        ({5: 9, 3: 1}, subnet(3), Lease(node(9), *subnet(5)), subnet(3)),
        ({5: 2}, subnet(6), None, subnet(6)),
        ({5: 9, 6: 2}, subnet(8), Lease(node(8), *subnet(5)), subnet(8)),
        ({WHOLE: 2}, subnet(6), None, subnet(6)),
    ],
    ids=[
        "our address",
        "the previous of two",
        "the lowest of three",
        "proven under another address",
        "proven before our address",
        "previous before proven",
        "free and previous",
        "written by another node since",
        "free inside a lease of the whole network",
    ],
)
def test_the_forecast_of_a_lease_is_what_a_start_acquires(
    etcd: LocalEtcd,
    keys: V3Keys,
    request: pytest.FixtureRequest,
    leases: dict[int | LeaseKey, int],
    previous: LeaseKey,
    written: Lease | None,
    expected: LeaseKey,
) -> None:
    prefix = f"/forecast/{request.node.callspec.id.replace(' ', '-')}"
    keys.put(f"{prefix}/config", '{"Network": "10.3.0.0/16", "Backend": {"Type": "host-gw"}}')
    for number, holder in leases.items():
        key = subnet(number) if isinstance(number, int) else number
        keys.put(f"{prefix}/subnets/{format_key(key)}", format_attrs(node(holder), with_ipv6=False))
    local = LocalFacts(written)

    foreseeing = opened(etcd, prefix)
    forecast = Forecast(foreseeing)
    config = foreseeing.network_config()
    foreseen = forecast.acquire(config, node(1), previous, local)
    starting = opened(etcd, prefix)
    acquired = starting.acquire(config, node(1), previous, local)
    starting.close()

    assert (foreseen.key, acquired.key) == (expected, expected)
    assert forecast.has_lease == any(lease.key == expected for lease in forecast.leases.leases)
    assert len(forecast.leases.leases) == len(leases)
