"""Tables of a cloud under test: what is wanted of each, and what others do to it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from flanneld.backends.cloud import routes
from flanneld.backends.cloud.routes import CloudRoutes
from tests.clock import Clock
from tests.lab.namespace import Namespace
from tests.netns.conformance.host import OnHost
from tests.unit.backends.cloud.bench import SUBNET, bench

_GONE = "198.18.0.3"


class Routes(OnHost):
    """This node's route in the route table of a VPC, a cloud of the lab on loopback."""

    #: The cloud is not asked when nothing is wanted, and then nothing is dropped.
    can_be_blind = False
    drifts = ("drop ours", "lead ours to a node that is gone", "leave one of an earlier subnet of ours")
    foreign = ("lead 10.5.9.0/24 to the other node", "lead 10.9.0.0/16 to us")

    def __init__(self, host: Namespace) -> None:
        super().__init__(host)
        self._stack = ExitStack()
        room = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        environment = self._stack.enter_context(pytest.MonkeyPatch.context())
        # This cloud shows at once what was written.
        environment.setattr(routes, "VISIBLE_WITHIN", 0.0)
        self._bench = self._stack.enter_context(bench("tencent-vpc", Clock(), room, environment))
        self._cloud = self._bench.cloud
        self.resources = self._bench.node().desired

    def make(self) -> CloudRoutes:
        return self._bench.node().routes

    def do(self, command: str, *, check: bool = True) -> str:
        del check
        cloud = self._cloud
        match command.split():
            case ["drop", "ours"]:
                cloud.drop_route(SUBNET)
            case ["lead", "ours", *_]:
                hop = cloud.add_node(_GONE)
                cloud.drop_route(SUBNET)
                cloud.set_route(SUBNET, hop)
                cloud.terminate(_GONE)
            case ["leave", *_]:
                cloud.set_route("10.5.66.0/24", self._bench.hop)
            case ["lead", net, "to", *whom]:
                cloud.set_route(net, self._bench.hop if whom == ["us"] else self._bench.their_hop)
        return ""

    def show_foreign(self) -> str:
        return str({net: hop for net, hop in self._cloud.routes().items() if net != SUBNET} or "")

    def close(self) -> None:
        self._stack.close()
