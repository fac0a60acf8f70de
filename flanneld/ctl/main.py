"""``flannelctl``: command line, commands and exit status."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from ipaddress import ip_address
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from flanneld import __version__, options
from flanneld.compat.flags import quoted
from flanneld.ctl import output, store_commands
from flanneld.ctl.commands import ALIASES, COMMANDS
from flanneld.ctl.output import TextTable
from flanneld.ctl.source import NothingKnown, find_source
from flanneld.diagnostics.status import NotUnderstood
from flanneld.errors import FlannelError, cause_of
from flanneld.runtime import clock

#: Allocations between two collections of reference cycles.
_GARBAGE = 50_000_000
#: Seconds between two queries of ``--watch``.
_WATCH_EVERY = 2.0
#: Seconds between two looks for new lines of the log.
_FOLLOW_EVERY = 1.0
FINE, PROBLEMS, USAGE, NO_DAEMON = 0, 1, 2, 3


def main() -> None:
    """Run the console script."""
    # A list of thousands of peers makes many objects and no cycles.
    gc.set_threshold(_GARBAGE)
    status = run(sys.argv[1:], os.environ)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # freeing hundreds of thousands of objects one by one takes half a second


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command. Return 0 without problems, 1 with problems, 2 for wrong usage, 3 without a daemon."""
    level = logging.getLogger().level
    try:
        return _attempt(argv, environ)
    finally:
        logging.getLogger().setLevel(level)


def _attempt(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    argv = [*_in_long_form(argv)]
    as_json = "--output=json" in argv or ("--output", "json") in pairwise(argv)
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    try:
        arguments, flags = parse(argv)
        if not arguments.command:
            if as_json:
                return _complain("no command is given; see flannelctl --help", USAGE, as_json=True)
            command_line().print_help()
            return FINE
        arguments.command = ALIASES.get(arguments.command, arguments.command)
        if arguments.command not in COMMANDS:
            return _act(arguments, store_commands.read_options(flags, environ), as_json=as_json)
        return _run(arguments, lambda: _ask(arguments, flags, environ), as_json=as_json)
    except (options.HelpWanted, options.VersionWanted) as wanted:
        text = wanted.usage if isinstance(wanted, options.HelpWanted) else __version__
        _say([output.in_lines(text.splitlines())], lambda: {"said": text}, as_json=as_json)
        return FINE
    except Exception as error:
        return _complain(*_problem_of(error), as_json=as_json)


def _problem_of(error: Exception) -> tuple[str, int]:
    """Return an error as text with its exit status; programs get that as JSON whatever happens."""
    match error:
        case options.UsageError():
            return error.reason, USAGE
        case FlannelError():
            return str(error), NO_DAEMON if isinstance(error, NothingKnown) else USAGE
        case OSError():
            return f"cannot read the kernel: {cause_of(error)}; run as root", PROBLEMS
        case NotUnderstood():
            said = f"what the daemon says is not understood ({error}); use the flannelctl of its version"
            return said, PROBLEMS
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    return f"a bug of flannelctl ({type(error).__name__}: {error}; {where}); please report it", PROBLEMS


class Answered(Struct, frozen=True):
    """A command's answer, and whether it came from the daemon."""

    shown: list[TextTable]
    plain: Callable[[], Any]
    wrong: bool
    by_daemon: bool

    @property
    def status(self) -> int:
        """Exit status for this answer."""
        return PROBLEMS if self.wrong else FINE if self.by_daemon else NO_DAEMON


def _ask(arguments: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]) -> Answered:
    find = partial(find_source, flags, environ, arguments.socket)
    if not hasattr(arguments, "find"):
        arguments.find = cache(find) if getattr(arguments, "follow", False) else find
    source = arguments.find()
    shown, plain, wrong = COMMANDS[arguments.command][0](source, arguments)
    return Answered(shown, plain, wrong or not source.is_understood, source.origin == "daemon")


def _run(arguments: argparse.Namespace, ask: Callable[[], Answered], *, as_json: bool) -> int:
    """Run a command once, until success (``--wait``), or repeatedly (``--watch``). Return the exit status."""
    if getattr(arguments, "follow", False):
        return _watch(ask, arguments.watch or _FOLLOW_EVERY, as_json=as_json, is_new=True)
    if arguments.watch is not None:
        return _watch(ask, arguments.watch, as_json=as_json)
    within = getattr(arguments, "wait", None) or 0.0
    answer = output.until_good(ask, lambda answer: answer.status == FINE, within)
    _say(answer.shown, answer.plain, as_json=as_json)
    return answer.status


def _watch(ask: Callable[[], Answered], every: float, *, as_json: bool, is_new: bool = False) -> int:
    """Print each changed answer until an interrupt or a closed output; one that ``is_new`` has no heading."""
    status = FINE
    with suppress(KeyboardInterrupt):
        # A line may come again within the second that a table shows.
        for answer in output.changes(ask, lambda answer: object() if is_new else answer.shown, every):
            status = answer.status
            heading = [] if is_new else [output.in_lines([f"-- {clock.utc_text(clock.wall())}"])]
            if is_new and not answer.shown[0].rows:
                continue
            if not _say([*heading, *answer.shown], answer.plain, as_json=as_json, indent=None):
                break
    return status


