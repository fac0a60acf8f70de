"""host-gw-announce: host-gw, and a route to this node's subnet in the switch.

Between nodes nothing differs from host-gw, so the lease says ``host-gw``: nodes with and without
announcements are one network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flanneld.backends.contract import ExitPolicy, Host
from flanneld.backends.host_gw import HostGw
from flanneld.compat.json import GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest
from flanneld.state.resources import Resource
from flanneld.state.table import Table
from flanneld_switch_announce.switch import Announcement, Switch, SwitchTable

#: Default timeout for the switch, in seconds.
DEFAULT_TIMEOUT, LONGEST_TIMEOUT = 0.3, 2.0


class HostGwAnnounce(HostGw):
    """Backend with the options ``SwitchURL`` and, optionally, ``TimeoutSeconds``."""

    #: The switch must not route to a node without a daemon.
    exit_policy = ExitPolicy.REMOVE

    def __init__(self, config: Config, host: Host) -> None:
        super().__init__(config, host)
        self._next_hops = tuple(ip for family in config.families if (ip := host.uplink.public(family)))
        self._switch = read_switch(config, host.http)

    def local(self, own: Lease) -> Iterator[Resource]:
        yield from super().local(own)
        for next_hop in self._next_hops:
            subnet = own.net(next_hop.version)
            if subnet is not None:
                yield Announcement(subnet, next_hop)

    def tables(self) -> tuple[Table]:
        return (SwitchTable(self._switch, self._next_hops),)


def read_switch(config: Config, http: Callable[[HttpRequest], HttpAnswer]) -> Switch:
    """Return the switch in the network config. Raises ``Fatal`` if it is missing or unusable."""
    try:
        url = config.backend.string("SwitchURL", "")
    except GoJsonError as error:
        raise Fatal(str(error), "set it to a URL like http://192.0.2.1:8080") from None
    timeout = config.backend.raw("TimeoutSeconds")
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    if type(timeout) not in (int, float) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise Fatal(
            "Backend.TimeoutSeconds cannot be used", f"set it to a number above 0, up to {LONGEST_TIMEOUT:g}"
        )
    return Switch(url, timeout, http)
