"""Order of the tests, and their parts."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from tests.order import dealt, file_of, part, together

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


@hypothesis.given(tests_of_files, st.integers(1, 4), seconds_of_files)
def test_parts_have_each_test_once_and_whole_files(
    tests: list[str], parts: int, seconds: dict[str, float]
) -> None:
    found = [part(tests, number, parts, seconds) for number in range(1, parts + 1)]
    assert sorted(test for tests in found for test in tests) == sorted(tests)
    files = [file for tests in found for file in {file_of(test) for test in tests}]
    assert len(files) == len(set(files))


def test_parts_take_about_as_long_and_begin_with_the_slowest_file() -> None:
    tests = [f"{file}::{number}" for file in "abcde" for number in range(2)]
    seconds = {"a": 10.0, "b": 40.0, "c": 30.0, "d": 25.0}
    found = [[file_of(test) for test in part(tests, number, 2, seconds)] for number in (1, 2)]
    assert found == [["b", "b", "a", "a", "e", "e"], ["c", "c", "d", "d"]]
