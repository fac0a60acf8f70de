"""Order of the tests, and their division among runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from tests.order import claimed, dealt, file_of, together

tests_of_files = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)).map(
    lambda counts: [f"{file}::{number}" for file, count in counts.items() for number in range(count)]
)
seconds_of_files = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 100))


@hypothesis.given(tests_of_files, st.integers(1, 5), seconds_of_files)
def test_order_has_each_test_once(tests: list[str], workers: int, seconds: dict[str, float]) -> None:
    assert sorted(dealt(tests, workers, seconds)) == sorted(tests)


def test_each_share_begins_with_files_that_take_long() -> None:
    tests = [f"{file}::{number}" for file in "abcdef" for number in range(3)]
    order = dealt(tests, 3, {"b": 40.0, "d": 60.0, "e": 30.0, "f": 4.0})
    assert [file_of(order[at]) for at in (0, 6, 12)] == ["d", "b", "e"]
    assert [file_of(test) for test in order if file_of(test) in "acf"] == [*"aaa", *"ccc", *"fff"]


def test_tests_of_a_file_that_share_a_network_follow_each_other() -> None:
    tests = ["a::1", "a::2", "a::3", "a::4", "b::1", "b::2"]
    shared = {"a::1": "udp", "a::2": "vxlan", "a::4": "udp", "b::2": "udp"}
    assert together(tests, shared) == ["a::1", "a::4", "a::2", "a::3", "b::1", "b::2"]


@hypothesis.given(tests_of_files, st.lists(st.integers(0, 2)))
def test_each_file_is_claimed_by_one_run(tests: list[str], turns: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [claimed(tests, Path(folder, "claims"), file_of) for _ in range(3)]
        begun = [(turn, test) for turn in turns if (test := next(runs[turn], None))]
        done = begun + [(number, test) for number, run in enumerate(runs) for test in run]
    assert sorted(test for _, test in done) == sorted(tests)
    assert len({(number, file_of(test)) for number, test in done}) == len(set(map(file_of, tests)))
