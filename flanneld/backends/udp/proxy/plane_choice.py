"""Choice of the proxy's data plane."""

from __future__ import annotations

import errno
from collections.abc import Callable

from flanneld.backends.udp.proxy import native
from flanneld.backends.udp.proxy.native import NativePlane
from flanneld.backends.udp.proxy.plane import Plane, Wire
from flanneld.backends.udp.proxy.python import PythonPlane

#: A data plane's constructor, and the reason for choosing it.
Offer = tuple[Callable[[Wire], Plane], str]


def offers(data_plane: str) -> list[Offer]:
    """Return the data planes to try, best first. Raises ``OSError`` if the requested one is missing."""
    if data_plane == "python":
        return [(PythonPlane, "as DataPlane says")]
    missing = native.available()
    if data_plane == "native":
        if missing is not None:
            raise OSError(errno.ENOSYS, f"no native data plane: {missing}")
        return [(NativePlane, "as DataPlane says")]
    if missing is not None:
        return [(PythonPlane, f"no native one: {missing}")]
    return [(NativePlane, "the faster one"), (PythonPlane, "nothing else works")]


def build(candidates: list[Offer], ends: Wire) -> tuple[Plane, str]:
    """Return the first data plane that works on this kernel. Raises ``OSError`` if none does."""
    (make, why), *others = candidates
    try:
        return make(ends), why
    except OSError as failure:
        if failure.errno == errno.EBUSY or not others:
            raise
        reason = f"the better one fails: {failure.strerror or failure}"
    return build([(make, reason) for make, _ in others], ends)
