"""``flannelctl graph``: this node and the ways to all others, as text, DOT or a page (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from flanneld.compat.glog import counted

#: States in the order of urgency.
STATES = ("PROBLEM", "hint", "ok")
_COLOURS = {"ok": "#2e7d32", "hint": "#b26a00", "PROBLEM": "#c62828"}
_SHAPES = {"ok": "ellipse", "hint": "diamond", "PROBLEM": "box"}


class Vertex(Struct, frozen=True, gc=False):
    """A node of the graph, with what its line in ``flannelctl nodes`` says."""

    name: str
    public_ip: str
    state: str
    rtt: str
    facts: tuple[tuple[str, str], ...]
    note: str
    is_own: bool


def vertices(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[Vertex]:
    """Return the nodes of a table of ``flannelctl nodes``, this one first, then by state."""
    found = []
    for row in rows:
        by_name = dict(zip(columns, row, strict=True))
        facts = tuple((name, by_name[name]) for name in columns[4:-1] if by_name[name] != "-")
        is_own = by_name["rtt"] == "this node"
        found.append(
            Vertex(
                by_name["node"],
                by_name["public ip"],
                by_name["state"],
                by_name["rtt"],
                facts,
                by_name["note"],
                is_own,
            )
        )
    return sorted(found, key=lambda each: (not each.is_own, STATES.index(each.state)))


def edges(found: list[Vertex]) -> list[dict[str, Any]]:
    """Return the ways from this node to the others as JSON; none if this node has no lease."""
    own = next((each for each in found if each.is_own), None)
    others = [each for each in found if not each.is_own]
    return [{"from": own.name, "to": each.name, "state": each.state} for each in others] if own else []


def text(found: list[Vertex]) -> Iterator[str]:
    """Yield the lines of a tree, with the nodes by state."""
    own = next((each for each in found if each.is_own), None)
    yield f"{own.name}  {own.public_ip}  this node" if own else "this node has no lease"
    groups = [
        (state, [each for each in found if each.state == state and not each.is_own]) for state in STATES
    ]
    groups = [(state, some) for state, some in groups if some]
    for number, (state, some) in enumerate(groups):
        is_last = number == len(groups) - 1
        yield f"{'`--' if is_last else '|--'} {state}: {counted(len(some), 'node')}"
        for place, each in enumerate(some):
            branch = "`--" if place == len(some) - 1 else "|--"
            note = f"  {each.note}" if each.note else ""
            yield f"{'   ' if is_last else '|  '} {branch} {each.name}  {each.public_ip}  {each.rtt}{note}"


def dot(found: list[Vertex]) -> Iterator[str]:
    """Yield the lines of a graph for Graphviz."""
    yield "graph flannel {"
    yield "  layout=twopi; overlap=false; node [fontsize=10];"
    for each in found:
        shape = "doublecircle" if each.is_own else _SHAPES[each.state]
        label = "\n".join(filter(None, (each.name, each.public_ip, each.note)))
        yield f"  {_dot(each.name)} [label={_dot(label)}, shape={shape}, color={_dot(_COLOURS[each.state])}];"
    for edge in edges(found):
        colour = _dot(_COLOURS[edge["state"]])
        yield f"  {_dot(edge['from'])} -- {_dot(edge['to'])} [color={colour}];"
    yield "}"


def _dot(value: str) -> str:
    """Return a string in DOT's quotes. Text of other nodes must not end them."""
    clean = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{clean}"'
