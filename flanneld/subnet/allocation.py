"""Choice of a free subnet (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator

from flanneld.config import Config, SubnetRange
from flanneld.model import FAMILIES, IPNetwork, Lease, LeaseKey, lies_in, single


def free_subnets(pool: SubnetRange, taken: Iterable[IPNetwork], limit: int = 100) -> list[IPNetwork]:
    """Return the lowest subnets of the range that overlap nothing in ``taken``: at most ``limit``, in order.

    ``taken`` may contain networks of any length and family.
    """
    size = 1 << (pool.network.max_prefixlen - pool.subnet_len)
    end = int(pool.subnet_max) + size
    blocked = sorted(_span(net) for net in taken if net.version == pool.network.version)
    free: list[int] = []
    start = int(pool.subnet_min)
    for first, after in [*blocked, (end, end)]:
        gap = range(start, min(first, end) - size + 1, size)
        free += gap[: limit - len(free)]
        if after > start:
            start = -(-after // size) * size
    network, address = type(pool.network), type(pool.subnet_min)
    return [network((address(base), pool.subnet_len)) for base in free]


def choose(
    pool: SubnetRange,
    taken: Collection[IPNetwork],
    rng: Callable[[int], int],
    avoid: Collection[IPNetwork] = (),
) -> IPNetwork | None:
    """Return one of the hundred lowest free subnets, None if there is none.

    ``rng(n)`` returns a uniform integer from 0 to n-1, like ``random.randrange``, so that hosts choosing at
    the same time rarely collide. Subnets that overlap ``avoid`` are only chosen if no other is free. Networks
    that span the whole range cannot be avoided.
    """
    avoidable = [net for net in avoid if not lies_in(pool.network, net)]
    free = free_subnets(pool, [*taken, *avoidable]) or free_subnets(pool, taken)
    return free[rng(len(free))] if free else None


def unfollowed(config: Config, keys: Collection[LeaseKey]) -> set[IPNetwork]:
    """Return the leased subnets that block no new one, because no node routes to them.

    Each node refuses a subnet around the whole range. One around a lease of the usual lengths loses to it, as
    ``flanneld/reconcile/claims.py`` decides.
    """
    lengths = {pool.family: pool.subnet_len for pool in config.ranges}
    large = {net for key in keys for net in key if net and net.prefixlen < lengths.get(net.version, 0)}
    if not large:
        return large
    usual = [key for key in keys if all(not net or net.prefixlen == lengths.get(net.version) for net in key)]
    found: set[IPNetwork] = set()
    for pool in config.ranges:
        bases = sorted(_span(net)[0] for key in usual for net in key if net and net.version == pool.family)
        for net in large:
            first, after = _span(net)
            place = bisect_left(bases, first)
            is_around_all = first <= int(pool.subnet_min) and int(pool.subnet_max) < after
            is_around_a_lease = place < len(bases) and bases[place] < after
            if net.version == pool.family and (is_around_all or is_around_a_lease):
                found.add(net)
    return found


def public_ips_in(config: Config, leases: Iterable[Lease]) -> Iterator[IPNetwork]:
    """Yield the nodes' public IPs inside the ranges, of which most clusters have none, as networks."""
    spans = [_span(pool.network) for pool in config.ranges]
    for lease in leases:
        for public_ip in lease.attrs.public_ips:
            if any(first <= int(public_ip) < after for first, after in spans):
                yield single(public_ip)


def fits(config: Config, key: LeaseKey) -> bool:
    """Return True if a lease has exactly one subnet in each range of the config."""
    for family, net in zip(FAMILIES, key, strict=True):
        pool = config.range(family)
        if (pool is None) != (net is None) or (pool and net and not pool.contains(net)):
            return False
    return True


def _span(net: IPNetwork) -> tuple[int, int]:
    """Return the first address and the one after the last, as integers."""
    first = int(net.network_address)
    return first, first + (1 << (net.max_prefixlen - net.prefixlen))
