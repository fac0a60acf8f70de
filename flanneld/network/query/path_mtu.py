"""Largest packet that a path carries in one piece, found by asking its other end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flanneld.model import Family, IPAddress
from flanneld.network.query.survey import Echo, echoes

#: What every host takes in one piece (RFC 791, RFC 8200).
SMALLEST: dict[Family, int] = {4: 576, 6: 1280}
#: Packets of one size that may be lost before the size counts as too large.
_TRIES = 2
#: Seconds until a packet counts as lost: where a search is asked for, and where it is a look in passing.
_WITHIN, _BRIEFLY = 1.0, 0.3


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


def glance(questions: Sequence[tuple[IPAddress, int]]) -> list[int | None]:
    """Return for each target the wanted size if the path carries that, else a size that it carries.

    None stands for no answer at all. Every packet is sent at most twice. Raises ``OSError``.
    """
    pairs = [
        (Echo(target, min(SMALLEST[target.version], required)), Echo(target, required))
        for target, required in questions
    ]
    asked = {each for pair in pairs for each in pair}
    answered = _answered(asked, _BRIEFLY)
    # A busy node may take long; only what seems to be lost is waited for.
    answered |= _answered(asked - answered, _WITHIN)
    return [next((each.size for each in (full, least) if each in answered), None) for least, full in pairs]


def _answered(asked: Collection[Echo], within: float, tries: int = 1) -> set[Echo]:
    return {question for question, reply in echoes(asked, within, tries).items() if reply.rtt is not None}


def find(target: IPAddress, required: int) -> int | None:
    """Return the path MTU to a host, at most ``required``; None if it does not answer. Raises ``OSError``."""

    def is_carried(size: int) -> bool:
        return bool(_answered([Echo(target, size)], _WITHIN, _TRIES))

    return largest(min(SMALLEST[target.version], required), required, is_carried)
