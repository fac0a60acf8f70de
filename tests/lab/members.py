"""An etcd of three members, each on a host of its own, for what becomes of it when one of them fails."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from tests.lab.etcd import Etcd, EtcdError
from tests.lab.lab import Lab
from tests.lab.node import Node
from tests.lab.wait import wait_for

PEER_PORT = 2380
#: In milliseconds: quick to choose a new leader, and yet not in doubt on a busy machine.
_HEARTBEAT, _ELECTION = 100, 1000
_TROUBLES = (OSError, http.client.HTTPException, ValueError, EtcdError)


class Member(Etcd):
    """One of them; ``host`` is a node of the lab without a daemon."""

    def __init__(self, host: Node, api: str) -> None:
        super().__init__(host.namespace, host.address, host.directory, api)
        self.host = host
        self.peer = f"http://{host.address}:{PEER_PORT}"

    def ids(self) -> dict[str, str]:
        """What it says of itself and its leader; ``{}`` if it does not answer."""
        try:
            told = self.request("POST", "/v3/maintenance/status", {}, as_json=True)
        except _TROUBLES:
            return {}
        return {"id": told["header"]["member_id"], "leader": told.get("leader", "0")}

    @contextmanager
    def severed(self, others: list[Member]) -> Iterator[None]:
        """Cut it off from other members for a while. Clients reach it all the same."""
        routes = [f"blackhole {other.address}/32" for other in others]
        self.namespace.ip(*(f"route add {route}" for route in routes))
        try:
            yield
        finally:
            self.namespace.ip(*(f"route del {route}" for route in routes))


class Members:
    """The cluster, in a ``with``; ``urls`` is what to give to a daemon as its endpoints."""

    def __init__(self, lab: Lab, api: str) -> None:
        self.all = [Member(host, api) for host in lab.add_nodes(3)]
        self.urls = ",".join(member.endpoint for member in self.all)

    def __enter__(self) -> Self:
        cluster = ",".join(f"{member.host.name}={member.peer}" for member in self.all)
        for member in self.all:
            member.launch(*self._flags(member), f"--initial-cluster={cluster}")
        wait_for(lambda: all(member.healthy() for member in self.all), 20, "three members to agree")
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.all:
            member.kill()

    def restart(self, member: Member) -> None:
        """Start one that was killed, and wait until it takes part."""
        member.launch(*self._flags(member))
        wait_for(member.healthy, 20, "the member to take part again")

    def leader(self) -> Member:
        """The one that says so of itself, and whose word the others take."""

        def found() -> Member | None:
            told = {member.host.name: member.ids() for member in self.all}
            leaders = {status["leader"] for status in told.values() if status}
            return next(
                (member for member in self.all if leaders == {told[member.host.name].get("id", "")}), None
            )

        return wait_for(found, 20, "a leader") or self.all[0]

    def make_leader(self, member: Member) -> None:
        """Hand the leadership over to a member."""

        def done() -> bool:
            leader = self.leader()
            if leader is not member:
                order = {"targetID": member.ids().get("id", "0")}
                try:
                    leader.request("POST", "/v3/maintenance/transfer-leadership", order, as_json=True)
                except _TROUBLES:
                    return False
            return self.leader() is member

        wait_for(done, 30, f"{member.host.name} to lead")

    def others(self, member: Member) -> list[Member]:
        return [each for each in self.all if each is not member]

    def write(self, act: Callable[[Member], object], *, but: Member | None = None) -> None:
        """Let a member do what may be done twice, until one has."""

        def done() -> bool:
            for member in self.all:
                if member is not but:
                    try:
                        act(member)
                    except _TROUBLES:
                        continue
                    return True
            return False

        wait_for(done, 30, "a member to take it")

    def used_by(self, node: Node) -> list[Member]:
        """The members to which a daemon has connections."""
        lines = node.run("ss", "-Htn", "state", "established").stdout.splitlines()
        peers = {line.split()[-1].rpartition(":")[0] for line in lines}
        return [member for member in self.all if member.address in peers]

    def _flags(self, member: Member) -> list[str]:
        return [
            f"--name={member.host.name}",
            f"--listen-peer-urls={member.peer}",
            f"--initial-advertise-peer-urls={member.peer}",
            f"--heartbeat-interval={_HEARTBEAT}",
            f"--election-timeout={_ELECTION}",
        ]
