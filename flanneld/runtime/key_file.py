"""Files that hold a secret of this node: made once, and read at each later start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flanneld.errors import Fatal, cause_of
from flanneld.runtime import atomic_file

#: Where upstream has its key file.
_FOLDER = Path("/run/flannel")
#: Variables that name another place, by name of the file.
_VARIABLES = {"wgkey": "WIREGUARD_KEY_FILE"}
#: Bytes; a key takes some dozens.
_LIMIT = 4096


def path_of(name: str, environ: Mapping[str, str]) -> Path:
    """Return the path of a key file, by its name or by the variable that says otherwise."""
    variable = _VARIABLES.get(name, "")
    return Path(environ[variable]) if variable in environ else _FOLDER / name


def read_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return what a key file holds; if there is none, write what ``make`` returns, for its owner alone.

    The file survives a power cut, as far as its file system does. Raises ``Fatal``.
    """
    try:
        return atomic_file.read(path, _LIMIT)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Fatal(f"cannot read the key file {path}: {cause_of(error)}", _REMEDY) from None
    content = make()
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        atomic_file.replace(path, content, 0o400)
    except OSError as error:
        raise Fatal(f"could not write key file {path}: {cause_of(error)}", _REMEDY) from None
    return content


_REMEDY = "let root read and write it, or name another one"
