"""Write the manual pages and the shells' completions, out of the tables of options and commands.

``python -m dist.manual ROOT`` puts them below ``ROOT/usr/share``, where Debian's packages have them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
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


class Command(Struct, frozen=True):
    """One command of flannelctl: ``words`` call it, and ``options`` are its own.

    ``arguments`` are its operands. A command with actions, such as ``token``, has neither.
    """

    words: tuple[str, ...]
    meaning: str
    arguments: tuple[Word, ...] = ()
    options: tuple[Word, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def takes_file(self) -> bool:
        return any("FILE" in each.name for each in self.arguments)


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
    for program, words, known in (
        ("flanneld", daemon_options(), ()),
        ("flannelctl", command_options(), tuple(commands(command_line()))),
    ):
        made[f"bash-completion/completions/{program}"] = bash(program, words, known)
        made[f"zsh/vendor-completions/_{program}"] = zsh(program, words, known)
        made[f"fish/vendor_completions.d/{program}.fish"] = fish(program, words, known)
    return made


# ---- the tables ---------------------------------------------------------------------------------


def daemon_options() -> tuple[Word, ...]:
    """Return flanneld's flags by name, each with one dash as in its usage text."""
    return tuple(_flag(flag) for flag in sorted(FLAGS, key=lambda flag: flag.name))


def _flag(flag: Flag) -> Word:
    value, usage = value_and_usage(flag)
    return Word(f"-{flag.name}", usage.replace("\n", "; "), value)


def command_options() -> tuple[Word, ...]:
    """Return the options of all commands of flannelctl; it takes flanneld's too."""
    actions = command_line()._actions  # noqa: SLF001 - argparse has no other way to list them
    return tuple(_option(action) for action in actions if action.option_strings)


def _option(action: argparse.Action) -> Word:
    name = max(action.option_strings, key=len)
    value = "" if action.nargs == 0 else str(action.metavar or action.dest)
    return Word(name, action.help or "", value, tuple(action.choices or ()))