def _say(shown: list[TextTable], plain: Callable[[], Any], *, as_json: bool, indent: int | None = 2) -> bool:
    """Print an answer. Return False if the output is closed."""
    try:
        if as_json:
            print(json.dumps(plain(), indent=indent))  # noqa: T201 - what we are for
        else:
            output.show(shown)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return flannelctl's arguments and the flags of flanneld. Raises ``UsageError``."""
    parser = command_line()
    # Not set_defaults: it changes the actions that the commands' parsers share, which then reset the values.
    defaults = argparse.Namespace(socket="", watch=None, output="table")
    arguments, flags = parser.parse_known_args([*_in_long_form(argv)], defaults)
    # Go's flags end at the first word that is no flag; all words after it would be ignored.
    if flags and not flags[0].startswith("-"):
        parser.error(f"unrecognized argument: {quoted(flags[0])}")
    return arguments, flags


def _in_long_form(argv: Sequence[str]) -> Iterator[str]:
    """Yield the words as argparse takes them apart rightly.

    Go's flags have one dash or two; of ``-healthz-port`` argparse would take the first letter for an option.
    A bare ``--watch`` gets its value: argparse would take a command behind it.
    """
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        if word == "--watch" and not re.match(r"\d", following):
            yield f"--watch={_WATCH_EVERY:g}"
        elif word == "-o" or word.startswith("-o="):
            yield f"--output{word[2:]}"
        else:
            yield re.sub(r"^-(?=[a-z][\w-])", "--", word)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            from difflib import get_close_matches  # rarely needed

            known = re.findall(r"[\w-]+", unknown[2])
            close = get_close_matches(unknown[1], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
            message = f"{quoted(unknown[1])} is unknown, {hint}"
        raise options.UsageError(f"{message}; see {self.prog} --help", self.format_usage())


def command_line() -> argparse.ArgumentParser:
    """Return the parser of flannelctl's own arguments, with a parser for each command."""
    about = "Status and diagnosis of this node. Takes flanneld's flags, such as -etcd-endpoints."
    # Accepted before and after the command; a default must not overwrite a value given at the other place.
    shared = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    shared.add_argument(
        "--output", choices=("table", "json", "wide"), help="output format, also -o (default: table)"
    )
    shared.add_argument("--socket", help="the daemon's status socket (default: beside the subnet file)")
    shared.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=_WATCH_EVERY,
        metavar="SECONDS",
        help=f"repeat every SECONDS seconds (default: {_WATCH_EVERY:g}) and show changes",
    )
    parser = _Parser("flannelctl", description=about, allow_abbrev=False, parents=[shared])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, meaning) in COMMANDS.items():
        also = [old for old, new in ALIASES.items() if new == name]
        command = commands.add_parser(name, parents=[shared], help=meaning, aliases=also, allow_abbrev=False)
        if name == "status":
            command.add_argument(
                "--wait",
                type=_seconds,
                nargs="?",
                const=60.0,
                metavar="SECONDS",
                help="wait until there is no problem, at most SECONDS seconds (default: 60)",
            )
        if name == "logs":
            command.add_argument(
                "peer", nargs="?", metavar="PEER", help="its name, subnet, public IP or a container's address"
            )
            command.add_argument("-f", "--follow", action="store_true", help="go on with each new line")
        if name == "bundle":
            command.add_argument("file", nargs="?", default="", metavar="FILE", help="the archive to write")
        if name == "doctor":
            command.add_argument("--cluster", action="store_true", help="ask all nodes, too")
            command.add_argument(
                "--fix", action="store_true", help="run the fixes of problems, and check again"
            )
            command.add_argument(
                "--yes", action="count", default=0, help="do not ask before the fixes are run"
            )
        if name == "trace":
            command.add_argument("address", type=ip_address, metavar="IP")
            command.add_argument(
                "--from-container", type=ip_address, metavar="IP", help="begin in this node's container"
            )
        if name == "graph":
            command.add_argument(
                "--format", choices=("text", "dot", "html"), default="text", help="text, if not given"
            )
        if name == "netcheck":
            _add_netcheck(command)
    store_commands.add_commands(commands.add_parser, [shared])
    return parser


def _add_netcheck(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "peer",
        nargs="?",
        metavar="PEER",
        help="name, subnet, public IP, or a container's address; else a few",
    )
    command.add_argument("--container", metavar="IP", help="reach this container, too")
    command.add_argument(
        "--count", type=_count, default=5, metavar="NUMBER", help="packets of each kind (default: 5)"
    )
    command.add_argument(
        "--size", type=_count, default=0, metavar="BYTES", help="largest packet to try (default: the MTU)"
    )


def _seconds(text: str) -> float:
    """Parse a duration in seconds. Raises ``ArgumentTypeError`` for an invalid one."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no number of seconds")
    return float(text)


def _count(text: str) -> int:
    """Parse a number of packets. Raises ``ArgumentTypeError`` for an invalid one."""
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no number from 1 to 9999")
    return int(text)


def _act(arguments: argparse.Namespace, wanted: options.Options, *, as_json: bool) -> int:
    """Run a command on the store itself. Return 1 if it failed."""
    logging.getLogger().setLevel(logging.ERROR)
    try:
        shown, plain, wrong = arguments.run(wanted, arguments)
    except FlannelError as error:
        return _complain(str(error), PROBLEMS, as_json=as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{cause_of(error)}", PROBLEMS, as_json=as_json)
    _say(shown, lambda: plain, as_json=as_json)
    return PROBLEMS if wrong else FINE


def _complain(text: str, status: int, *, as_json: bool) -> int:
    sys.stderr.write(f"flannelctl: {text}\n")
    if as_json:
        _say([], lambda: {"error": text}, as_json=True)
    return status
