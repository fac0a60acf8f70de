"""Traces of an ipsec backend on this host. Most hosts have none, and load none of its modules."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from flanneld.network.rtnetlink.netlink import NetlinkSocket

#: linux/netlink.h
NETLINK_XFRM = 6
#: linux/xfrm.h, XFRM_MSG_GETPOLICY
GET_POLICY = 0x15
#: charon refuses to start while a process with the pid in this file lives, of any program. The path is fixed.
CHARON_PID_FILE = Path("/var/run/charon.pid")


def has_policies() -> bool:
    """Return False if the kernel has no XFRM policy of anybody; True also if it cannot be asked."""
    if not _has_xfrm():
        return False
    try:
        with closing(NetlinkSocket(protocol=NETLINK_XFRM)) as kernel:
            return any(True for _ in kernel.dump(GET_POLICY, b""))
    except OSError:
        return True


def _has_xfrm() -> bool:
    """Return True if the kernel's own socket exists: opening another one would load the module."""
    with suppress(OSError):
        rows = Path("/proc/net/netlink").read_text().splitlines()[1:]
        return any(row.split()[1] == str(NETLINK_XFRM) for row in rows)
    return False
