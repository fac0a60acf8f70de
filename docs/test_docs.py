"""The documentation says what the code does, as far as a machine can tell."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flanneld import config, options
from flanneld.compat.flags import Flag
from tests.bench import page as figures

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)


def flag_row(flag: Flag) -> str:
    default = (
        json.dumps(flag.default) if isinstance(flag.default, bool | int) else "".join(map(str, flag.default))
    )
    usage = flag.usage.replace("`", "").replace("\n", "; ")
    return f"| `-{flag.name}` | {f'`{default}`' if default else ''} | {usage} |"


def flag_table() -> str:
    rows = [flag_row(flag) for flag in sorted(options.FLAGS, key=lambda flag: flag.name)]
    return "\n".join(["| Flag | Default | Meaning |", "|---|---|---|", *rows])


def test_the_page_on_running_has_the_table_of_flags() -> None:
    table = flag_table()
    assert table in (DOCS / "running.md").read_text(), f"docs/running.md must hold:\n{table}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [name for name in files if name and not (page.parent / name).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_name_one_that_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^):]*)#([^)]+)\)", page.read_text())
    places = [((page.parent / name if name else page), anchor) for name, anchor in targets]
    assert [anchor for place, anchor in places if anchor not in anchors(place)] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:flanneld|tests|dist)/[^` ]*)`", TEXT))))
def test_a_file_that_is_named_is_there(name: str) -> None:
    assert (ROOT / name).exists()


def test_each_page_has_a_link_on_the_first_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = [str(page.relative_to(ROOT)) for page in PAGES if page.name != "README.md"]
    assert [page for page in pages if f"({page})" not in readme] == []


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield the tables of a page as rows of cells, the head first."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, _, *rest = [[cell.strip() for cell in row[1:-1].split("|")] for row in block.splitlines()]
        yield [head, *rest]


def performance() -> set[tuple[str, str, str, str]]:
    """Return what was measured, the number of peers, Go's version and the ratio, of each ratio to Go."""
    found = set()
    for (first, *heads), *rest in map(figures.cells, figures.load()):
        for head, number in (
            (head, place) for place, head in enumerate(heads) if re.search("(Ratio to|/) Go", head)
        ):
            for what, *cells in rest:
                name = what.partition(":")[0] if first == "What" else f"{first}, {what}"
                peers = cells[0] if heads[0] == "Peers" else ""
                version = head.rpartition(" ")[2] if "v0." in head else "v0.12.0"
                found.add((name, peers, version, cells[number]))
    return found


FIGURES = next(rows for rows in tables(ROOT / "README.md") if rows[0][-1] == "Ratio")[1:]


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_a_figure_of_the_first_page_is_one_of_the_page_on_performance(row: list[str]) -> None:
    assert tuple(row) in performance()


@cache
def names_of_tests() -> frozenset[str]:
    files = [file for place in ("tests", "docs") for file in (ROOT / place).rglob("*.py")]
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)", file.read_text()))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT))))
def test_a_test_that_is_named_exists(name: str) -> None:
    assert name in names_of_tests()


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
def test_a_piece_of_code_that_is_shown_is_a_piece_of_the_example(block: str) -> None:
    assert any(block in file.read_text() for file in (DOCS / "examples").rglob("*.py"))


def configs() -> list[str]:
    """The network configs shown in the documentation; placeholders like <...> are not among them."""
    indented = re.findall(r"^ {4}(\{.*\"Network\":.*\})$", TEXT, re.MULTILINE)
    return [*indented, *re.findall(r"'(\{\"Network\":.*\})'", TEXT)]


@pytest.mark.parametrize("text", configs())
def test_a_network_config_that_is_shown_is_right(text: str) -> None:
    assert config.parse(text).warnings == ()


def derivations() -> Iterator[tuple[str, ...]]:
    """Rows of configuration.md: a config, then the SubnetLen, SubnetMin and SubnetMax that follow."""
    for row in (DOCS / "configuration.md").read_text().splitlines():
        found = re.fullmatch(r"\| `(\{.*\})` \| (\d+) \| ([0-9a-f.:]+) \| ([0-9a-f.:]+) \|", row)
        if found:
            yield found.groups()


@pytest.mark.parametrize(("text", "length", "low", "high"), [*derivations()])
def test_derived_subnet_values_of_a_config_are_right(text: str, length: str, low: str, high: str) -> None:
    (pool,) = config.parse(text).ranges
    assert (str(pool.subnet_len), str(pool.subnet_min), str(pool.subnet_max)) == (length, low, high)


def refused_configs() -> list[tuple[str, str]]:
    page = (DOCS / "configuration.md").read_text()
    return re.findall(r"^\| `(\{.*\})` \| `([^`]*[a-z][^`]*)` \|$", page, re.MULTILINE)


@pytest.mark.parametrize(("text", "message"), refused_configs())
def test_a_config_that_is_shown_as_wrong_is_refused_with_these_words(text: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as refusal:
        config.parse(text)
    assert str(refusal.value) == message


@cache
def texts_of_the_code() -> str:
    """Every text in the code, with an ellipsis for what is filled in."""
    texts = []
    for file in (ROOT / "flanneld").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


EXTRAS = sorted(set(re.findall(r"flanneld\[([a-z-]+)\]", TEXT + texts_of_the_code())))


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_that_is_named_can_be_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name in project["optional-dependencies"]


LOG_LINES = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", LOG_LINES)
def test_the_words_of_a_log_line_that_is_explained_occur_in_the_code(line: str) -> None:
    words = [piece.strip(" :();") for piece in line.split("...")]
    assert [piece for piece in words if piece not in texts_of_the_code()] == []


def test_the_examples_of_the_documentation_are_found() -> None:
    """The tests above look for patterns; here they are known to match something."""
    assert len(LOG_LINES) > 15
    assert len(FIGURES) > 5
    assert len(configs()) > 3
    assert len(list(derivations())) > 3
    assert len(refused_configs()) > 3
    assert len(EXTRAS) > 3
