"""The documentation says what the code does, as far as a machine can tell."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from flanneld import config, options
from flanneld.backends.cloud.backend import CloudBackend
from flanneld.backends.registry import BUILT_IN, described
from flanneld.ctl import commands
from flanneld.ctl import main as flannelctl
from flanneld.ctl.checks import THEMES
from flanneld.ctl.checks.cluster import RULES
from flanneld.ctl.doctor import CHECKS
from flanneld.ctl.netcheck import Stage
from flanneld.diagnostics import conditions
from flanneld.diagnostics.metrics import METRICS
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.reconcile.counters import BOUNDS
from flanneld.subnet import cni_conf, subnet_file
from tests.bench import page as figures
from tests.faults import table as faults
from tests.kubernetes_objects import CHART, IMAGE, manifest

DOCS = Path(__file__).parent
ROOT = DOCS.parent
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "tests").rglob("README.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)


@cache
def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


# Links, and the names of what is in this repository.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [name for name in files if name and not (page.parent / name).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_name_one_that_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^):]*)#([^)]+)\)", page.read_text())
    places = [((page.parent / name if name else page), anchor) for name, anchor in targets]
    assert [anchor for place, anchor in places if anchor not in anchors(place)] == []


def test_each_guide_has_a_link_on_the_first_page_and_each_decision_on_theirs() -> None:
    missing = [each.name for each in DOCS.glob("*.md") if f"(docs/{each.name})" not in README.read_text()]
    decisions = DOCS / "adr"
    missing += [each.name for each in decisions.glob("0*.md") if f"({each.name})" not in page("adr/README")]
    assert missing == []


def texts_of_others() -> Iterator[Path]:
    """Yield the files outside of the documentation that may name one of its pages."""
    for folder in ("flanneld", "tests", "dist"):
        yield from (each for each in (ROOT / folder).rglob("*") if each.is_file() and each.suffix != ".pyc")
    yield ROOT / "pyproject.toml"
    yield ROOT / "Dockerfile"


def test_page_that_code_manifests_and_units_name_exists() -> None:
    named = {
        name
        for file in texts_of_others()
        for name in re.findall(rb"\bdocs/[\w./-]+\.(?:md|json|svg)\b", file.read_bytes())
    }
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name.decode()).exists()] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:flanneld|tests|dist)/[^` ]*)`", TEXT))))
def test_a_file_that_is_named_is_there(name: str) -> None:
    assert (ROOT / name).exists()


@cache
def names_of_tests() -> frozenset[str]:
    files = [file for place in ("tests", "docs") for file in (ROOT / place).rglob("*.py")]
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)", file.read_text()))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT))))
def test_a_test_that_is_named_exists(name: str) -> None:
    assert name in names_of_tests()


# Tables of what the code has.


def table(*rows: tuple[object, ...]) -> str:
    """Return a table in Markdown, the head first."""
    head, *rest = ("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join([head.replace("|  ", "| "), "|" + "---|" * len(rows[0]), *rest])


def flags() -> str:
    rows: list[tuple[object, ...]] = [("Flag", "Default", "Meaning")]
    for flag in sorted(options.FLAGS, key=lambda flag: flag.name):
        default = (
            json.dumps(flag.default)
            if isinstance(flag.default, bool | int)
            else "".join(map(str, flag.default))
        )
        usage = flag.usage.replace("`", "").replace("\n", "; ")
        rows.append((f"`-{flag.name}`", f"`{default}`" if default else "", usage))
    return table(*rows)


def checks() -> str:
    themes: dict[str, list[str]] = {}
    for check in CHECKS:
        themes.setdefault(check.theme, []).append(f"{check.name}: {check.meaning}")
    rows = [(theme, THEMES[theme], "<br>".join(each)) for theme, each in themes.items()]
    return table(("", "Theme", "Checks: what each one expects"), *rows)


def metrics() -> str:
    rows = [
        (f"`{each.name}`", each.type, ", ".join(f"`{label}`" for label in each.labels), each.meaning)
        for each in METRICS
    ]
    return table(("Metric", "Type", "Labels", "Meaning"), *rows)


def rules() -> str:
    severities: dict[str, list[str]] = {}
    for rule in RULES:
        severities.setdefault(rule.severity, []).append(f"{rule.name}: {rule.meaning}")
    rows = [(severity, "<br>".join(each)) for severity, each in severities.items()]
    return table(("Otherwise", "Rules: what each one expects"), *rows)


def faults_that_the_doctor_names() -> str:
    rows: list[tuple[object, ...]] = [("Faults of", "Number", "Lose packets", "Problem", "Hint")]
    for name, each in [*faults.THEMES.items(), ("**all**", faults.FAULTS)]:
        problems = sum(fault.severity == "problem" for fault in each.values())
        cutting = sum(fault.cuts is not False for fault in each.values())
        rows.append((name, len(each), cutting, problems, len(each) - problems))
    return table(*rows)


TABLES = {
    flags: "running",
    checks: "flannelctl",
    rules: "flannelctl",
    metrics: "monitoring",
    faults_that_the_doctor_names: "reliability",
}


@pytest.mark.parametrize("made", TABLES, ids=lambda made: made.__name__)
def test_page_has_the_table_of_the_code(made: Callable[[], str]) -> None:
    assert made() in page(TABLES[made]), f"docs/{TABLES[made]}.md must hold:\n{made()}"


def test_report_that_is_shown_has_the_number_of_checks() -> None:
    assert f"\n    {len(CHECKS)} checks: 1 problem, 0 hints\n" in page("flannelctl")


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_each_command_is_shown(command: str) -> None:
    assert f"    flannelctl {command} " in TEXT


def test_metrics_are_named_as_prometheus_wants_it() -> None:
    for metric in METRICS:
        assert metric.name.startswith("flannel_")
        assert metric.name.endswith("_total") == (metric.type == "counter")


def test_page_tells_the_bounds_of_the_buckets() -> None:
    milliseconds = enumerated([f"{1000 * bound:g}" for bound in BOUNDS if bound < 1])
    seconds = enumerated([f"{bound:g}" for bound in BOUNDS if bound >= 1])
    told = f"The buckets of all histograms end at {milliseconds} milliseconds and {seconds} seconds."
    assert told in " ".join(page("monitoring").split())


def names_in(head: str, name: str) -> set[str]:
    """Return the names in the first column of a page's table, found by its head."""
    rows = page(name).partition(f"\n{head}\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in rows.splitlines()[1:]]
    return {each for cell in cells for each in re.findall("`(.*?)`", cell) or [cell.strip()]}


def test_page_has_the_checks_of_netcheck() -> None:
    calls = [node for node in sources() if isinstance(node, ast.Call) and ast.unparse(node.func) == "Result"]
    checks = {template(call.args[0]).removesuffix(", ...") for call in calls}
    assert names_in("| Check | Finds |", "flannelctl") == checks - {""}
    assert [stage for stage in Stage if f"`{stage}`" not in page("flannelctl")] == []


def test_page_has_the_keys_of_the_network_config() -> None:
    read = re.findall(r'top\.(?!has)\w+\(f?"(?:\{prefix\})?(\w+)', inspect.getsource(config))
    told = names_in("| Key | Type | Default | Meaning |", "running")
    assert {re.sub("^IPv6|[46]$", "", each) for each in told} == set(read)


def test_page_names_each_file_for_systemd() -> None:
    folder = ROOT / "dist/systemd"
    files = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    told = names_in("| File of `dist/systemd` | Place in `/usr/lib` | Purpose |", "running")
    assert told == files - {"install"}


def test_page_names_each_part_that_can_have_a_condition() -> None:
    own = re.findall(r'yield\s\(?\s*"(\w+)",', inspect.getsource(conditions))
    on_the_host = (subnet_file.TABLE, cni_conf.TABLE, KernelForwardingTable.name)
    assert len(own) > 10
    told = names_in("| Part | Condition |", "monitoring")
    assert told == {*own, *(name.replace("-", " ") for name in on_the_host)}


def enumerated(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


OPTIONS = {name: own for name in BUILT_IN if (own := described(name).options)}
CLOUDS = {name: own for name, own in OPTIONS.items() if issubclass(described(name), CloudBackend)}


@pytest.mark.parametrize("backend", CLOUDS)
def test_page_says_which_clouds_have_an_option(backend: str) -> None:
    section = page("backends").partition("\n| Option | For | Meaning |\n")[2].partition("\n\n")[0]
    told = {
        name
        for names, clouds in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
        if clouds == "all" or (backend in clouds) is not clouds.startswith("all but ")
    }
    assert told == {each.name for each in CLOUDS[backend]}


@pytest.mark.parametrize("backend", sorted(OPTIONS.keys() - CLOUDS.keys()))
def test_page_has_the_options_of_a_backend_with_their_defaults(backend: str) -> None:
    pages = page("backends") + page("encryption")
    section = pages.partition(f"\n## {backend}\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)`.*? \| `?([^|`]+)`? \|", section, re.MULTILINE))
    assert {each.name for each in OPTIONS[backend]} <= set(told)
    defaults = {each.name: json.dumps(each.default).strip('"') for each in OPTIONS[backend] if each.default}
    assert {name: told[name] for name in defaults} == defaults


# Figures of the first page.


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


FIGURES = next(rows for rows in tables(README) if rows[0][-1] == "Ratio")[1:]


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_a_figure_of_the_first_page_is_one_of_the_page_on_performance(row: list[str]) -> None:
    assert tuple(row) in performance()


# The network config.


def configs() -> list[str]:
    """Return the network configs that are shown; placeholders like <...> are not among them."""
    indented = re.findall(r"^ {4}(\{.*\"Network\":.*\})$", TEXT, re.MULTILINE)
    return [*indented, *re.findall(r"'(\{\"Network\":.*\})'", TEXT)]


@pytest.mark.parametrize("text", configs())
def test_a_network_config_that_is_shown_is_right(text: str) -> None:
    assert config.parse(text).warnings == ()


def derivations() -> list[tuple[str, str, str, str]]:
    """Return the rows with a config, then the SubnetLen, SubnetMin and SubnetMax that follow."""
    row = r"^\| `(\{.*\})` \| (\d+) \| ([0-9a-f.:]+) \| ([0-9a-f.:]+) \|$"
    return re.findall(row, page("running"), re.MULTILINE)


@pytest.mark.parametrize(("text", "length", "low", "high"), derivations())
def test_derived_subnet_values_of_a_config_are_right(text: str, length: str, low: str, high: str) -> None:
    (pool,) = config.parse(text).ranges
    assert (str(pool.subnet_len), str(pool.subnet_min), str(pool.subnet_max)) == (length, low, high)


def refused_configs() -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\{.*\})` \| `([^`]*[a-z][^`]*)` \|$", page("running"), re.MULTILINE)


@pytest.mark.parametrize(("text", "message"), refused_configs())
def test_a_config_that_is_shown_as_wrong_is_refused_with_these_words(text: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as refusal:
        config.parse(text)
    assert str(refusal.value) == message


# Words of the code.


def sources() -> Iterator[ast.AST]:
    for file in (ROOT / "flanneld").rglob("*.py"):
        yield from ast.walk(ast.parse(file.read_text()))


def template(node: ast.AST) -> str:
    """Return a text in the code, with an ellipsis for what is filled in; empty for another expression."""
    match node:
        case ast.JoinedStr(values):
            return "".join(template(part) or "..." for part in values)
        case ast.Constant(value=str(text)):
            return re.sub(r"%(?:\.\d+)?[sdf]|\{\w+\}", "...", text)
    return ""


@cache
def texts_of_the_code() -> str:
    """Return every text in the code but its documentation."""
    nodes = list(sources())
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return "\n".join(template(node) for node in nodes if id(node) not in documentation)


CODE = "".join(file.read_text() for file in (ROOT / "flanneld").rglob("*.py"))
EXTRAS = sorted(set(re.findall(r"flanneld\[([a-z-]+)\]", TEXT + CODE)))


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_that_is_named_can_be_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name in project["optional-dependencies"]


#: The lines of the log that have a heading or a row of a table.
LOG_LINES = [
    line
    for cell in re.findall(
        r"^(?:### |\| )((?:`[^`]+`(?:<br>)?)+)(?:$| \|)", page("troubleshooting"), re.MULTILINE
    )
    for line in re.findall("`([^`]+)`", cell)
]


