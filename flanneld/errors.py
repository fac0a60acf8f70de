"""Exceptions of the daemon, each with a remedy for the operator."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Begins the problem of a node that has lost its lease to another one.
LEASE_TAKEN = "another node writes itself into our lease"
#: Remedy for leases of nodes that seem to be gone. No advice deletes a lease: a silent node may still run.
LEASES_END = "a lease that no node renews ends by itself"
LINK_BROADCAST = "a broadcast or network address of this host's link"

_LONGEST = 200


class FlannelError(Exception):
    """Base class of all exceptions that flanneld raises on purpose.

    ``str(error)`` is one line: what went wrong, then, after a semicolon, what to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class Fatal(FlannelError):
    """Error that a retry cannot fix: the daemon exits with status 1."""


@contextmanager
def prefixed(words: str) -> Iterator[None]:
    """Begin the problem of a ``Fatal`` from the block with upstream's words for it."""
    try:
        yield
    except Fatal as failure:
        raise Fatal(f"{words}: {failure.problem}", failure.remedy) from failure


class Retryable(FlannelError):
    """Error of a store or host that is not ready yet: the caller waits and tries again.

    ``retry_after`` is the wait that the other side asks for, in seconds.
    """

    #: Function that returns True once the cause may be gone, without a request; None if nothing tells.
    is_cured: Callable[[], bool] | None = None

    def __init__(self, problem: str, remedy: str = "", retry_after: float = 0.0) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class NoAnswer(Retryable):
    """Error for a store that did not answer. Any other ``Retryable`` of a store means that it answered."""


def remembered(reason: Retryable) -> Retryable:
    """Return a copy without the traceback, whose frames would keep their objects in memory."""
    kind = NoAnswer if isinstance(reason, NoAnswer) else Retryable
    return kind(reason.problem, reason.remedy)


class Refused(FlannelError):
    """Error for unusable input from outside. It is logged once with its key, and other input still counts."""

    #: Word by which programs know the reason, such as a check of the doctor; empty if none asks for it.
    code = ""


def cause_of(error: Exception) -> str:
    """Return the text of an error without Python's prefix ``[Errno 24]``."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def printable(text: str) -> str:
    """Return a text of others, escaped where it does not print: line ends, marks of direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(text: str) -> str:
    """Return a text of others as people see it: ``printable``, and cut after 200 characters.

    What is stored, compared or passed on stays as it is.
    """
    rest = len(text) - _LONGEST
    return f"{printable(text[:_LONGEST])}... and {rest} more" if rest > 0 else printable(text)


def install_command(extra: str, debian: str = "") -> str:
    """Return the command that installs an optional package where this interpreter finds it.

    ``extra`` is one of ours. Debian's own interpreter takes the package ``debian``, if there is one.
    """
    if debian and sys.prefix == sys.base_prefix:
        return f"apt-get install {debian}"
    return f"{sys.executable} -m pip install 'flanneld[{extra}]'"


def lacking(error: BaseException) -> Fatal | None:
    """Return the error to report if this process lacks file descriptors, memory or threads; else None.

    Waiting brings none of them back: a limit of the process is too low for the daemon.
    """
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return Fatal("out of file descriptors", "raise the limit: ulimit -n, or LimitNOFILE= of the service")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return Fatal(
            "cannot start a thread", "raise the limit: ulimit -u and -v, or TasksMax= of the service"
        )
    out_of_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    # CPython's own complaint about an extension that found no memory is a SystemError.
    if out_of_memory or unmapped or isinstance(error, MemoryError | SystemError):
        return Fatal("out of memory", "raise the limit: ulimit -v, or MemoryMax= of the service")
    return None


class Unsafe(Refused):
    """Error for a lease that would harm this host. Objects for its node are removed until it is safe."""


class Cancelled(Exception):
    """Error of a call that ended because of ``close``."""
