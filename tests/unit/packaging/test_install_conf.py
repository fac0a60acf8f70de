"""What dist/image/install-conf does to the target, as its users and its onlookers see it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "dist/image/install-conf"


def install(*words: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "cni-conf.json"
    source.write_text('{"name": "cbr0"}\n')
    return source


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "net.d"
    directory.mkdir()
    return directory / "10-flannel.conflist"


def test_the_target_is_a_copy_with_the_mode_of_the_source(source: Path, target: Path) -> None:
    source.chmod(0o604)
    assert install(source, target).returncode == 0
    assert target.read_text() == source.read_text()
    assert target.stat().st_mode & 0o777 == 0o604


def test_an_older_file_is_replaced_and_not_written_into(source: Path, target: Path) -> None:
    target.write_text("older")
    with target.open() as reader:
        assert install(source, target).returncode == 0
        assert reader.read() == "older"
    assert target.read_text() == source.read_text()


def test_a_configuration_that_is_a_link_is_copied_and_not_linked(source: Path, target: Path) -> None:
    """The kubelet shows a ConfigMap's files as links."""
    link = source.with_name("link")
    link.symlink_to(source.name)
    assert install(link, target).returncode == 0
    assert not target.is_symlink()
    assert target.read_text() == source.read_text()


def test_nothing_else_is_left_beside_the_target(source: Path, target: Path) -> None:
    install(source, target)
    install(source.with_name("missing"), target)
    assert list(target.parent.iterdir()) == [target]


def test_a_missing_source_leaves_the_target_as_it_is(source: Path, target: Path) -> None:
    target.write_text("older")
    done = install(source.with_name("missing"), target)
    assert done.returncode != 0
    assert "missing" in done.stderr
    assert target.read_text() == "older"


def test_a_directory_is_no_target(source: Path, target: Path) -> None:
    done = install(source, target.parent)
    assert done.returncode == 1
    assert "is a directory" in done.stderr
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("number", [0, 1, 3])
def test_it_takes_exactly_two_arguments(tmp_path: Path, number: int) -> None:
    done = install(*[tmp_path / "file"] * number)
    assert (done.returncode, done.stderr) == (1, f"Usage: {SCRIPT} SOURCE TARGET\n")
