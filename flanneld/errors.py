"""The ways in which something can go wrong, each with a remedy an operator can act on."""

from __future__ import annotations

import errno


class FlannelError(Exception):
    """Base of all errors that flanneld raises on purpose.

    ``str(error)`` is one line: what went wrong, then, after a semicolon, what to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class Fatal(FlannelError):
    """Trying again cannot help: the daemon ends with exit status 1."""


class Retryable(FlannelError):
    """The outside world is not ready; whoever called waits and tries again.

    ``retry_after`` is how long, in seconds, the other side asks us to wait.
    """

    def __init__(self, problem: str, remedy: str = "", retry_after: float = 0.0) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class NoAnswer(Retryable):
    """The store gave no answer: any other ``Retryable`` of a store means that it did."""


def remembered(reason: Retryable) -> Retryable:
    """Return the same without its traceback, which keeps all that its frames hold in memory."""
    kind = NoAnswer if isinstance(reason, NoAnswer) else Retryable
    return kind(reason.problem, reason.remedy)


class Refused(FlannelError):
    """Foreign input that cannot be used: logged once with its key, and the rest goes on."""


def cause_of(error: Exception) -> str:
    """Return the words of an error without Python's ``[Errno 24]`` before them."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def lacking(error: BaseException) -> Fatal | None:
    """Return what to tell if this process is out of file descriptors, memory or threads; None otherwise.

    None of them comes back by waiting: a limit is too low for what the daemon does.
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
    """A lease that would harm this host: what led to its node is withdrawn until the obstacle is gone."""


class Cancelled(Exception):
    """A call ended because ``close`` was called."""
