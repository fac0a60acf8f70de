"""Main function of the daemon, from the command line to the exit status.

One-shot actions, such as ``--plan`` and ``--cleanup``, report on stdout, then flanneld exits.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld import __version__, effects, options, startup
from flanneld.compat import glog
from flanneld.diagnostics.observation import Observation
from flanneld.errors import Cancelled, Fatal, FlannelError, lacking, prefixed
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile.counters import counted
from flanneld.runtime import logs, process
from flanneld.runtime.process import (
    DRAIN,
    PATIENCE,
    HostClaims,
    InstanceLock,
    ensure_descriptors,
    open_standard_streams,
    tune_interpreter,
)
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet import subnet_file
from flanneld.subnet.opening import etcd_options, open_store

if TYPE_CHECKING:
    from flanneld.lease_server import LeaseService

log = logging.getLogger(__name__)


def main() -> None:
    """Run with the command line and the environment of this process, then exit."""
    open_standard_streams()
    status = run(sys.argv[1:], os.environ)
    with suppress(OSError):  # a full disk must not change the exit status
        sys.stderr.flush()
    # Taking thousands of leases apart, object by object, would only make a restart last longer.
    os._exit(status)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until told to stop. Return 0 then, 1 after a failure, 2 for wrong usage."""
    if not sys.warnoptions:
        # Libraries warn programmers; an operator hears from us what is wrong.
        warnings.simplefilter("ignore")
    try:
        wanted = options.read(argv, environ)
        glog.setup(wanted.v, wanted.vmodule, wanted.log_backtrace_at, wanted.logging_format)
        ensure_descriptors()
    except options.HelpWanted as help_wanted:
        sys.stdout.write(help_wanted.usage)
        sys.stdout.flush()
        return 0
    except options.VersionWanted:
        return _print(f"{__version__}\n", status=0)
    except options.UsageError as wrong:
        return _print("\n".join([wrong.reason, wrong.usage]), status=2)
    except Fatal as wrong:
        return _print(f"flanneld: {wrong}\n", status=1)
    _warn_of_unknown_variables(environ)
    if wanted.is_errand:
        return _run_errand(wanted, environ)
    status = _serve(wanted, environ)
    if status == 0:
        log.info("Exiting cleanly...")
    return status


def _serve(wanted: Options, environ: Mapping[str, str]) -> int:
    tune_interpreter()
    try:
        if wanted.listen and (wanted.serve_only or not wanted.store):
            from flanneld import lease_server  # a node has no use for it

            return lease_server.run(wanted, environ)
        if wanted.has_networks:
            from flanneld import fleet  # most daemons have one network

            return fleet.run(wanted, environ)
        return _serve_alone(wanted, environ)
    except Cancelled:
        return 0
    except Fatal as failure:
        log.critical("%s", failure)
        return 1
    except Exception as error:
        lack = lacking(error)
        if lack is None:
            raise
        log.critical("%s", lack)
        return 1


def _serve_alone(wanted: Options, environ: Mapping[str, str]) -> int:
    """Wait until no other flanneld has this subnet file, then serve."""
    supervisor, notifier = Supervisor(quiet=(Cancelled,)), process.Notifier()
    events = logs.remember()
    log.info("flanneld %s %s", __version__, wanted.described())
    supervisor.handle_signals()
    lock = InstanceLock(subnet_file.beside(Path(wanted.subnet_file), "lock"))
    lock.wait(supervisor.stop, tell=notifier.status)
    events.keep(subnet_file.beside(Path(wanted.subnet_file), "events"))
    service: LeaseService | None = None
    if wanted.store:
        from flanneld import lease_server  # only for those who keep the leases here
        from flanneld.subnet.embedded.store import store_of

        file = lease_server.open_file_store(wanted, supervisor)
        store = counted(store_of(file))
        if wanted.listen:
            service = lease_server.LeaseService(wanted, environ, supervisor, file)
            service.start()
    else:
        with prefixed("Failed to create SubnetManager"):
            store = counted(open_store(wanted, environ))
    log.info("Created subnet manager: %s", store.name)
    claims = HostClaims(PATIENCE)
    node = Node(
        wanted,
        effects.real(wanted, environ, supervisor, notifier),
        store,
        admit=lambda config, backend: claims.take(
            startup.claims_to(config, backend, guards=wanted.guard_tunnel), startup.clash
        ),
        beside=Observation(),
        events=events,
        more_metrics=service.server.metrics_text if service else None,
    )
    return node.serve((claims.drain, DRAIN))


def _run_errand(wanted: Options, environ: Mapping[str, str]) -> int:
    """Run the action that the options name. Return exit status 1 if something is left to do."""
    errand = _clean_up if wanted.cleanup else _migrate if wanted.migrate_etcd_v2_to_v3 else _plan
    try:
        return 0 if errand(wanted, environ) else 1
    except FlannelError as failure:
        return _print(f"flanneld: {failure}\n", status=1)


# Each module is imported by the only action that needs it.


def _clean_up(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.cleanup import clean_up
    from flanneld.subnet.kube.node_table import NodeCache

    more = [NodeCache(wanted.state_dir).path]
    if wanted.cni_conf:
        from flanneld.subnet.cni_conf import is_flannelds

        more += filter(is_flannelds, [Path(wanted.cni_conf)])
    return clean_up(Path(wanted.subnet_file), more, _say, everything=wanted.all, dry_run=wanted.dry_run)


def _migrate(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.subnet.copy import migrate

    return migrate(etcd_options(wanted), _say, dry_run=wanted.dry_run)


def _plan(wanted: Options, environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.plan import print_plan

    # Only warnings: the info lines of a startup would report changes that a dry run does not make.
    logging.getLogger().setLevel(logging.WARNING)
    print_plan(wanted, open_store(wanted, environ), _say)
    return True


def _warn_of_unknown_variables(environ: Mapping[str, str]) -> None:
    for name, nearest in options.unknown_variables(environ):
        hint = f"; did you mean {nearest}?" if nearest else "; flanneld -help lists the flags"
        log.warning("Unknown variable %s%s", name, hint)
    for name, why in options.WITHOUT_EFFECT.items():
        if name in environ:
            log.info("%s has no effect: %s", name, why)


def _say(text: str) -> None:
    """Print a line. If its reader has gone, as with ``| head``, the errand goes on to its end."""
    try:
        print(text, flush=True)  # noqa: T201 - what an errand is for
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str, *, status: int) -> int:
    sys.stderr.write(text)
    return status