@pytest.mark.parametrize("line", LOG_LINES)
def test_the_words_of_a_log_line_that_is_explained_occur_in_the_code(line: str) -> None:
    words = [piece.strip(" ,:();") for piece in line.split("...")]
    assert [piece for piece in words if piece not in texts_of_the_code()] == []


#: What logs a warning or an error, by the place of the line among the arguments.
LOGGING = {"Outage": 1, "BatchedWarnings": 1, "warn": 2} | dict.fromkeys(
    ("warning", "error", "critical", "exception"), 0
)


def warnings_in_the_code() -> Iterator[str]:
    """Yield what is logged as a warning or an error, with an ellipsis for what is filled in."""
    for call in sources():
        if isinstance(call, ast.Call) and ast.unparse(call.func) != "parser.error":
            place = LOGGING.get(getattr(call.func, "attr", getattr(call.func, "id", "")), len(call.args))
            yield from map(template, call.args[place : place + 1])


def test_each_warning_names_its_remedy_or_is_explained() -> None:
    warnings = [line for line in warnings_in_the_code() if re.search(r"\w{3}", line)]
    explained = [line.split("...") for line in re.findall("`([^`\n]+)`", page("troubleshooting"))]
    pattern = re.compile("|".join(".*".join(map(re.escape, words)) for words in explained if any(words)))
    assert len(warnings) > 80
    assert [line for line in warnings if "; " not in line and not pattern.match(line)] == []


