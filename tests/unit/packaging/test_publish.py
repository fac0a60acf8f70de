"""dist/image/publish with a buildah that writes down what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.kubernetes_objects import IMAGE, ROOT, daemon, init_containers, read

BUILDAH = """#!/bin/sh
echo "$*" >>"$CALLS"
while [ $# -gt 0 ]; do
    [ "$1" != --digestfile ] || printf sha256:abc >"$2"
    shift
done
"""


def test_publishing_pushes_all_platforms_and_writes_the_manifest_with_the_digest(tmp_path: Path) -> None:
    for name in ("dist/image/publish", "dist/kubernetes/kube-flannel.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "buildah").write_text(BUILDAH)
    (tmp_path / "buildah").chmod(0o755)
    calls = tmp_path / "calls"

    words = ("registry.example/flanneld", "linux/amd64", "linux/arm64")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run([tmp_path / "dist/image/publish", *words], check=True, env=environment)

    tag = IMAGE.rpartition(":")[2]
    image = f"registry.example/flanneld:{tag}"
    assert calls.read_text().splitlines()[1:] == [
        f"build --platform=linux/amd64,linux/arm64 --manifest {image} .",
        f"manifest push --all --digestfile build/digest {image} docker://{image}",
    ]
    objects = read((tmp_path / "build/kube-flannel.yml").read_text())
    containers = [*init_containers(objects).values(), daemon(objects)]
    assert {each["image"] for each in containers} == {f"{image}@sha256:abc"}
