"""Mutants of a module: cosmic-ray's operators and two of our own, and a sample that a seed decides."""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Name

Position = tuple[int, int]
Span = tuple[Position, Position]

#: Identity for equality, or the reverse: the difference is an accident of the interpreter.
_IDENTITY = re.compile(r".*_((Eq|NotEq|Lt|LtE|Gt|GtE)_(Is|IsNot)|Is_Eq|IsNot_NotEq)")


class RemoveStatement(Operator):  # type: ignore[misc]
    """Replaces a statement with an effect by ``pass``.

    Leaves local names alone, since without them every function fails, and constructors.
    """

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type != "simple_stmt" or not self._has_effect(node.children[0]):
            return
        function = node.search_ancestor("funcdef")
        if function is not None and function.name.value != "__init__":
            statement = node.children[0]
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del index
        statement = node.children[0]
        node.children[0] = Name("pass", statement.start_pos, prefix=statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()

    @staticmethod
    def _has_effect(statement: Any) -> bool:
        if statement.type == "expr_stmt":
            target, operator = statement.children[0].get_code(), statement.children[1].get_code().strip()
            return operator != "=" or "." in target or "[" in target
        return statement.type in ("atom_expr", "power", "yield_expr", "raise_stmt", "del_stmt")


class ReturnNone(Operator):  # type: ignore[misc]
    """Replaces the value of a ``return`` by None, unless it is False: few callers tell these apart."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type == "return_stmt" and len(node.children) == 2:
            value = node.children[1]
            if value.get_code().strip() not in ("None", "False"):
                yield value.start_pos, value.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del index
        node.children[1] = Name("None", node.children[1].start_pos, prefix=" ")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _operators() -> dict[str, Operator]:
    names = [name for name in operator_names() if not _IDENTITY.fullmatch(name)]
    operators = {name.partition("/")[2]: get_operator(name) for name in names}
    plain = {name: each() for name, each in operators.items() if not each.arguments()}
    return {**plain, "RemoveStatement": RemoveStatement(), "ReturnNone": ReturnNone()}


@dataclass(frozen=True)
class Mutant:
    """One changed module. ``was`` and ``now`` are the lines that differ, joined by single spaces."""

    module: str
    line: int
    was: str
    now: str
    text: str


@dataclass(frozen=True)
class _Candidate:
    module: str
    operator: str
    occurrence: int
    span: Span
    #: Decides the order; does not depend on where the module is or what else is in it.
    rank: bytes

    @property
    def place(self) -> tuple[str, str, Span]:
        """An operator has one mutant in the sample, though eleven others may replace it."""
        return self.module, self.operator.partition("_")[0], self.span


def sample(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """Choose ``count`` mutants, at most one for each operator and place. The same seed chooses the same."""
    operators = _operators()
    candidates = [
        each for module in sources for each in _candidates(module, sources[module], operators, seed)
    ]
    first: dict[tuple[str, str, Span], _Candidate] = {}
    for candidate in sorted(candidates, key=lambda each: each.rank):
        first.setdefault(candidate.place, candidate)
    chosen: list[Mutant] = []
    for candidate in first.values():
        mutant = _made(candidate, sources[candidate.module], operators[candidate.operator])
        if mutant is not None:
            chosen.append(mutant)
        if len(chosen) == count:
            break
    return chosen


def _candidates(module: str, source: str, operators: dict[str, Operator], seed: int) -> Iterator[_Candidate]:
    lines = source.splitlines()
    passed_over = list(_without_behaviour(ast.parse(source)))
    occurrences: Counter[str] = Counter()
    repetitions: Counter[tuple[str, str]] = Counter()
    for node in ast_nodes(get_ast(source)):
        for name, operator in operators.items():
            for start, end in operator.mutation_positions(node):
                occurrence, line = occurrences[name], lines[start[0] - 1].strip()
                occurrences[name] += 1
                if any(first <= start and end <= last for first, last in passed_over):
                    continue
                if node.parent is not None and node.parent.type == "parameters":  # a lone star
                    continue
                repetitions[name, line] += 1
                rank = sha256(f"{seed} {name} {line} {repetitions[name, line]}".encode()).digest()
                yield _Candidate(module, name, occurrence, (start, end), rank)


def _without_behaviour(tree: ast.Module) -> Iterator[Span]:
    """Yield types and the guard of ``zip``, which decide nothing, and options of data classes (storage)."""
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(value=ast.BinOp(op=ast.BitOr()))
                | ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar")))
                | ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal" | "Mapping" | "Callable")))
            ):
                yield _span(statement.value)
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as part) | ast.AnnAssign(annotation=part):
                yield _span(part)
            case (
                ast.FunctionDef(returns=ast.expr() as part)
                | ast.If(test=ast.Name(id="TYPE_CHECKING") as part)
            ):
                yield _span(part)
            case ast.Call(func=ast.Name(id="zip"), keywords=guards):
                yield from map(_span, guards)
            case ast.ClassDef(decorator_list=decorators, keywords=options):
                yield from map(_span, options)
                for decorator in decorators:
                    if isinstance(decorator, ast.Call):
                        yield from map(_span, decorator.keywords)


def _span(node: ast.expr | ast.keyword) -> Span:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _made(candidate: _Candidate, source: str, operator: Operator) -> Mutant | None:
    """Return None if it is no Python, or no change."""
    try:
        text = mutate_code(source, operator, candidate.occurrence)
    except AttributeError:  # cosmic-ray cannot replace an exception with a dotted name
        return None
    if text is None or text == source:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, candidate.module, "exec")
    except SyntaxError:
        return None
    was, now = _difference(source.splitlines(), text.splitlines())
    return Mutant(candidate.module, candidate.span[0][0], was, now, text)


def _difference(old: list[str], new: list[str]) -> tuple[str, str]:
    changes: list[str] = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
    return _joined(changes, "-"), _joined(changes, "+")


def _joined(changes: Iterable[str], sign: str) -> str:
    return " ".join(line[1:].strip() for line in changes if line[0] == sign)
