"""Traffic control: what its queueing disciplines dropped, and its filters.

Source: linux/rtnetlink.h, linux/pkt_sched.h and linux/gen_stats.h.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice

from flanneld.network.host import HostView
from flanneld.network.rtnetlink.netlink import attributes, unpack

_GETQDISC, _GETFILTER, _TCMSG, _KIND, _STATS, _QUEUE = 38, 46, struct.Struct("=BxxxiIII"), 1, 7, 3
_QUEUE_STATS = struct.Struct("=III")  # length, backlog, drops
#: Disciplines that the kernel chooses by itself.
ORDINARY = frozenset({"noqueue", "pfifo_fast", "fq_codel", "fq", "mq"})
#: Disciplines that pass packets through filters, and the parents of those of either way.
WITH_FILTERS = frozenset({"clsact", "ingress"})
_WAYS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}


def queue_drops(names: Mapping[int, str]) -> Counter[tuple[str, str]]:
    """Return the packets dropped so far, by interface and kind of queueing discipline; none if unreadable.

    Those that a policer, or a filter of tc, drops are counted by the discipline clsact or ingress.
    """
    found: Counter[tuple[str, str]] = Counter()
    for (index, *_), told in _dump(_GETQDISC):
        stats = told.get(_STATS, b"")
        queue = attributes(stats, 0, len(stats)).get(_QUEUE, b"")
        if index in names and len(queue) >= _QUEUE_STATS.size:
            found[names[index], _kind(told)] += _QUEUE_STATS.unpack_from(queue)[2]
    return found


def filters(drops: Iterable[tuple[str, str]], names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield the device and, as tc names it, each filter of the disciplines that drop packets."""
    filtered = {name: kind for name, kind in drops if kind in WITH_FILTERS}
    for index in (index for index, name in names.items() if name in filtered):
        # The discipline ingress tells its filters for either way.
        for way, parent in islice(_WAYS.items(), 1 if filtered[names[index]] == "ingress" else 2):
            # The last number holds the priority. A filter is told with and without its handle.
            found = ((info >> 16, _kind(told)) for (*_, info), told in _dump(_GETFILTER, index, parent))
            for preference, kind in dict.fromkeys(found):
                yield names[index], f"{way} pref {preference} {kind}"


def _dump(
    kind: int, index: int = 0, parent: int = 0
) -> Iterator[tuple[tuple[int, ...], Mapping[int, bytes]]]:
    """Yield index, handle, parent and info of each object, with its attributes; none if unreadable."""
    with suppress(OSError):  # a kernel without traffic control
        for data, offset, end in HostView().dump(kind, _TCMSG.pack(0, index, 0, parent, 0)):
            yield unpack(_TCMSG, data, offset, end)[1:], attributes(data, offset + _TCMSG.size, end)


def _kind(told: Mapping[int, bytes]) -> str:
    return told.get(_KIND, b"").rstrip(b"\0").decode(errors="replace")
