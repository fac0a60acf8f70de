"""Manual pages and completions name every option and command, and their readers understand them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dist import manual
from flanneld.ctl.main import COMMANDS
from flanneld.options import FLAGS

PAGES = {"flanneld": manual.daemon_page(), "flannelctl": manual.command_page()}


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


@pytest.mark.parametrize("command", COMMANDS)
def test_page_of_flannelctl_has_each_command(command: str) -> None:
    assert f"\n\\fB{command}\\fR\n" in PAGES["flannelctl"]


@pytest.mark.parametrize("program", PAGES)
def test_page_is_sound(program: str, share: Path) -> None:
    lint = ("mandoc", "-T", "lint", "-W", "warning", str(share / f"man/man8/{program}.8"))
    found = subprocess.run(lint, capture_output=True, text=True, check=False).stdout.splitlines()
    assert [line for line in found if "missing date" not in line] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flannelctl st", "status"),
        ("flannelctl --out", "--output="),
        ("flanneld -iface-r", "-iface-regex="),
        ("flanneld -ip-b", "-ip-blackhole-route"),
    ],
)
def test_bash_completes(words: str, expected: str, share: Path) -> None:
    program, word = words.split()
    script = (
        f"compopt() {{ :; }}; source {share}/bash-completion/completions/{program}; "
        f'COMP_WORDS=({program} {word}); COMP_CWORD=1; _{program}; echo "${{COMPREPLY[@]}}"'
    )
    assert expected in output("bash", "-c", script).split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [("flannelctl st", "status"), ("flannelctl --out", "--output"), ("flanneld -iface-r", "-iface-regex")],
)
def test_fish_completes(words: str, expected: str, share: Path) -> None:
    program = words.split(maxsplit=1)[0]
    script = f"source {share}/fish/vendor_completions.d/{program}.fish; complete -C '{words}'"
    assert expected in [
        line.split("\t")[0] for line in output("fish", "--no-config", "-c", script).splitlines()
    ]


@pytest.mark.parametrize("program", PAGES)
def test_zsh_can_read_its_completion(program: str, share: Path) -> None:
    output("zsh", "-n", str(share / f"zsh/vendor-completions/_{program}"))
