"""Write the manual pages and the shells' completions, out of the tables of options and commands.

``python -m dist.manual ROOT`` puts them below ``ROOT/usr/share``, where Debian's packages have them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from flanneld import __version__
from flanneld.compat.flags import Flag, value_and_usage, variable
from flanneld.ctl.main import command_line
from flanneld.options import FLAGS, PREFIX

SECTION = 8
FILES = (
    ("/run/flannel/subnet.env", "this node's subnet, for docker and CNI"),
    ("/run/flannel/flanneld.sock", "the socket that answers flannelctl"),
    ("/etc/kube-flannel/net-conf.json", "the network config, with Kubernetes"),
    ("/var/lib/flannel", "the directory of what must outlive a reboot"),
)
DAEMON_STATUS = (
    ("0", "it was told to stop"),
    ("1", "it failed; the log's last lines say why"),
    ("2", "the command line makes no sense"),
)
COMMAND_STATUS = (
    ("0", "all is fine"),
    ("1", "problems were found"),
    ("2", "the command line makes no sense"),
    ("3", "no daemon answers, and no problem was found without it"),
)


class Word(Struct, frozen=True):
    """One option or command: ``value`` names what follows it, ``choices`` lists its possible values."""

    name: str
    meaning: str
    value: str = ""
    choices: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """Write all files below the directory that the only argument names."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\nUsage: python -m dist.manual ROOT\n")
        return 2
    share = Path(arguments[0]) / "usr/share"
    for name, text in files().items():
        path = share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def files() -> dict[str, str]:
    """Return the contents of each file by its path below ``/usr/share``."""
    made = {f"man/man{SECTION}/flanneld.{SECTION}": daemon_page()}
    made[f"man/man{SECTION}/flannelctl.{SECTION}"] = command_page()
    for program, words, commands in (
        ("flanneld", daemon_options(), ()),
        ("flannelctl", command_options(), subcommands()),
    ):
        made[f"bash-completion/completions/{program}"] = bash(program, words, commands)
        made[f"zsh/vendor-completions/_{program}"] = zsh(program, words, commands)
        made[f"fish/vendor_completions.d/{program}.fish"] = fish(program, words, commands)
    return made


# ---- the tables ---------------------------------------------------------------------------------


def daemon_options() -> tuple[Word, ...]:
    """Return flanneld's flags by name, each with one dash as in its usage text."""
    return tuple(_flag(flag) for flag in sorted(FLAGS, key=lambda flag: flag.name))


def _flag(flag: Flag) -> Word:
    value, usage = value_and_usage(flag)
    return Word(f"-{flag.name}", usage.replace("\n", "; "), value)


def command_options() -> tuple[Word, ...]:
    """Return flannelctl's own options; it takes flanneld's too."""
    actions = command_line()._actions  # noqa: SLF001 - argparse has no other way to list them
    return tuple(_option(action) for action in actions if action.option_strings)


def _option(action: argparse.Action) -> Word:
    name = max(action.option_strings, key=len)
    value = "" if action.nargs == 0 else str(action.metavar or action.dest)
    return Word(name, action.help or "", value, tuple(action.choices or ()))


def subcommands() -> tuple[Word, ...]:
    """Return flannelctl's commands with what each is for."""
    return tuple(
        Word(choice.dest, choice.help or "")
        for action in command_line()._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        for choice in action._choices_actions  # noqa: SLF001
    )


# ---- manual pages -------------------------------------------------------------------------------


def daemon_page() -> str:
    """Return flanneld's manual page in man(7)'s language."""
    variables = (
        f"Each flag may be given as an environment variable: \\fB{roff(variable('iface-regex', PREFIX))}\\fR stands for "
        "\\fB\\-iface\\-regex\\fR. The command line wins."
    )
    return page(
        "flanneld",
        "give this host a subnet of a cluster network",
        "\\fBflanneld\\fR [\\fB\\-flag\\fR=\\fIvalue\\fR ...]",
        "Takes a lease of a subnet from etcd, Kubernetes or a flannel server, programs routes and tunnels to the "
        "other hosts, and keeps them.",
        ("OPTIONS", entries(daemon_options())),
        ("ENVIRONMENT", [".PP", variables]),
        ("FILES", definitions(FILES)),
        ("EXIT STATUS", definitions(DAEMON_STATUS)),
        ("SEE ALSO", [".PP", f"\\fBflannelctl\\fR({SECTION})"]),
    )


