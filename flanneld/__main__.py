"""``python -m flanneld`` and the console script: the daemon, even where there is no memory to load it."""

from __future__ import annotations

import logging
import os
import resource

from flanneld.errors import OUT_OF_MEMORY, Fatal, lacking


def main() -> None:
    """Run the daemon; if a limit of the process stops that, say so in one line and exit with status 1."""
    # Until the log is set up: hashlib shows a traceback for each part that finds no memory.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        from flanneld.main import main as run  # loading it takes most of the memory that a start needs

        run()
    except Exception as error:
        lack = lacking(error) or _unloadable(error)
        if lack is None:
            raise
        os.write(2, f"flanneld: {lack}\n".encode())
        os._exit(1)  # threads that lack the same may not get to their end


def _unloadable(error: Exception) -> Fatal | None:
    """Return what to tell if a library found no memory for a part of its own, and hid that."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return OUT_OF_MEMORY if isinstance(error, ImportError) and limit != resource.RLIM_INFINITY else None


if __name__ == "__main__":
    main()