def commands(parser: argparse.ArgumentParser, before: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield flannelctl's commands, each before its actions."""
    shared = {option.name for option in command_options()}
    for action in parser._actions:  # noqa: SLF001
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            continue
        meanings = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
        for name, below in action.choices.items():
            if name not in meanings:
                continue  # a former name
            own = [each for each in below._actions if each.nargs != argparse.PARSER]  # noqa: SLF001
            options = (_option(each) for each in own if each.option_strings)
            yield Command(
                (*before, name),
                meanings[name],
                tuple(_operand(each) for each in own if not each.option_strings),
                tuple(option for option in options if option.name not in shared),
            )
            yield from commands(below, (*before, name))


def _operand(action: argparse.Action) -> Word:
    name = str(action.metavar or action.dest)
    return Word(f"[{name}]" if action.nargs == "?" else name, action.help or "")


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
        ("COMMANDS", [line for each in commands(command_line()) for line in command_entry(each)]),
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


def command_entry(command: Command) -> Iterator[str]:
    """Yield the lines of a command: its operands, and its own options below."""
    operands = "".join(f" \\fI{roff(each.name)}\\fR" for each in command.arguments)
    yield from (".TP", f"\\fB{roff(command.name)}\\fR{operands}", roff(command.meaning))
    details = definitions((each.name.strip("[]"), each.meaning) for each in command.arguments if each.meaning)
    details += entries(command.options)
    if details:
        yield from (".RS", *details, ".RE")


def definitions(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a list of terms."""
    return [line for term, meaning in pairs for line in (".TP", f"\\fB{roff(term)}\\fR", roff(meaning))]


def roff(text: str) -> str:
    """Quote a text for man(7): a backslash, a hyphen, and what would be a request at a line's start."""
    quoted = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{quoted}" if quoted[:1] in (".", "'") else quoted


# ---- completions --------------------------------------------------------------------------------


def bash(program: str, words: tuple[Word, ...], known: tuple[Command, ...]) -> str:
    """Return a completion for bash: file names after ``=`` and for a FILE, else the words that fit."""
    names = " | ".join(f"' {each.name}'" for each in known) or "''"
    cases = "\n".join(
        f"    '{''.join(f' {word}' for word in at)}') known='{' '.join(map(_bash_word, [*then, *words]))}' ;;"
        for at, then in _steps(known)
    )
    files = " | ".join(f"' {each.name}'" for each in known if each.takes_file) or "''"
    return f"""\
_{program}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} at= each known=
    if [[ $word = = || ${{COMP_WORDS[COMP_CWORD - 1]}} = = ]]; then
        COMPREPLY=($(compgen -f -- "${{word#=}}"))
        return
    fi
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$at $each" in {names}) at+=" $each" ;; esac
    done
    case "$at" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$known" -- "$word"))
    case "$at" in {files}) if [[ $word != -* ]]; then COMPREPLY+=($(compgen -f -- "$word")); fi ;; esac
    if [[ ${{COMPREPLY[0]}} = *= ]]; then compopt -o nospace; fi
}}
complete -F _{program} {program}
"""


def _bash_word(word: Word) -> str:
    return f"{word.name}{'=' if word.value else ''}"


def _steps(known: tuple[Command, ...]) -> Iterator[tuple[tuple[str, ...], list[Word]]]:
    """Yield each beginning of a command line with what may follow: commands or actions, and options."""
    for at, options in (((), ()), *((each.words, each.options) for each in known)):
        below = (each for each in known if each.words[:-1] == at)
        yield at, [*(Word(each.words[-1], each.meaning) for each in below), *options]


def zsh(program: str, words: tuple[Word, ...], known: tuple[Command, ...]) -> str:
    """Return a completion for zsh."""
    names = " | ".join(f"' {each.name}'" for each in known) or "''"
    shared = "\n".join(f"  {_zsh_quoted(_zsh_argument(word))}" for word in words)
    cases = []
    operands = {each.words: each.arguments for each in known}
    for at, then in _steps(known):
        options = [_zsh_argument(word) for word in then if word.name.startswith("-")]
        listed = " ".join(
            f"{word.name}\\:{_zsh_quoted(word.meaning)}" for word in then if not word.name.startswith("-")
        )
        places = [f"{number}: :()" for number in range(1, len(at) + 1)]
        places += [f"{len(at) + 1}:command:(({listed}))"] if listed else []
        places += [
            f"{number}:{word.name.strip('[]')}:{'_files' if 'FILE' in word.name else '()'}"
            for number, word in enumerate(operands.get(at, ()), len(at) + 1)
        ]
        case = " \\\n      ".join(["_arguments $shared", *map(_zsh_quoted, (*options, *places))])
        cases.append(f"  '{''.join(f' {word}' for word in at)}')\n    {case}\n    ;;")
    return f"""\
#compdef {program}
local at= each
local -a shared=(
{shared}
)
for each in "${{(@)words[2,CURRENT-1]}}"; do
  case "$at $each" in ({names}) at+=" $each" ;; esac
done
case "$at" in
{chr(10).join(cases)}
esac
"""


def _zsh_argument(word: Word) -> str:
    text = word.meaning.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    if not word.value:
        return f"{word.name}[{text}]"
    return f"{word.name}=[{text}]:{word.value}:{_zsh_values(word)}"


def _zsh_values(word: Word) -> str:
    return f"({' '.join(word.choices)})" if word.choices else "_files"


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish(program: str, words: tuple[Word, ...], known: tuple[Command, ...]) -> str:
    """Return a completion for fish."""
    lines = [f"complete -c {program}{_fish_option(word)}" for word in words]
    for at, then in _steps(known):
        condition = f" -n {_fish_quoted(_fish_condition(at, then))}" if known else ""
        for word in then:
            if word.name.startswith("-"):
                lines.append(f"complete -c {program}{condition}{_fish_option(word)}")
            else:
                about = f"-a {word.name} -d {_fish_quoted(word.meaning)}"
                lines.append(f"complete -c {program} -f{condition} {about}")
    return "".join(f"{line}\n" for line in lines)


def _fish_condition(at: tuple[str, ...], then: list[Word]) -> str:
    if not at:
        return "__fish_use_subcommand"
    names = [word.name for word in then if not word.name.startswith("-")]
    seen = [f"__fish_seen_subcommand_from {word}" for word in at]
    return "; and ".join([*seen, *([f"not __fish_seen_subcommand_from {' '.join(names)}"] if names else [])])


def _fish_option(word: Word) -> str:
    # One dash and a long name is what fish calls the old style.
    style, name = ("-l", word.name[2:]) if word.name.startswith("--") else ("-o", word.name[1:])
    value = f" -x -a {_fish_quoted(' '.join(word.choices))}" if word.choices else " -r" if word.value else ""
    return f" {style} {name}{value} -d {_fish_quoted(word.meaning)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
