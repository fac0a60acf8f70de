"""One-shot actions, such as ``--plan`` and ``--cleanup``: each reports on stdout, then flanneld exits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from flanneld.errors import FlannelError
from flanneld.options import Options
from flanneld.subnet.opening import etcd_options, open_store


def run(wanted: Options, environ: Mapping[str, str]) -> int:
    """Run the action that the options name. Return exit status 1 if something is left to do."""
    errand = _clean_up if wanted.cleanup else _migrate if wanted.migrate_etcd_v2_to_v3 else _plan
    try:
        return 0 if errand(wanted, environ) else 1
    except FlannelError as failure:
        sys.stderr.write(f"flanneld: {failure}\n")
        return 1
    finally:
        sys.stdout.flush()


# Each module is imported by the only action that needs it.


def _clean_up(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.cleanup import clean_up
    from flanneld.subnet.kube.node_table import NodeCache

    more = [NodeCache(wanted.state_dir).path]
    if wanted.cni_conf:
        from flanneld.subnet.cni_conf import is_flannelds

        more += filter(is_flannelds, [Path(wanted.cni_conf)])
    return clean_up(Path(wanted.subnet_file), more, print, everything=wanted.all, dry_run=wanted.dry_run)


def _migrate(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.subnet.etcd.copy import migrate

    return migrate(etcd_options(wanted), print, dry_run=wanted.dry_run)


def _plan(wanted: Options, environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.plan import print_plan

    # Only warnings: the info lines of a startup would report changes that a dry run does not make.
    logging.getLogger().setLevel(logging.WARNING)
    print_plan(wanted, open_store(wanted, environ), print)
    return True
