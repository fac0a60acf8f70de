from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from flanneld.compat import glog
from flanneld.compat.glog import V
from flanneld.errors import Fatal
from flanneld.runtime.logs import Once

log = logging.getLogger("flanneld.test_glog")
Stderr = pytest.CaptureFixture[str]
LINE = re.compile(r"([IWEF])(\d{4}) (\d\d:\d\d:\d\d\.\d{6}) ( *\d+) (\S+\.py):(\d+)\] (.*)")


def line_of(function: object) -> int:
    return function.__code__.co_firstlineno + 1  # type: ignore[attr-defined,no-any-return]


def messages(stderr: Stderr) -> list[str]:
    return [line.split("] ", 1)[1] for line in stderr.readouterr().err.splitlines()]


def test_a_line_is_glogs(capsys: Stderr) -> None:
    def say() -> None:
        log.info("subnet %s", "10.1.5.0/24")

    glog.setup()
    before = time.time()
    say()
    match = LINE.fullmatch(capsys.readouterr().err.removesuffix("\n"))
    assert match is not None
    letter, day, clock, pid, file, line, message = match.groups()
    assert (letter, file, int(line), message) == ("I", "test_glog.py", line_of(say), "subnet 10.1.5.0/24")
    assert pid == f"{os.getpid():>7}"
    year = time.localtime(before).tm_year
    when = time.mktime(time.strptime(f"{year}{day} {clock[:8]}", "%Y%m%d %H:%M:%S"))
    assert int(before) <= when + float(clock[8:]) <= time.time() + 1


def test_the_time_is_local_with_all_six_digits(capsys: Stderr) -> None:
    glog.setup()
    record = log.makeRecord("x", logging.INFO, "/src/main.py", 7, "up", (), None)
    record.created = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1)) + 0.000125
    log.handle(record)
    assert capsys.readouterr().err == f"I1121 12:00:00.000125 {os.getpid():>7} main.py:7] up\n"


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (V(4), "I"),
        (logging.DEBUG, "I"),
        (logging.INFO, "I"),
        (logging.WARNING, "W"),
        (logging.ERROR, "E"),
        (logging.CRITICAL, "F"),
    ],
)
def test_the_letter_tells_the_severity(capsys: Stderr, level: int, letter: str) -> None:
    glog.setup(verbosity=10)
    log.log(level, "x")
    assert capsys.readouterr().err.startswith(letter)


def test_verbosity_maps_to_levels_below_info() -> None:
    assert [V(n) for n in (-3, 0, 1, 4, 10, 19, 20, 1000)] == [20, 20, 19, 16, 10, 1, 1, 1]


@pytest.mark.parametrize(("verbosity", "shown"), [(-1, [0]), (0, [0]), (1, [0, 1]), (4, [0, 1, 2, 4])])
def test_verbosity_limits_the_shown_lines(capsys: Stderr, verbosity: int, shown: list[int]) -> None:
    glog.setup(verbosity)
    for n in (0, 1, 2, 4, 6):
        log.log(V(n), "%d", n)
    assert messages(capsys) == [str(n) for n in shown]


@pytest.mark.parametrize(
    ("vmodule", "shown"),
    [
        ("test_glog=2", 2),
        ("test_*=4", 4),
        ("test_glo?=4", 4),
        ("[^x]est_glog=4", 4),
        ("test_glog=2,test_*=4", 2),
        ("test_glog=0,test_*=4", 4),
        (",other=4,test_glog=6,", 6),
        ("other=4", 1),
        ("glog=4", 1),
        ("test_glog.py=4", 1),
        ("", 1),
    ],
)
def test_vmodule_raises_the_verbosity_of_single_files(capsys: Stderr, vmodule: str, shown: int) -> None:
    glog.setup(1, vmodule)
    for n in range(8):
        log.log(V(n), "%d", n)
    assert messages(capsys) == [str(n) for n in range(shown + 1)]


def test_vmodule_never_hides_anything(capsys: Stderr) -> None:
    glog.setup(4, "test_glog=1")
    log.log(V(4), "shown")
    assert messages(capsys) == ["shown"]


@pytest.mark.parametrize("vmodule", ["x", "x=", "=1", "x=y", "x=-1", "x=1=2", "a=1,b", "x=" + "9" * 5000])
def test_a_bad_vmodule_is_fatal(vmodule: str) -> None:
    with pytest.raises(Fatal, match="-vmodule") as caught:
        glog.setup(vmodule=vmodule)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "place", ["x", "main.py", "main.py:", "main:3", ":3", "main.py:0", "main.py:-1", "a.py:1:2"]
)
def test_a_bad_backtrace_place_is_fatal(place: str) -> None:
    with pytest.raises(Fatal, match="-log_backtrace_at") as caught:
        glog.setup(backtrace_at=place)
    assert caught.value.remedy


def test_a_bad_value_leaves_the_log_as_it_was(capsys: Stderr) -> None:
    glog.setup(verbosity=2)
    with pytest.raises(Fatal):
        glog.setup(vmodule="x")
    log.log(V(2), "still here")
    assert messages(capsys) == ["still here"]


def test_a_backtrace_place_adds_the_stack_there_and_nowhere_else(capsys: Stderr) -> None:
    def say() -> None:
        log.info("with")
        log.info("without")

    glog.setup(backtrace_at=f"test_glog.py:{line_of(say)}")
    say()
    first, *stack, last = capsys.readouterr().err.splitlines()
    assert first.endswith("] with")
    assert last.endswith("] without")
    assert 'log.info("with")' in stack[-1]
    assert any("in test_a_backtrace_place" in line for line in stack)
    assert all(line.startswith("    ") for line in stack)


