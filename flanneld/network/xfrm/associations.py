"""The kernel's SAs as another program may have left them: which there are, and notifications of a flush."""

from __future__ import annotations

from flanneld.network.rtnetlink.netlink import NetlinkSocket
from flanneld.network.xfrm import messages
from flanneld.network.xfrm.table import RECEIVE_BUFFER, notifications, open_xfrm


class Associations:
    """View of the kernel's SAs. Both sockets are opened by the first read."""

    def __init__(self) -> None:
        self._kernel: NetlinkSocket | None = None
        self._news: NetlinkSocket | None = None

    def spis(self) -> frozenset[str]:
        """Return the SPIs of all SAs. Raises ``OSError``."""
        self._news = self._news or open_xfrm((messages.GROUP_SA,), RECEIVE_BUFFER)
        self._kernel = self._kernel or open_xfrm()
        return frozenset(messages.spi(*each) for each in self._kernel.dump(messages.GET_SA, b""))

    def fileno(self) -> int:
        return self._news.fileno() if self._news else -1

    def were_flushed(self) -> bool:
        """Return True after a flush, and after lost notifications. charon itself removes single SAs."""
        found = [kind for kind, _ in notifications(self._news)] if self._news else []
        return messages.FLUSH_SA in found or messages.LOST in found

    def close(self) -> None:
        for each in filter(None, (self._kernel, self._news)):
            each.close()
        self._kernel = self._news = None
