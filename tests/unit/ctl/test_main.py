"""``flannelctl`` as scripts use it: what is on standard output, and the exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flanneld import __version__
from flanneld.ctl.commands import COMMANDS, naming
from flanneld.ctl.main import FINE, NO_DAEMON, PROBLEMS, USAGE, _problem_of, parse, run
from flanneld.ctl.output import when
from flanneld.ctl.source import last_words
from flanneld.diagnostics.serving import StatusSocket
from flanneld.diagnostics.status import Status
from tests.unit.ctl.documents import status_of

DEADLINE = 20.0


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    """A host without daemon and subnet file."""
    return [f"--subnet-file={tmp_path / 'subnet.env'}"]


@contextmanager
def daemon(directory: Path, said: bytes) -> Iterator[None]:
    server = StatusSocket.open(directory / "flanneld.sock", lambda: [said])
    assert server
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield
    finally:
        server.close()
        thread.join(DEADLINE)


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


WRONG = [
    ["nonsense"],
    ["trace"],
    ["trace", "nowhere"],
    ["status", "--nonsense=1"],
    ["status", "--etcd-endpoints=nonsense"],
    ["status", "more"],
    ["ping", "10.5.1.0", "--count=0"],
    ["netcheck", "10.5.1.0", "--size=0"],
    ["status", "--watch", "more"],
    ["help", "nonsense"],
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_usage_is_told_in_json_too(
    words: list[str], where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, *(where if words else []), "--output=json"], {}) == USAGE
    assert told(capsys)["error"]
    assert run([*words, *(where if words else [])], {}) == USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("flannelctl: ")


@pytest.mark.parametrize("words", [[], ["--output=table"], ["--etcd-endpoints=http://192.0.2.1:2379"]])
def test_words_of_no_command_show_all_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words, {}) == FINE
    output = capsys.readouterr()
    assert output.err == ""
    assert all(f"\n    {command} " in output.out for command in COMMANDS)


def test_json_without_a_command_is_an_error_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--output=json"], {}) == USAGE
    assert "no command" in told(capsys)["error"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["help"], "COMMAND"), (["help", "bundle"], "FILE"), (["help", "token", "create"], "--lasts")],
)
def test_help_is_a_command_too(words: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run(words, {})
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["stauts"], '"stauts" is unknown, did you mean status?'),
        (["netchek"], "did you mean netcheck?"),
        (["token", "crate"], "did you mean create?"),
        (["status", "--output=jsn"], "did you mean json?"),
        (["qqq"], "is unknown, choose from status, "),
    ],
)
def test_unknown_word_names_the_most_similar_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, {}) == USAGE
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-healthz-port=1", "-v=2", "--subnet-dir=/x", "-ip-masq"])
def test_flag_of_the_daemon_is_taken_whatever_its_first_letter(flag: str) -> None:
    for words in ([flag, "events"], ["events", flag]):
        arguments, flags = parse(words)
        assert (arguments.command, [each.lstrip("-") for each in flags]) == ("events", [flag.lstrip("-")])


def test_version_is_of_both_ends(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["version", *where, "-o", "json"], {}) == NO_DAEMON
    alone = told(capsys)
    assert (alone["flannelctl"], alone["flanneld"]) == (__version__, None)
    with daemon(tmp_path, b'{"version": "99"}'):
        assert run(["version", *where], {}) == FINE
    assert capsys.readouterr().out.splitlines() == [f"flannelctl  {__version__}", "flanneld    99"]
    assert run(["events", "-version"], {}) == FINE
    assert capsys.readouterr().out == f"{__version__}\n"


def test_wide_output_has_more_columns(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = {"subnets": ["10.5.2.0/24"], "state": "pending", "macs": ["02:00:00:00:00:02"], "expires": 1e9}
    peer["also"] = "wireguard"
    with daemon(tmp_path, json.dumps({"version": "1", "peers": [peer]}).encode()):
        shown = {}
        for words in (["peers"], ["peers", "-o", "wide"], ["nodes", "-o=wide"]):
            run([*words, *where], {})
            shown[" ".join(words)] = capsys.readouterr().out
    assert "02:00:00:00:00:02" not in shown["peers"]
    assert "02:00:00:00:00:02" in shown["peers -o wide"]
    assert "LEASE ENDS" in shown["peers -o wide"].splitlines()[0]
    for each in ("peers -o wide", "nodes -o=wide"):
        assert f"wireguard  02:00:00:00:00:02  {when(1e9)}" in shown[each]


@pytest.mark.parametrize("words", [["--output", "json", "logs"], ["events", "--output", "json"]])
def test_the_format_may_be_given_before_or_behind_the_command(
    words: list[str], where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, *where], {}) == NO_DAEMON
    assert told(capsys)["events"] == []


@pytest.mark.parametrize(
    "words", [["netcheck", "10.5.2.0/24"], ["trace", "127.0.0.1"], ["peers"]], ids=" ".join
)
def test_what_only_a_daemon_knows_is_no_wrong_usage(
    words: list[str], where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, *where, "--output=json"], {}) == NO_DAEMON
    assert told(capsys)


GARBAGE = [b"", b"{", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"HTTP/1.1 200 OK"]


@pytest.mark.parametrize("said", GARBAGE)
def test_what_is_no_status_counts_as_no_daemon(
    said: bytes, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path, said):
        assert run(["status", *where, "--output=json"], {}) == NO_DAEMON
    assert "no daemon answers" in told(capsys)["not_known"][0]


OTHER_TYPES = b'{"peers": 1, "events": [1], "network": [], "devices": 7}'
#: Texts that no address, network or object is.
OTHER_TEXTS = b"""{
    "version": "99", "network": {"ranges": [{"network": "a", "subnet_len": 24}]}, "mtu": 1450,
    "lease": {"subnets": ["b"]},
    "uplink": {"name": "lo", "mtu": 1500, "addresses": ["c"], "public_ips": ["d"]},
    "local": [{"kind": "link", "text": "e", "value": {"type": "Hyperlink"}, "in_kernel": true}],
    "peers": [{"subnets": ["f"], "public_ips": ["g"], "state": "in the kernel"}]
}"""


@pytest.mark.parametrize("command", sorted(COMMANDS))
@pytest.mark.parametrize("said", [OTHER_TYPES, OTHER_TEXTS])
def test_a_daemon_of_another_version_is_no_reason_to_fall_over(
    command: str, said: bytes, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *(["192.0.2.1"] if command == "trace" else []), *where]
    words += [str(tmp_path / "archive")] if command == "bundle" else []
    with daemon(tmp_path, said):
        run([*words, "--output=json"], {})
    assert "a bug" not in told(capsys).get("error", "")


def test_a_status_without_a_version_is_said_to_be_not_understood(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path, b"{}"):
        assert run(["status", *where, "--output=json"], {}) == PROBLEMS
    assert "use the flannelctl of its version" in told(capsys)["not_known"][0]


def test_part_that_is_not_understood_leaves_the_others(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path, b'{"version": "99", "devices": 7, "mtu": 1450}'):
        assert run(["status", *where], {}) == PROBLEMS
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert (rows["MTU"], rows["devices"]) == ("1450", "unknown")
    assert "devices: Expected `array`" in rows["not"]


def test_text_that_is_not_understood_is_said_to_be_so(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path, OTHER_TEXTS):
        assert run(["trace", "192.0.2.1", *where, "--output=json"], {}) == PROBLEMS
    assert "use the flannelctl of its version" in told(capsys)["error"]


def test_json_has_the_keys_of_a_newer_daemon_and_none_that_it_does_not_tell(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = {"subnets": ["10.5.2.0/24"], "vnis": [True], "colour": "blue", "state": "pending"}
    said = {"version": "99", "lease": None, "moon": {"phase": 1}, "peers": [peer]}
    with daemon(tmp_path, json.dumps(said).encode()):
        assert run(["peers", *where, "--output=json"], {}) == FINE
        assert told(capsys) == {"peers": [peer], "not_known": []}
        assert run(["status", *where, "--output=json"], {}) == FINE
        rest = {"version": "99", "lease": None, "moon": {"phase": 1}}
        assert told(capsys) == {"origin": "daemon", **rest, "not_known": []}


def test_error_of_another_kind_is_called_a_bug_with_its_place() -> None:
    nothing: dict[str, int] = {}
    with pytest.raises(KeyError) as caught:
        nothing["name"]
    said, status = _problem_of(caught.value)
    assert re.fullmatch(
        r"a bug of flannelctl \(KeyError: 'name'; test_main.py, line \d+\); please report it", said
    )
    assert status == PROBLEMS


@pytest.mark.parametrize(
    ("flags", "environ", "is_asked"),
    [
        ([], {}, False),
        (["-iface=etcd-endpoints"], {}, False),
        (["-kube-subnet-mgr=false"], {}, False),
        ([], {"FLANNELD_ETCD_ENDPOINTS": ""}, False),
        (["-etcd-endpoints=http://127.0.0.1:1"], {}, True),
        ([], {"FLANNELD_ETCD_ENDPOINTS": "http://127.0.0.1:1"}, True),
        (["-remote=127.0.0.1:1"], {}, True),
        ([], {"FLANNELD_REMOTE": "127.0.0.1:1"}, True),
        (["-store=/nonexistent/leases.db"], {}, True),
        (["-kube-subnet-mgr", "-kube-api-url=http://127.0.0.1:1"], {}, True),
    ],
)
def test_store_is_asked_if_a_flag_or_a_variable_names_it(
    flags: list[str],
    environ: dict[str, str],
    is_asked: bool,
    where: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(["peers", *where, *flags, "--output=json"], environ)
    why = told(capsys)["not_known"][1]
    assert (why == "the store was not asked: give -etcd-endpoints") is not is_asked


def test_daemon_answers_though_its_subnet_file_has_a_name_that_is_no_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    file = str(folder / "subnet.env")
    with daemon(folder, json.dumps({"version": "1", "subnet_file": file, "events": []}).encode()):
        assert run(["events", f"-subnet-file={file}", "--output=json"], {}) == FINE
    assert told(capsys) == {"events": [], "not_known": []}


def test_a_pipe_that_nobody_reads_is_no_error(where: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from flanneld.ctl.main import main; main()"
    with os.fdopen(writing, "w") as pipe:
        command = [sys.executable, "-c", code, "doctor", *where]
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.stderr == ""
    assert done.returncode == PROBLEMS


def event(severity: str, text: str, source: str = "main") -> dict[str, Any]:
    return {"time": 0.0, "severity": severity, "source": source, "text": text}


FIRST, LOST, ERROR = (
    event("I", "flanneld 1.0 -v=0"),
    event("W", "etcd is away") | {"time": 60.0},
    event("E", "no etcd", "startup"),
)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], ""),
        ([FIRST, LOST], "its log ends 1970-01-01T00:01:00Z: etcd is away"),
        ([FIRST, ERROR, LOST], "its last error, 1970-01-01T00:00:00Z: no etcd"),
        ([FIRST, event("F", "ended"), LOST], "its last error, 1970-01-01T00:00:00Z: ended"),
        ([FIRST, ERROR, FIRST, LOST], "its log ends 1970-01-01T00:01:00Z: etcd is away"),
        (
            [ERROR, event("I", "flanneld is no start", "peers")],
            "its last error, 1970-01-01T00:00:00Z: no etcd",
        ),
    ],
)
def test_last_words_are_the_last_error_of_the_last_run_or_the_end_of_its_log(
    events: list[dict[str, Any]], said: str
) -> None:
    assert last_words(status_of({"events": events})) == said
    assert last_words(Status()) == ""


@pytest.mark.parametrize(
    ("text", "is_about"),
    [
        ("Restored route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink", True),
        ("fdb 02:00:00:00:00:0A dst 198.18.0.2 dev flannel.1", True),
        ("No answer from 198.18.0.2:8472.", True),
        ("No answer from 198.18.0.20", False),
        ("No answer from 1198.18.0.2", False),
        ("Restored route 110.5.2.0/24", False),
        ("Restored route 10.5.3.0/24", False),
        ("No answer from 2001:db8::2: timeout", True),
        ("No answer from 2001:db8::2:1", False),
        ("Node worker-2 has no podCIDR", True),
        ("Node worker-20 has no podCIDR", False),
    ],
)
def test_lines_of_the_log_about_a_peer_have_one_of_its_names(text: str, is_about: bool) -> None:
    peer = {"subnets": ["10.5.2.0/24"], "public_ips": ["198.18.0.2", "2001:db8::2"]}
    status = status_of({"peers": [peer | {"macs": ["02:00:00:00:00:0a"], "node": "worker-2"}]})
    names = ("10.5.2.0/24", "198.18.0.2", "10.5.2.9", "worker-2")
    assert [naming(status, name)(text) for name in names] == 4 * [is_about]


def test_lines_about_a_node_that_has_left_are_found_by_the_name_that_is_given() -> None:
    is_about = naming(Status(), "10.5.9.0/24")
    assert is_about("Lease 10.5.9.0/24 is gone")
    assert not is_about("Lease 10.5.8.0/24 is gone")
