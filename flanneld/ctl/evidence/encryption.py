"""Facts about this host's means of encryption: kernel features, and charon."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

#: Seconds to wait for charon's answer. It answers within milliseconds unless it hangs.
_PATIENCE = 2.0


class CharonState(StrEnum):
    """State of charon, as its control socket shows it."""

    ANSWERS = "answers"
    HANGS = "hangs"
    NOT_RUNNING = "not running"
    NOT_INSTALLED = "not installed"


class EncryptionFacts(Struct, frozen=True, gc=False):
    """Facts for the encrypting backends of the network. ``charon`` is None without ipsec or permission.

    ``lacking`` are features that this kernel lacks, each with the modules to load.
    """

    charon: CharonState | None = None
    lacking: tuple[tuple[str, str], ...] = ()


def read(document: Mapping[str, Any]) -> EncryptionFacts:
    """Read the facts that the backends of this network call for; none for backends that do not encrypt."""
    network = document.get("network") or {}
    backends = {network.get("backend"), network.get("also")}
    return EncryptionFacts(
        charon=_charon() if "ipsec" in backends else None,
        lacking=tuple(_lacking(backends)),
    )


def _charon() -> CharonState | None:
    from flanneld.backends.ipsec import charon, charon_process
    from flanneld.errors import Fatal, Retryable

    if Path(charon.SOCKET).exists() and not os.access(charon.SOCKET, os.W_OK):
        return None
    try:
        with charon.ViciConnection(time_limit=_PATIENCE) as connection:
            connection.ask("version")
    except charon.NoCharon:
        try:
            charon_process.find()
        except Fatal:
            return CharonState.NOT_INSTALLED
        return CharonState.NOT_RUNNING
    except Retryable:
        return CharonState.HANGS
    return CharonState.ANSWERS


def _lacking(backends: set[str | None]) -> Iterator[tuple[str, str]]:
    """Yield features that the kernel's netlink families show to be missing."""
    if "wireguard" in backends and _is_refused(_open_wireguard):
        yield "WireGuard", "wireguard"
    if "ipsec" in backends and _is_refused(_open_xfrm):
        yield "XFRM", "xfrm_user esp4"


def _open_wireguard() -> None:
    from flanneld.network.genetlink.devices import WireGuardDevices

    WireGuardDevices().close()


def _open_xfrm() -> None:
    from flanneld.network.xfrm.table import open_xfrm

    open_xfrm().close()


def _is_refused(open_and_close: Callable[[], None]) -> bool:
    try:
        open_and_close()
    except OSError as failure:
        return failure.errno in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP)
    return False