def command_page() -> str:
    """Return flannelctl's manual page in man(7)'s language."""
    return page(
        "flannelctl",
        "show what flannel does on this host",
        "\\fBflannelctl\\fR \\fICOMMAND\\fR [\\fIoption\\fR ...]",
        f"Asks the daemon through its socket and reads the kernel itself. It takes the flags of \\fBflanneld\\fR({SECTION}) "
        "too; with \\fB\\-etcd\\-endpoints\\fR it asks the store if no daemon answers.",
        ("COMMANDS", entries(subcommands())),
        ("OPTIONS", entries(command_options())),
        ("EXIT STATUS", definitions(COMMAND_STATUS)),
        ("SEE ALSO", [".PP", f"\\fBflanneld\\fR({SECTION})"]),
    )


def page(name: str, purpose: str, synopsis: str, description: str, *sections: tuple[str, list[str]]) -> str:
    """Lay a page out; synopsis, description and sections are in man(7)'s language already."""
    lines = [f'.TH {name.upper()} {SECTION} "" "flannel {__version__}"']
    lines += [
        ".SH NAME",
        f"{name} \\- {roff(purpose)}",
        ".SH SYNOPSIS",
        synopsis,
        ".SH DESCRIPTION",
        description,
    ]
    for title, body in sections:
        lines += [f".SH {title}", *(body[1:] if body[:1] == [".PP"] else body)]
    return "\n".join(lines) + "\n"


def entries(words: tuple[Word, ...]) -> list[str]:
    """Return the lines of a list of options or commands."""
    lines = []
    for word in words:
        value = f"=\\fI{roff('|'.join(word.choices) or word.value)}\\fR" if word.value else ""
        lines += [".TP", f"\\fB{roff(word.name)}\\fR{value}", roff(word.meaning)]
    return lines


def definitions(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the lines of a list of terms."""
    return [line for term, meaning in pairs for line in (".TP", f"\\fB{roff(term)}\\fR", roff(meaning))]


def roff(text: str) -> str:
    """Quote a text for man(7): a backslash, a hyphen, and what would be a request at a line's start."""
    quoted = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{quoted}" if quoted[:1] in (".", "'") else quoted


# ---- completions --------------------------------------------------------------------------------


def bash(program: str, words: tuple[Word, ...], commands: tuple[Word, ...]) -> str:
    """Return a completion for bash: file names after ``=``, else the words that fit."""
    known = " ".join(
        [*(word.name for word in commands), *(f"{word.name}{'=' if word.value else ''}" for word in words)]
    )
    return f"""\
_{program}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [[ $word = = || ${{COMP_WORDS[COMP_CWORD - 1]}} = = ]]; then
        COMPREPLY=($(compgen -f -- "${{word#=}}"))
        return
    fi
    COMPREPLY=($(compgen -W '{known}' -- "$word"))
    if [[ ${{COMPREPLY[0]}} = *= ]]; then compopt -o nospace; fi
}}
complete -F _{program} {program}
"""


def zsh(program: str, words: tuple[Word, ...], commands: tuple[Word, ...]) -> str:
    """Return a completion for zsh."""
    arguments = [_zsh_argument(word) for word in words]
    if commands:
        listed = " ".join(f"{word.name}\\:{_zsh_quoted(word.meaning)}" for word in commands)
        arguments.append(f"1:command:(({listed}))")
    return " \\\n  ".join([f"#compdef {program}\n_arguments", *map(_zsh_quoted, arguments)]) + "\n"


def _zsh_argument(word: Word) -> str:
    text = word.meaning.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    if not word.value:
        return f"{word.name}[{text}]"
    return f"{word.name}=[{text}]:{word.value}:{_zsh_values(word)}"


def _zsh_values(word: Word) -> str:
    return f"({' '.join(word.choices)})" if word.choices else "_files"


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish(program: str, words: tuple[Word, ...], commands: tuple[Word, ...]) -> str:
    """Return a completion for fish."""
    return "".join(f"{line}\n" for line in _fish(program, words, commands))


def _fish(program: str, words: tuple[Word, ...], commands: tuple[Word, ...]) -> Iterator[str]:
    for word in commands:
        yield f"complete -c {program} -f -n __fish_use_subcommand -a {word.name} -d {_fish_quoted(word.meaning)}"
    for word in words:
        # One dash and a long name is what fish calls the old style.
        style, name = ("-l", word.name[2:]) if word.name.startswith("--") else ("-o", word.name[1:])
        value = (
            f" -x -a {_fish_quoted(' '.join(word.choices))}" if word.choices else " -r" if word.value else ""
        )
        yield f"complete -c {program} {style} {name}{value} -d {_fish_quoted(word.meaning)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
