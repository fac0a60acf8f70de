"""``python -m flanneld`` and the console script: the daemon, even where there is no memory to load it."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable

_OUT_OF_MEMORY = "out of memory; raise the limit: ulimit -v, or MemoryMax= of the service"
#: Bytes of address space with which the daemon's modules, which take 30 MiB, never load. The limit is checked
#: first: Python may crash or loop for minutes where memory runs out in the middle of an import.
_TOO_LITTLE = 28 << 20
#: Allocations between two collections of reference cycles. A list of leases makes many objects and no cycles.
_GARBAGE = 50_000


def main() -> None:
    """Run the daemon; if a limit of the process stops that, say so in one line and exit with status 1."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = limit != resource.RLIM_INFINITY
    if is_limited and limit < _TOO_LITTLE:
        _end(_OUT_OF_MEMORY)
    try:
        run = _load(is_limited=is_limited)
    except Exception:
        if not is_limited:
            raise
        _end(_OUT_OF_MEMORY)  # libraries hide a MemoryError behind errors of all kinds
        return
    from flanneld.errors import lacking

    try:
        run()
    except Exception as error:
        lack = lacking(error)
        if lack is None:
            raise
        _end(str(lack))


def _load(*, is_limited: bool) -> Callable[[], None]:
    """Load the daemon, which takes most of the memory that a start needs."""
    # Modules are full of objects and make few cycles: looking for those takes 7 % of a start.
    gc.set_threshold(_GARBAGE)
    if is_limited:
        import logging

        # hashlib logs a traceback for each part that finds no memory: it is loaded before the log is set up.
        logging.getLogger().addHandler(logging.NullHandler())
        import hashlib  # noqa: F401 - some stores and backends need it

    # msgspec prefers typing_extensions to the same functions of typing: 7 modules, such as inspect and ast.
    sys.modules.setdefault("typing_extensions", None)  # type: ignore[arg-type] # which hides it
    import msgspec  # noqa: F401 - the daemon's modules need it

    if sys.modules["typing_extensions"] is None:
        del sys.modules["typing_extensions"]
    from flanneld.main import main as run

    return run


def _end(reason: str) -> None:
    os.write(2, f"flanneld: {reason}\n".encode())
    os._exit(1)  # threads that lack the same may not get to their end


if __name__ == "__main__":
    main()
