"""Which data plane a pump uses, and why."""

from __future__ import annotations

import errno
from collections.abc import Callable

from flanneld.backends.udp.proxy import native
from flanneld.backends.udp.proxy.native import NativePlane
from flanneld.backends.udp.proxy.plane import Plane, Wire
from flanneld.backends.udp.proxy.python import PythonPlane

#: A plane, and why it is this one.
Offer = tuple[Callable[[Wire], Plane], str]


def offers(wish: str) -> list[Offer]:
    """The planes to try, the best first. Raises ``OSError`` if the wish cannot be granted."""
    if wish == "python":
        return [(PythonPlane, "as DataPlane says")]
    missing = native.available()
    if wish == "native":
        if missing is not None:
            raise OSError(errno.ENOSYS, f"no native data plane: {missing}")
        return [(NativePlane, "as DataPlane says")]
    if missing is not None:
        return [(PythonPlane, f"no native one: {missing}")]
    return [(NativePlane, "the faster one"), (PythonPlane, "nothing else works")]


def build(candidates: list[Offer], ends: Wire) -> tuple[Plane, str]:
    """Make the first plane that this kernel can do. Raises ``OSError`` if there is none."""
    (make, why), *others = candidates
    try:
        return make(ends), why
    except OSError as failure:
        if failure.errno == errno.EBUSY or not others:
            raise
        reason = f"the better one fails: {failure.strerror or failure}"
    return build([(make, reason) for make, _ in others], ends)
