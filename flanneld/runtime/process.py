"""Process setup: standard streams, file descriptor limit, interpreter settings."""

from __future__ import annotations

import gc
import os
import resource
import sys

from flanneld.errors import Fatal

#: File descriptors needed: the daemon holds 15, a request or a command takes 10 more.
_NEEDED = 64
#: File descriptors with the connections of the health server and the status, at most.
_WANTED = 256
#: Seconds until a running thread yields. An event passes two threads to the kernel, so Python's 5 ms are too
#: long.
_SWITCH_INTERVAL = 0.0001


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: otherwise a socket could get their number, and the log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # Python sets them to None for streams closed at start.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def ensure_descriptors() -> None:
    """Raise the soft limit of file descriptors if it is low. Raises ``Fatal`` if the hard limit is, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _WANTED:
        return
    wanted = _WANTED if hard == unlimited else min(_WANTED, hard)
    if wanted < _NEEDED:
        raise Fatal(
            f"this process may have {wanted} file descriptors, and flanneld needs {_NEEDED}",
            "raise the limit: ulimit -n, or LimitNOFILE= of the service",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tune_interpreter() -> None:
    """Shorten the thread switch interval, and exempt all modules from garbage collection."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()


def trim_memory() -> None:
    """Return unused memory of the C library's heap to the kernel, where the library can (malloc_trim(3)).

    Lists of all leases and dumps of the kernel's tables leave a heap that is large and mostly empty.
    """
    from ctypes import CDLL  # rarely needed, and takes 1 MiB

    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
