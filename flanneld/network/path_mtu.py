"""Largest packet that a path carries in one piece, found by asking its other end."""

from __future__ import annotations

from collections.abc import Callable

from flanneld.model import Family, IPAddress
from flanneld.network import icmp_echo

#: What every host takes in one piece (RFC 791, RFC 8200).
SMALLEST: dict[Family, int] = {4: 576, 6: 1280}
#: Packets of one size that may be lost before the size counts as too large.
_TRIES = 2
#: Seconds until a packet counts as lost: where a search is asked for, and where it is a look in passing.
_WITHIN, _BRIEFLY = 1.0, 0.3


def carries(target: IPAddress, size: int, within: float = _WITHIN) -> bool:
    """Return True if a packet of ``size`` bytes, IP header included, is answered. Raises ``OSError``."""
    return any(icmp_echo.ask(target, within, size=size) is not None for _ in range(_TRIES))


def largest(low: int, high: int, is_carried: Callable[[int], bool]) -> int | None:
    """Return the largest size from ``low`` to ``high`` that is carried, None if not even ``low`` is (pure).

    What is as it should be takes one question.
    """
    if is_carried(high):
        return high
    if high <= low or not is_carried(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_carried(middle) else (low, middle)
    return low


def glance(target: IPAddress, required: int) -> int | None:
    """Return ``required`` if the path carries that, else a size that it carries; None without an answer."""
    least = min(SMALLEST[target.version], required)
    if icmp_echo.ask(target, _BRIEFLY, size=least) is None:
        return None
    return required if carries(target, required, _BRIEFLY) else least


def find(target: IPAddress, required: int) -> int | None:
    """Return the path MTU to a host, at most ``required``; None if it does not answer. Raises ``OSError``."""
    return largest(min(SMALLEST[target.version], required), required, lambda size: carries(target, size))
