"""Set-up of the process: open standard streams, enough file descriptors, an interpreter tuned for threads."""

from __future__ import annotations

import gc
import os
import resource
import sys

from flanneld.errors import Fatal

#: File descriptors without which the daemon cannot work: it holds 15, a request or a command takes 10 more.
_NEEDED = 64
#: With the connections of the health server and the readers of the status there are at most this many.
_WANTED = 256
#: Seconds until a thread hands over: an event reaches the kernel through two, so less than Python's default.
_SWITCH_INTERVAL = 0.0001
#: Objects made between two searches for reference cycles. A list of leases makes many, and no cycles.
_GARBAGE = 50_000


def open_standard_streams() -> None:
    """Open /dev/null for what the caller has closed: a socket of ours in its place would get our log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    # Python has none for a stream that was closed when it began.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def ensure_descriptors() -> None:
    """Raise the soft limit of file descriptors if it is low. Raises ``Fatal`` if the hard one is too."""
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
    """Hand over between threads sooner and search for garbage less often; call it with all modules loaded."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()
    gc.set_threshold(_GARBAGE)