def test_an_exception_is_told_below_its_line(capsys: Stderr) -> None:
    glog.setup()
    for text in ("two\nI1121 12:00:00.000000       1 main.py:1] forged", "one\rI1121 forged"):
        error = OSError(text)
        log.error("reading", exc_info=error)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines if not line.startswith("    ")] == ["reading", "reading"]
    assert "    OSError: two" in lines


def test_one_record_is_one_line_whatever_is_in_it(capsys: Stderr) -> None:
    glog.setup()
    log.warning("peer said %s", "a\nb\r\x1b[2J\x00\u2028c\td\u202ee\ufeff\U000e0041")
    assert messages(capsys) == ["peer said a\\nb\\r\\x1b[2J\\x00\\u2028c\td\\u202ee\\ufeff\\U000e0041"]


def test_a_second_setup_replaces_the_first(capsys: Stderr) -> None:
    glog.setup(verbosity=4)
    glog.setup(verbosity=0)
    log.info("once")
    log.log(V(1), "never")
    assert messages(capsys) == ["once"]


def test_libraries_keep_quiet_at_any_verbosity(capsys: Stderr) -> None:
    glog.setup(verbosity=20)
    for name in ("urllib3.connectionpool", "pyroute2.netlink", "etcd.client"):
        logging.getLogger(name).info("chatter of %s", name)
    logging.getLogger("etcd.client").error("what is raised as well")
    logging.getLogger("urllib3.connectionpool").warning("Failed to parse headers")
    logging.getLogger("urllib3.connectionpool").error("trouble")
    assert messages(capsys) == ["trouble"]


def test_threads_never_mix_their_lines(capsys: Stderr) -> None:
    def chat(name: str) -> None:
        for n in range(200):
            log.info("%s %d", name * 20, n)

    glog.setup()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=chat, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(switch)
    said = messages(capsys)
    assert sorted(said) == sorted(f"{name * 20} {n}" for name in "abcd" for n in range(200))


def test_a_complaint_is_made_once_until_its_text_changes(capsys: Stderr) -> None:
    glog.setup()
    once = Once()
    for text in ("no route", "no route", "no device", "no device", "no route"):
        once.warn(log, "peer", text)
    once.warn(log, "other", "no route")
    assert messages(capsys) == ["no route", "no device", "no route", "no route"]


def test_a_cleared_complaint_is_made_again(capsys: Stderr) -> None:
    glog.setup()
    once = Once()
    assert not once.clear("peer")
    once.warn(log, "peer", "no route")
    assert once.clear("peer")
    assert not once.clear("peer")
    once.warn(log, "peer", "no route")
    assert messages(capsys) == ["no route", "no route"]


def test_a_complaint_is_logged_in_the_place_of_its_caller(capsys: Stderr) -> None:
    def say() -> None:
        Once().warn(log, "peer", "100% of %s")

    glog.setup()
    say()
    line = capsys.readouterr().err
    assert line.startswith("W")
    assert line.endswith(f" test_glog.py:{line_of(say)}] 100% of %s\n")


def test_complaints_beyond_the_limit_are_left_out_after_one_notice(capsys: Stderr) -> None:
    glog.setup()
    once = Once(limit=2)
    for key in "abcdabcd":
        once.warn(log, key, f"about {key}")
    once.warn(log, "a", "news of a")
    first, second, notice, news = messages(capsys)
    assert (first, second, news) == ("about a", "about b", "news of a")
    assert "more than 2" in notice


def test_a_settled_complaint_makes_room_for_another(capsys: Stderr) -> None:
    glog.setup()
    once = Once(limit=1)
    for key in "ab":
        once.warn(log, key, f"about {key}")
    assert once.clear("a")
    assert not once.clear("b")
    for key in "bab":
        once.warn(log, key, f"about {key}")
    _, notice, after, again = messages(capsys)
    assert after == "about b"
    assert again == notice


class SlowKey:
    """Lets other threads run in the middle of every look-up."""

    def __hash__(self) -> int:
        time.sleep(0.005)
        return 1


def test_threads_share_one_complaint(capsys: Stderr) -> None:
    glog.setup()
    once = Once()
    key = SlowKey()
    start = threading.Barrier(4)

    def complain() -> None:
        start.wait(30)
        once.warn(log, key, "no route")

    threads = [threading.Thread(target=complain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert messages(capsys) == ["no route"]


TO_JOURNAL = """
import logging, os, sys
from flanneld.compat import glog
found = os.fstat(int(sys.argv[1]))
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
glog.setup(verbosity=1)
log = logging.getLogger("x")
log.log(glog.V(1), "detail")
log.info("news")
log.warning("condition")
try:
    raise ValueError("a bug")
except ValueError:
    log.exception("mistake")
log.critical("end")
"""


def journal(descriptor: int) -> list[str]:
    program = [sys.executable, "-c", TO_JOURNAL, str(descriptor)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stderr.splitlines()


def test_each_line_for_the_journal_has_its_priority() -> None:
    lines = journal(2)
    assert [line[:3] for line in lines if "] " in line] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    trace = [line for line in lines if "] " not in line]
    assert trace[0] == "<3>    Traceback (most recent call last):"
    assert {line[:7] for line in trace} == {"<3>    "}


def test_lines_for_anything_but_the_journal_are_as_ever() -> None:
    assert [line[0] for line in journal(0) if "] " in line] == ["I", "I", "W", "E", "F"]


@pytest.mark.parametrize(("number", "text"), [(0, "0 peers"), (1, "1 peer"), (2, "2 peers")])
def test_counted_noun_has_the_right_number(number: int, text: str) -> None:
    assert glog.counted(number, "peer") == text