# Commands.

#: Lines in the pages' blocks of code, with their continuations and without comments.
LINES = sorted(
    {
        re.split(r"\s#\s", line, maxsplit=1)[0]
        for line in re.findall(r"^ {4,}([^\s#].*)$", TEXT.replace("\\\n", " "), re.MULTILINE)
    }
)
#: Separates the commands of a line; ``--`` is before the one that kubectl runs in a pod.
BETWEEN = re.compile(r"\s(?:\|\|?|&&|;|--)\s")
#: What ends a command in a shell, or sends its output elsewhere.
END = re.compile(r"\s(?:>|>>|2>|&)(?:\s|\S|$)|;$")
#: A value that the reader has to fill in.
PLACEHOLDER = re.compile(r"<[^>]+>|\.\.\.")


def shown() -> Iterator[str]:
    """Yield each command of this project, also in a pipe, behind variables, or as what kubectl runs."""
    for line in LINES:
        for part in BETWEEN.split(line):
            command = re.sub(r"^(\w+=\S+ +)+", "", END.split(part, maxsplit=1)[0].strip())
            word = command.partition(" ")[0]
            ours = Path(word).name in ("flanneld", "flannelctl")
            if ours or word.removeprefix("./").startswith(("dist/", "tests/")):
                yield command


def found(pattern: str, *, of: str = "") -> list[str]:
    """Return what a pattern finds in the lines of one program, or in all."""
    return sorted(
        {each for line in LINES if of in line.split() or not of for each in re.findall(pattern, line)}
    )


