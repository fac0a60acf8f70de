"""Services of this host for backends: key files, commands, HTTP requests, blocking calls.

Most backends use none of them, so the code of each is loaded when it is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flanneld.backends.contract import DryRun, HostServices

if TYPE_CHECKING:
    from flanneld.runtime.command import Finished
    from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

#: Methods that change nothing (RFC 9110, 9.2.1).
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_Read = Callable[[Path, Callable[[], bytes] | None], bytes]


def of_daemon(directory: str, environ: Mapping[str, str], stop: threading.Event) -> HostServices:
    """Return the services of a daemon with its key files in ``directory``, until ``stop``."""
    secret = partial(_secret, _read_key, Path(directory), environ)
    return HostServices(
        secret=secret, run=partial(_run, stop), http=partial(_ask, stop), call=partial(_call, stop)
    )


def of_dry_run(directory: str, environ: Mapping[str, str]) -> HostServices:
    """Return services that change nothing: a new key is not kept, no command runs, HTTP only reads."""
    stop = threading.Event()

    def read(path: Path, make: Callable[[], bytes] | None) -> bytes:
        return make() if make and not path.exists() else _read_key(path)

    def run(*_: object, **__: object) -> NoReturn:
        raise DryRun("a dry run starts no command", "start the daemon to see what the backend does")

    def ask(request: HttpRequest) -> HttpAnswer:
        if request.method not in _SAFE and not request.harmless:
            raise DryRun(f"a dry run makes no {request.method} request", "start the daemon")
        return _ask(stop, request)

    secret = partial(_secret, read, Path(directory), environ)
    return HostServices(secret=secret, run=run, http=ask, call=partial(_call, stop))


def _run(stop: threading.Event, command: Sequence[str] | str, *args: Any, **options: Any) -> Finished:
    from flanneld.runtime.command import CommandRunner

    return CommandRunner(stop).run(command, *args, **options)


def _ask(stop: threading.Event, request: HttpRequest) -> HttpAnswer:
    from flanneld.runtime.sockets.http_client import HttpClient

    return HttpClient(stop).ask(request)


def _call(stop: threading.Event, what: str, act: Callable[[], Any], timeout: float) -> Any:
    from flanneld.runtime.waits import DetachedCalls

    return DetachedCalls(stop).run(what, act, timeout)


def _read_key(path: Path, make: Callable[[], bytes] | None = None) -> bytes:
    from flanneld.runtime import files

    return files.read_secret(path, make)


def _secret(
    read: _Read,
    directory: Path,
    environ: Mapping[str, str],
    name: str,
    make: Callable[[], bytes] | None = None,
    *,
    variable: str = "",
) -> bytes:
    return read(Path(environ.get(variable) or directory / name), make)
