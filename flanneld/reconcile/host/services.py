"""Services of this host for backends: key files, commands, HTTP requests, blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flanneld.backends.contract import DryRun, HostServices, RunCommand
from flanneld.runtime.detached_call import DetachedCalls
from flanneld.runtime.files import secret_file
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpClient, HttpRequest

if TYPE_CHECKING:
    from flanneld.runtime.command_runner import Finished

#: Methods that change nothing (RFC 9110, 9.2.1).
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_Read = Callable[[Path, Callable[[], bytes] | None], bytes]


def of_daemon(directory: str, environ: Mapping[str, str], stop: threading.Event) -> HostServices:
    """Return the services of a daemon with its key files in ``directory``, until ``stop``."""
    secret = partial(_secret, secret_file.read, Path(directory), environ)
    return HostServices(
        secret=secret, run=_runner(stop), http=HttpClient(stop).ask, call=DetachedCalls(stop).run
    )


def _runner(stop: threading.Event) -> RunCommand:
    """Return the runner of commands, which most backends never use: loading it takes 2 % of a start."""

    def run(command: Sequence[str] | str, *args: Any, **options: Any) -> Finished:
        from flanneld.runtime.command_runner import CommandRunner

        return CommandRunner(stop).run(command, *args, **options)

    return run


def of_dry_run(directory: str, environ: Mapping[str, str]) -> HostServices:
    """Return services that change nothing: a new key is not kept, no command runs, HTTP only reads."""
    client = HttpClient(threading.Event())

    def read(path: Path, make: Callable[[], bytes] | None) -> bytes:
        return make() if make and not path.exists() else secret_file.read(path)

    def run(*_: object, **__: object) -> NoReturn:
        raise DryRun("a dry run starts no command", "start the daemon to see what the backend does")

    def ask(request: HttpRequest) -> HttpAnswer:
        if request.method not in _SAFE and not request.harmless:
            raise DryRun(f"a dry run makes no {request.method} request", "start the daemon")
        return client.ask(request)

    secret = partial(_secret, read, Path(directory), environ)
    return HostServices(secret=secret, run=run, http=ask, call=DetachedCalls(threading.Event()).run)


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