COMMANDS = sorted({command for command in shown() if not PLACEHOLDER.search(command)})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_that_is_shown_is_understood(command: str) -> None:
    program, *words = shlex.split(command)
    match Path(program).name:
        case "flanneld":
            options.read(words, {})
        case "flannelctl":
            _, given = flannelctl.parse(words)
            options.read(given, {})
        case _:
            assert (ROOT / program).exists()


@pytest.mark.parametrize("path", found(r"(?:^|[\s=])(?:\./)?((?:dist|docs|tests)/[\w./-]+)"))
def test_path_in_a_command_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("variable", found(r"\b(FLANNELD_\w+)="))
def test_variable_in_a_command_is_one_of_a_flag_or_of_the_tests(variable: str) -> None:
    known = {f"FLANNELD_{flag.name.upper().replace('-', '_')}" for flag in options.FLAGS}
    assert variable in known or any(variable in file.read_text() for file in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("image", found(r"\blocalhost/flanneld\S*"))
def test_image_in_a_command_is_that_of_the_manifest(image: str) -> None:
    assert image == IMAGE


@pytest.mark.parametrize("unit", found(r"\sflanneld\S*", of="systemctl"))
def test_unit_in_a_command_of_systemctl_exists(unit: str) -> None:
    name = unit.strip() if "." in unit else f"{unit.strip()}.service"
    assert (ROOT / "dist/systemd" / name).exists()


@pytest.mark.parametrize("named", found(r"(?:configmap|daemonset|serviceaccount)[ /]\w[\w-]*", of="kubectl"))
def test_object_in_a_command_of_kubectl_is_in_the_manifest(named: str) -> None:
    kind, name = re.split("[ /]", named)
    assert (kind, name) in {(each["kind"].lower(), each["metadata"]["name"]) for each in manifest().values()}


@pytest.mark.parametrize("name", found(r"--set (\w[\w.]*)=", of="helm"))
def test_value_in_a_command_of_helm_is_one_of_the_chart(name: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in name.split("."):
        values = values[part]


def test_modules_that_are_run_exist() -> None:
    names = set(re.findall(r"python -m ((?:tests|dist|flanneld)[\w.]*)", TEXT))
    assert names
    paths = {name: ROOT / name.replace(".", "/") for name in names}
    assert [
        name
        for name, path in paths.items()
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ] == []


def test_the_examples_of_the_documentation_are_found() -> None:
    """The tests above look for patterns; here they are known to match something."""
    assert len(LOG_LINES) > 80
    assert len(FIGURES) > 5
    assert len(configs()) > 3
    assert len(derivations()) > 3
    assert len(refused_configs()) > 3
    assert len(EXTRAS) > 3
    assert len(COMMANDS) > 30
