"""What an operator reads of an error: problem and remedy, cause, text of others, limits of the process."""

from __future__ import annotations

import errno

import pytest

from flanneld.errors import (
    Fatal,
    NoAnswer,
    Retryable,
    cause_of,
    lacking,
    prefixed,
    printable,
    remembered,
    shown,
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(Fatal("no lease", "write one"), "no lease; write one", id="with a remedy"),
        pytest.param(Fatal("no lease"), "no lease", id="without one"),
    ],
)
def test_error_is_the_problem_and_its_remedy(error: Fatal, text: str) -> None:
    assert str(error) == text


def test_words_come_before_the_problem_of_what_is_fatal_and_nothing_else() -> None:
    with pytest.raises(Fatal) as caught, prefixed("Error registering network"):
        raise Fatal("no lease", "write one")
    assert str(caught.value) == "Error registering network: no lease; write one"
    assert caught.value.remedy == "write one"
    with pytest.raises(Retryable, match=r"^no answer$"), prefixed("Error registering network"):
        raise Retryable("no answer")


@pytest.mark.parametrize("reason", [NoAnswer("no answer", "wait", 7.0), Retryable("refused", "allow it")])
def test_failure_is_remembered_without_what_it_happened_in(reason: Retryable) -> None:
    try:
        raise reason
    except Retryable as raised:
        kept = remembered(raised)
    assert (type(kept), kept.problem, kept.remedy) == (type(reason), reason.problem, reason.remedy)
    assert (reason.__traceback__ is None, kept.__traceback__) == (False, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("the socket is closed"), "the socket is closed"),
        (ValueError("5 is too much"), "5 is too much"),
        (ValueError(), "ValueError"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_cause_is_told_without_a_number(error: Exception, text: str) -> None:
    assert cause_of(error) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain \u00e9", "plain \u00e9"),
        ("two\nlines", "two\\nlines"),
        ("\u202eback", "\\u202eback"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "... and 1 more"),
        ("\n" * 301, "\\n" * 200 + "... and 101 more"),
    ],
)
def test_text_of_others_is_one_line_of_what_prints_and_cut_where_it_is_long(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert printable(text).startswith(expected.partition("...")[0])


OUT_OF_MEMORY = "out of memory; raise the limit: ulimit -v, or MemoryMax= of the service"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            "out of file descriptors; raise the limit: ulimit -n, or LimitNOFILE= of the service",
        ),
        (
            RuntimeError("can't start new thread"),
            "cannot start a thread; raise the limit: ulimit -u and -v, or TasksMax= of the service",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OUT_OF_MEMORY),
        (ImportError("libffi.so.8: failed to map segment from shared object"), OUT_OF_MEMORY),
        (MemoryError(), OUT_OF_MEMORY),
        (SystemError("initialization failed without raising an exception"), OUT_OF_MEMORY),
        (OSError(errno.ENFILE, "Too many open files in system"), None),
        (OSError(errno.ENOENT, "No such file or directory"), None),
        (RuntimeError("dictionary changed size during iteration"), None),
        (ValueError("can't start new thread"), None),
        (ImportError("No module named 'grpc'"), None),
        (KeyError("failed to map segment"), None),
    ],
)
def test_limit_of_this_process_is_told_from_other_failures(error: Exception, told: str | None) -> None:
    lack = lacking(error)
    assert (lack and str(lack)) == told
