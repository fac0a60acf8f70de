"""The kustomization: the manifest's objects with the selector of upstream's releases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes_objects import MANIFEST, Object, manifest, read

#: Upstream releases what kustomize makes of its manifest, and that puts the latter label everywhere.
LABELS = {"app": "flannel", "k8s-app": "flannel"}


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, Object]:
    """What kubectl makes of it, by kind."""
    done = subprocess.run(
        ["kubectl", "kustomize", MANIFEST.parent],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def test_the_selector_is_that_of_upstreams_releases_since_it_cannot_be_changed(
    objects: dict[str, Object],
) -> None:
    spec = objects["DaemonSet"]["spec"]
    assert spec["selector"] == {"matchLabels": LABELS}
    assert spec["template"]["metadata"]["labels"] == {**LABELS, "tier": "node"}


def test_all_else_is_the_manifest(objects: dict[str, Object]) -> None:
    expected = manifest()
    for each in (objects["DaemonSet"]["spec"], expected["DaemonSet"]["spec"]):
        del each["selector"], each["template"]["metadata"]["labels"]
    assert objects == expected
