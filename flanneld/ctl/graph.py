"""``flannelctl graph``: this node and the ways to all others, as text, DOT or one HTML page (pure).

Texts come from other nodes and from the store, so the page escapes all, and its policy admits only this
script and style, by their hashes. Without the script the page shows the same drawing and table.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from flanneld.compat.glog import counted
from flanneld.ctl.output import State

#: States of nodes, the worst first.
_COLOURS: Mapping[str, str] = {State.PROBLEM: "#c62828", State.HINT: "#b26a00", State.OK: "#2e7d32"}
_SHAPES: Mapping[str, str] = {State.OK: "ellipse", State.HINT: "diamond", State.PROBLEM: "box"}


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
    return sorted(found, key=lambda each: (not each.is_own, [*State].index(each.state)))


def edges(found: list[Vertex]) -> list[dict[str, Any]]:
    """Return the ways from this node to the others as JSON; none if this node has no lease."""
    own = next((each for each in found if each.is_own), None)
    others = [each for each in found if not each.is_own]
    return [{"from": own.name, "to": each.name, "state": each.state} for each in others] if own else []


def text(found: list[Vertex]) -> Iterator[str]:
    """Yield the lines of a tree, with the nodes by state."""
    own = next((each for each in found if each.is_own), None)
    yield f"{own.name}  {own.public_ip}  this node" if own else "this node has no lease"
    groups = [(state, [each for each in found if each.state == state and not each.is_own]) for state in State]
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


#: Distance between two nodes of the drawing, in its own units, and the radius of one.
_APART, _RADIUS = 26.0, 7.0
#: Angle between two nodes that follow each other on a spiral, so that all are equally far apart.
_GOLDEN = math.pi * (3 - math.sqrt(5))

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --soft: #5c5c5c; --line: #cfcfcf;
  --ok: #2e7d32; --hint: #9a5b00; --problem: #c62828; --mark: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --back: #121212; --text: #ececec; --soft: #a8a8a8;
  --line: #3c3c3c; --ok: #81c784; --hint: #ffb74d; --problem: #ff8a80; --mark: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.4 system-ui, sans-serif; background: var(--back); color: var(--text); }
header, main { padding: .75rem 1rem; }
header { border-bottom: 1px solid var(--line); }
h1 { font-size: 1.2rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; color: var(--soft); }
label { margin-right: 1rem; white-space: nowrap; }
input[type=search] { font: inherit; padding: .25rem .5rem; width: 18rem; max-width: 100%;
  background: var(--back); color: var(--text); border: 1px solid var(--soft); border-radius: 4px; }
main { display: grid; grid-template-columns: minmax(18rem, 2fr) 3fr; gap: 1rem; align-items: start; }
@media (max-width: 60rem) { main { grid-template-columns: 1fr; } }
svg { width: 100%; max-height: 85vh; position: sticky; top: .5rem; }
.list { overflow: auto; max-height: 85vh; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--back); }
tbody tr { content-visibility: auto; contain-intrinsic-size: auto 1.8rem; }
:focus-visible, tr:focus { outline: 3px solid var(--mark); outline-offset: -3px; }
.ok { --state: var(--ok); } .hint { --state: var(--hint); } .PROBLEM { --state: var(--problem); }
th, td { white-space: nowrap; } td.note { white-space: normal; min-width: 14rem; }
td.state { color: var(--state); font-weight: 600; }
svg line { stroke: var(--state); stroke-width: .6; opacity: .45; }
svg .shape { fill: var(--state); cursor: pointer; }
svg .own { fill: var(--back); stroke: var(--state); stroke-width: 3; }
svg .chosen { stroke: var(--mark); stroke-width: 4; }
[hidden] { display: none; }
"""

