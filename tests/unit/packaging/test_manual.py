"""Manual pages and completions name every option and command, and their readers understand them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dist import manual
from flanneld.ctl.main import command_line
from flanneld.options import FLAGS

#: What each of flannelctl's commands takes beside the options of all of them.
OWN = {
    "status": ["--wait"],
    **{command: [] for command in ("peers", "routes", "nodes", "version")},
    "logs": ["PEER", "--follow"],
    "trace": ["--from-container"],
    "bundle": ["FILE"],
    "graph": ["--format"],
    "netcheck": ["PEER", "--container", "--count", "--size"],
    "doctor": ["--cluster", "--fix", "--yes"],
    "config get": ["--name"],
    "config set": ["FILE", "--yes", "--name"],
    "lease list": ["--name"],
    "lease delete": ["--yes", "--name"],
    "reservation list": ["--name"],
    "reservation add": ["--name"],
    "reservation remove": ["--name"],
    "token create": ["--lasts"],
    "token list": [],
    "token revoke": [],
    "store backup": [],
    "store restore": [],
    "store export": ["--dry-run"],
    "store import": ["--dry-run"],
}
PAGES = {"flanneld": manual.daemon_page(), "flannelctl": manual.command_page()}
LINES = PAGES["flannelctl"].splitlines()


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    assert manual.main([str(root)]) == 0
    return root / "usr/share"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_wrong_usage_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.main([]) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [flag.name for flag in FLAGS])
def test_page_of_the_daemon_has_each_flag(flag: str) -> None:
    assert f"\\fB\\-{flag.replace('-', chr(92) + '-')}\\fR" in PAGES["flanneld"]


@pytest.mark.parametrize(("words", "own"), OWN.items(), ids=str)
def test_page_of_flannelctl_has_each_command_with_its_own_options(words: str, own: list[str]) -> None:
    heads = {line: number for number, line in enumerate(LINES) if line.startswith("\\fB")}
    (at,) = (number for line, number in heads.items() if line.startswith(f"\\fB{words}\\fR"))
    end = LINES.index(".RE", at) if own else at
    said = "\n".join(LINES[at:end]).replace("\\-", "-")
    assert [name for name in own if f"fB{name}\\fR" not in said and f"fI{name}\\fR" not in said] == []


def test_the_commands_above_are_all_there_are() -> None:
    made = list(manual.commands(command_line()))
    groups = {each.words[0] for each in made if len(each.words) > 1}
    assert {each.name for each in made} == OWN.keys() | groups


@pytest.mark.parametrize("program", PAGES)
def test_page_is_sound(program: str, share: Path) -> None:
    lint = ("mandoc", "-T", "lint", "-W", "warning", str(share / f"man/man8/{program}.8"))
    found = subprocess.run(lint, capture_output=True, text=True, check=False).stdout.splitlines()
    assert [line for line in found if "missing date" not in line] == []


def options_of(words: str) -> list[tuple[str, str]]:
    """Return a command line to complete for each option of a command, and the option."""
    own = [name for name in OWN[words] if name.startswith("-")]
    return [(f"flannelctl {words} {name[:-1]}", name) for name in own]


CASES = [
    ("flannelctl st", "status"),
    ("flannelctl --out", "--output"),
    ("flannelctl peers --out", "--output"),
    ("flannelctl token cr", "create"),
    ("flanneld -iface-r", "-iface-regex"),
    ("flanneld -ip-b", "-ip-blackhole-route"),
    *(case for words in OWN for case in options_of(words)),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes(line: str, expected: str, share: Path) -> None:
    words = line.split()
    script = (
        f"compopt() {{ :; }}; source {share}/bash-completion/completions/{words[0]}; "
        f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _{words[0]}; echo "${{COMPREPLY[@]}}"'
    )
    assert expected in [found.rstrip("=") for found in output("bash", "-c", script).split()]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_completes(line: str, expected: str, share: Path) -> None:
    program = line.split(maxsplit=1)[0]
    script = f"source {share}/fish/vendor_completions.d/{program}.fish; complete -C '{line}'"
    assert expected in [
        found.split("\t")[0].rstrip("=") for found in output("fish", "--no-config", "-c", script).splitlines()
    ]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_options_of_one_command_are_not_offered_for_another(shell: str, share: Path) -> None:
    fish = f"{share}/fish/vendor_completions.d/flannelctl.fish"
    lines = {
        "bash": f"source {share}/bash-completion/completions/flannelctl; COMP_WORDS=(flannelctl peers --); "
        'COMP_CWORD=2; _flannelctl; printf "%s\\n" "${COMPREPLY[@]}"',
        "fish": f"source {fish}; complete -C 'flannelctl peers --'",
    }
    found = {line.split("\t")[0].rstrip("=") for line in output(shell, "-c", lines[shell]).splitlines()}
    assert "--output" in found
    assert found.isdisjoint(name for names in OWN.values() for name in names)


#: A shell on a terminal of its own types a line and a tab, and prints the line as it is then.
ZSH = r"""
zmodload zsh/zpty
zpty shell 'TERM=dumb zsh -f -i'
zpty -w shell "fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D
show() { zle -I; print -r -- '<<'\$BUFFER'>>' }; zle -N show; bindkey '^X' show; print READY\$((1))"
zpty -r shell line '*READY1*'
zpty -w -n shell "$2"$'\t\x18'
zpty -r shell line '*<<*>>*'
print -r -- "${${line##*<<}%%>>*}"
"""


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("flannelctl stat", "flannelctl status"),
        ("flannelctl status --wai", "flannelctl status --wait="),
        ("flannelctl --output=json reservation add --na", "flannelctl --output=json reservation add --name="),
        ("flanneld -iface-r", "flanneld -iface-regex="),
    ],
)
def test_zsh_completes(line: str, completed: str, share: Path) -> None:
    directory = share / "zsh/vendor-completions"
    assert output("zsh", "-f", "-c", ZSH, "zsh", str(directory), line).strip() == completed
