"""``flannelctl``: from the command line to the exit status."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from itertools import pairwise
from typing import Any, NoReturn

from msgspec.structs import asdict

from flanneld import __version__, options
from flanneld.compat.flags import quoted
from flanneld.ctl import stores, tables, views
from flanneld.ctl.data_source import Source, find
from flanneld.ctl.tables import Table
from flanneld.errors import FlannelError, cause_of

FINE, PROBLEMS, USAGE, NO_DAEMON = 0, 1, 2, 3

#: For people, for programs, and whether something is wrong.
Answer = tuple[list[Table], Any, bool]


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """0: all is fine; 1: problems were found; 2: wrong usage; 3: no daemon answers, nothing else is wrong."""
    as_json = "--output=json" in argv or ("--output", "json") in pairwise(argv)
    try:
        arguments, flags = _parse(argv)
        if arguments.command not in COMMANDS:
            return _act(
                arguments, options.read(flags, environ, program="flannelctl COMMAND"), as_json=as_json
            )
        source = find(flags, environ, arguments.socket)
        shown, plain, wrong = COMMANDS[arguments.command](source, arguments)
    except (options.HelpWanted, options.VersionWanted):
        return FINE
    except options.UsageError as error:
        return _complain(error.reason, USAGE, as_json=as_json)
    except FlannelError as error:
        return _complain(str(error), USAGE, as_json=as_json)
    except OSError as error:
        return _complain(f"cannot read the kernel: {cause_of(error)}; run as root", PROBLEMS, as_json=as_json)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        said = f"what the daemon says is not understood ({reason}); use the flannelctl of its version"
        return _complain(said, PROBLEMS, as_json=as_json)
    _say(shown, plain, as_json=as_json)
    return PROBLEMS if wrong else FINE if source.origin == "daemon" else NO_DAEMON


def _say(shown: list[Table], plain: Any, *, as_json: bool) -> None:
    try:
        if as_json:
            print(json.dumps(plain, indent=2))  # noqa: T201 - what we are for
        else:
            tables.show(shown)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the flags of flanneld. Raises ``UsageError``."""
    parser = _parser()
    arguments, flags = parser.parse_known_args(argv)
    # Go's flags end at the first word that is none; what came after it would count for nothing.
    if flags and not flags[0].startswith("-"):
        parser.error(f"nobody takes the word {quoted(flags[0])}")
    return arguments, flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise options.UsageError(f"{message}; see {self.prog} --help", self.format_usage())


def _parser() -> argparse.ArgumentParser:
    about = (
        "What flannel does on this node. Takes flanneld's flags too; with -etcd-endpoints it asks the store."
    )
    # Before the command or behind it; where they are not given they must not undo what was given elsewhere.
    shared = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--output", choices=("table", "json"), help="table, if not given")
    shared.add_argument("--socket", help="the daemon's socket, if not beside the subnet file")
    parser = _Parser("flannelctl", description=about, allow_abbrev=False, parents=[shared])
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(socket="")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, meaning) in _HELP.items():
        command = commands.add_parser(name, parents=[shared], help=meaning, allow_abbrev=False)
        if name == "trace":
            command.add_argument("address", type=ip_address, metavar="IP")
    stores.add_commands(commands.add_parser, [shared])
    return parser


def _act(arguments: argparse.Namespace, wanted: options.Options, *, as_json: bool) -> int:
    """Do something with the store itself; 1 if that could not be done."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        shown, plain, wrong = arguments.run(wanted, arguments)
    except (FlannelError, OSError) as error:
        said = str(error) if isinstance(error, FlannelError) else cause_of(error)
        return _complain(said, PROBLEMS, as_json=as_json)
    finally:
        root.setLevel(level)
    _say(shown, plain, as_json=as_json)
    return PROBLEMS if wrong else FINE


def _complain(text: str, status: int, *, as_json: bool) -> int:
    sys.stderr.write(f"flannelctl: {text}\n")
    if as_json:
        _say([], {"error": text}, as_json=True)
    return status


# ---- the commands -------------------------------------------------------------------------------


def _status(source: Source, _arguments: argparse.Namespace) -> Answer:
    health = source.document.get("health") or {}
    wrong = any(health.get(name) for name in ("missing", "late", "troubles"))
    return views.status(source), _plain(source), wrong


def _peers(source: Source, _arguments: argparse.Namespace) -> Answer:
    known = source.document.get("peers", [])
    wrong = any(peer["state"] not in ("in the kernel", "pending") for peer in known)
    return views.peers(source), {"peers": known, "not_known": _not_known(source)}, wrong


def _routes(source: Source, _arguments: argparse.Namespace) -> Answer:
    from flanneld.ctl import snapshot

    entries = snapshot.compare(source.document, snapshot.read(source.document))
    wrong = any(entry.state in ("missing", "different", "not wanted") for entry in entries)
    plain = {"objects": [snapshot.described(entry) for entry in entries], "not_known": _not_known(source)}
    return views.routes(source, entries), plain, wrong


def _events(source: Source, _arguments: argparse.Namespace) -> Answer:
    plain = {"events": source.document.get("events", []), "not_known": _not_known(source)}
    return views.events(source), plain, False


def _trace(source: Source, arguments: argparse.Namespace) -> Answer:
    from flanneld.ctl import snapshot
    from flanneld.ctl.trace import trace

    hops = trace(arguments.address, source.document, snapshot.read(source.document), snapshot.way_to)
    rows = [(hop.hop, hop.state, hop.found, hop.note) for hop in hops]
    table = Table(("hop", "state", "found", "note"), rows)
    plain = {"hops": [asdict(hop) for hop in hops], "not_known": _not_known(source)}
    return [table, *views.notes(source)], plain, any(hop.state == "PROBLEM" for hop in hops)


def _doctor(source: Source, _arguments: argparse.Namespace) -> Answer:
    from flanneld.ctl.doctor import as_json, examine, has_problem, report
    from flanneld.ctl.facts import gather

    facts = gather(source)
    findings = examine(facts)
    return report(findings, facts), as_json(findings, facts), has_problem(findings)


def _not_known(source: Source) -> list[str]:
    return list(map(str, source.unknown))


def _plain(source: Source) -> dict[str, Any]:
    """The document without the peers one by one: for these there is a command."""
    rest = {name: value for name, value in source.document.items() if name not in ("peers", "events")}
    return {"origin": source.origin, **rest, "not_known": _not_known(source)}


_HELP: dict[str, tuple[Callable[[Source, argparse.Namespace], Answer], str]] = {
    "status": (_status, "the daemon and its node in a few lines"),
    "peers": (_peers, "the other nodes, and what is done for each"),
    "routes": (_routes, "devices, routes and entries: wanted and in the kernel"),
    "events": (_events, "what happened lately"),
    "trace": (_trace, "which way a packet to an address takes"),
    "doctor": (_doctor, "what is wrong with this node, and what puts it right"),
}
COMMANDS = {name: act for name, (act, _) in _HELP.items()}