_SCRIPT = """
"use strict";
const rows = [...document.querySelectorAll("tbody tr")];
const search = document.getElementById("search");
const boxes = [...document.querySelectorAll("input[type=checkbox]")];
const count = document.getElementById("count");
let chosen = null;
const shape = row => document.getElementById("s" + row.id.slice(1));
const shown = () => rows.filter(row => !row.hidden);
function choose(row, focus) {
  if (chosen) {
    chosen.tabIndex = -1; chosen.removeAttribute("aria-selected"); shape(chosen).classList.remove("chosen");
  }
  chosen = row;
  if (!row) return;
  row.tabIndex = 0; row.setAttribute("aria-selected", "true"); shape(row).classList.add("chosen");
  if (focus) { row.focus(); row.scrollIntoView({block: "nearest"}); }
}
function filter() {
  const text = search.value.toLowerCase();
  const states = new Set(boxes.filter(box => box.checked).map(box => box.value));
  let number = 0;
  for (const row of rows) {
    row.hidden = !(states.has(row.dataset.state) && row.textContent.toLowerCase().includes(text));
    const mark = shape(row); mark.toggleAttribute("hidden", row.hidden);
    document.getElementById("l" + row.id.slice(1))?.toggleAttribute("hidden", row.hidden);
    if (!row.hidden) number++;
  }
  count.textContent = number + " of " + rows.length + " shown";
  if (!chosen || chosen.hidden) choose(shown()[0] || null, false);
}
const moves = {ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9};
document.querySelector("tbody").addEventListener("keydown", event => {
  if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = shown(), at = all.indexOf(chosen) + moves[event.key];
  choose(all[Math.max(0, Math.min(all.length - 1, at))], true);
  event.preventDefault();
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== search) { search.focus(); event.preventDefault(); }
  if (event.key === "Escape") { search.value = ""; filter(); if (chosen) choose(chosen, true); }
});
document.addEventListener("click", event => {
  const mark = event.target.closest(".shape"), row = event.target.closest("tbody tr");
  if (mark) choose(document.getElementById("r" + mark.id.slice(1)), true);
  else if (row) choose(row, true);
});
search.addEventListener("input", filter);
boxes.forEach(box => box.addEventListener("change", filter));
document.getElementById("controls").hidden = false;
filter();
"""


def page(found: list[Vertex], columns: tuple[str, ...], made: str) -> Iterator[str]:
    """Yield the lines of the page. ``columns`` are the names of facts, ``made`` is its date."""
    states = Counter(each.state for each in found)
    summary = ", ".join(f"{states[state]} {state}" for state in State if states[state])
    policy = f"default-src 'none'; style-src '{_hash(_STYLE)}'; script-src '{_hash(_SCRIPT)}'"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>flannel: {counted(len(found), 'node')}</title>"
    yield f"<style>{_STYLE}</style></head><body>"
    yield f"<header><h1>flannel: {counted(len(found), 'node')}</h1>"
    yield f"<p>{html.escape(summary)}. As seen from one node, {html.escape(made)}.</p>"
    yield '<div id="controls" hidden><label>Search <input type="search" id="search"></label>'
    for state in _COLOURS:
        yield f'<label><input type="checkbox" value="{state}" checked> {state}</label>'
    yield '<span id="count" role="status"></span>'
    yield "<p>Keys: / searches, Esc clears; arrows, Page Up, Page Down, Home and End move in the list.</p>"
    yield "</div>"
    yield "</header><main>"
    yield from _drawing(found)
    yield from _table(found, columns)
    yield f"</main><script>{_SCRIPT}</script></body></html>"


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _drawing(found: list[Vertex]) -> Iterator[str]:
    """Yield a drawing with this node in the middle. The table has the same for those who do not see it."""
    reach = _APART * math.sqrt(len(found) + 1) + 2 * _RADIUS
    yield f'<svg viewBox="{-reach:.0f} {-reach:.0f} {2 * reach:.0f} {2 * reach:.0f}" aria-hidden="true">'
    places = [_place(number) for number in range(len(found))]
    if found and found[0].is_own:
        for number, each in list(enumerate(found))[1:]:
            x, y = places[number]
            yield f'<line id="l{number}" class="{each.state}" x1="0" y1="0" x2="{x:.1f}" y2="{y:.1f}"/>'
    for number, each in enumerate(found):
        yield _shape(number, each, *places[number])
    yield "</svg>"


def _place(number: int) -> tuple[float, float]:
    distance, angle = _APART * math.sqrt(number), number * _GOLDEN
    return distance * math.cos(angle), distance * math.sin(angle)


def _shape(number: int, each: Vertex, x: float, y: float) -> str:
    """Return a circle, a diamond or a square: colour alone is not seen by everybody."""
    attributes = f'id="s{number}" class="shape {each.state}{" own" if each.is_own else ""}"'
    title = f"<title>{html.escape(each.name)} {each.state}</title>"
    r = _RADIUS * (1.4 if each.is_own else 1)
    if each.state == State.OK:
        return f'<circle {attributes} cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}">{title}</circle>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if each.state == State.HINT else ""
    corner = f'x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}"'
    return f"<rect {attributes} {corner}{turned}>{title}</rect>"


def _table(found: list[Vertex], columns: tuple[str, ...]) -> Iterator[str]:
    yield '<div class="list"><table aria-label="Nodes"><thead><tr>'
    names = ("node", "public ip", "state", "note", "rtt", *columns)
    yield "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    yield "</tr></thead><tbody>"
    for number, each in enumerate(found):
        facts = dict(each.facts)
        cells = (each.rtt, *(facts.get(name, "-") for name in columns))
        yield f'<tr id="r{number}" data-state="{each.state}" class="{each.state}">'
        yield f'<th scope="row">{html.escape(each.name)}</th><td>{html.escape(each.public_ip)}</td>'
        yield f'<td class="state">{each.state}</td><td class="note">{html.escape(each.note)}</td>'
        yield "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
