"""Enumerator of choices: a story is told once for each way it can go, instead of for some by chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    """The choices of one telling: those ``taken``, then the first option of each.

    Which choices come, and how many options they have, may depend on those before. The story must do the same
    after the same choices.
    """

    def __init__(self, taken: Sequence[int] = ()) -> None:
        self._begun = tuple(taken)
        #: Number of the chosen option, and number of options, of each choice so far.
        self._made: list[tuple[int, int]] = []

    def pick(self, options: Sequence[Option]) -> Option:
        """Return one of the options."""
        at = len(self._made)
        number = self._begun[at] if at < len(self._begun) else 0
        assert number < len(options), "the story went another way after the same choices"
        self._made.append((number, len(options)))
        return options[number]

    @property
    def taken(self) -> tuple[int, ...]:
        """Return the choices so far, which repeat this telling."""
        return tuple(number for number, _ in self._made)

    def after(self) -> Choices | None:
        """Return the choices of the next telling, in which the last choice has its next option, or None."""
        made = list(self._made)
        while made:
            number, options = made.pop()
            if number + 1 < options:
                return Choices([*(each for each, _ in made), number + 1])
        return None


def every(tell: Callable[[Choices], object]) -> int:
    """Tell a story in every way. Return the number of ways; a failure names the choices that led to it."""
    ways, choices = 0, Choices()
    while True:
        try:
            tell(choices)
        except BaseException as failure:
            failure.add_note(f"repeat with Choices({choices.taken})")
            raise
        ways += 1
        following = choices.after()
        if following is None:
            return ways
        choices = following
