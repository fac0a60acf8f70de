"""Ways to start a program on a host that lacks something: commands to put before the program's own.

They hide it from this program alone, so that the tests run on hosts and kernels that have it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from flanneld.backends.ipsec import charon as charon_process

SOURCE = Path(__file__).with_name("missing_kind.c")


def kind_of_device(kind: str, directory: Path) -> list[str]:
    """Hide a kind of network device. ``directory`` must be one from which code may be run."""
    library = directory / "missing_kind.so"
    if not library.exists():
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*compiler, "-o", library, SOURCE, "-ldl"], check=True)
    return ["env", f"LD_PRELOAD={library}", f"MISSING_KIND={kind}"]


def charon() -> list[str]:
    """Hide charon behind a file that is no program."""
    hide = f'mount --bind /dev/null {charon_process.find_charon()} && exec "$0" "$@"'
    return ["unshare", "-m", "sh", "-c", hide]
