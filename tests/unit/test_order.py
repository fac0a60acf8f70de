"""Order of the tests, and their parts."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from tests.order import dealt, file_of, part

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


@hypothesis.given(tests_of_files, st.integers(1, 4))
def test_parts_have_each_test_once_and_whole_files(tests: list[str], parts: int) -> None:
    found = [part(tests, number, parts) for number in range(1, parts + 1)]
    assert sorted(test for tests in found for test in tests) == sorted(tests)
    files = [file for tests in found for file in {file_of(test) for test in tests}]
    assert len(files) == len(set(files))
