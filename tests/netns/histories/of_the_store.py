"""What befalls the store, and the way there."""

from __future__ import annotations

import signal
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from flanneld.state.permits import HOLD
from tests.lab import Mishap, wait_for
from tests.netns.histories.history import SOON, History, told
from tests.netns.histories.observed import is_vandals
from tests.netns.histories.setting import CROWD, PLAYERS, nets

REMOVALS_HELD = "relisting in"


class OfTheStore(History):
    @rule(how=st.sampled_from([signal.SIGTERM, signal.SIGKILL, None]))
    @told
    def etcd_is_started_anew_or_forgets(self, how: signal.Signals | None) -> None:
        if how:
            self.ground.lab.etcd.restart(how)
        else:
            self._forget_history()

    @rule(what=st.sampled_from(get_args(Mishap)), times=st.integers(1, 6), at_once=st.booleans())
    @told
    def requests_go_wrong(self, what: Mishap, times: int, at_once: bool) -> None:
        """Those to come; ``at_once`` sees that some come."""
        self.ground.door.trouble(what, times)
        if at_once:
            self.ground.door.cut()

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.2, 1.0]))
    @told
    def answers_take_their_time(self, seconds: float) -> None:
        """Not all of them the same, so that what one watch tells may be older than what the other does."""
        self.ground.door.slow_down(seconds)

    @rule(how=st.sampled_from(["cut", "shut", "hold", "mend"]), forgets=st.booleans())
    @told
    def the_way_to_etcd_changes(self, how: str, forgets: bool) -> None:
        getattr(self.ground.door, how)()
        if forgets:
            self._forget_history()

    @precondition(lambda self: self._seen_players())
    @rule(for_good=st.integers(0, 9).map(lambda number: number == 9))
    @told
    def the_store_loses_most_peers(self, for_good: bool) -> None:
        """While nobody hears of it, so that the next list lacks them."""
        self.gather_the_crowd()
        for lease in tuple(self.fleeting):  # It would be missed as well.
            self.remove(lease)
        self._be_heard()
        before = self._ways_to_the_crowd()
        warnings = self.node.log().count(REMOVALS_HELD)
        self.ground.door.shut()
        attributes = self._lose_the_crowd()
        self._forget_history()
        self.ground.door.mend()
        wait_for(lambda: self.node.log().count(REMOVALS_HELD) > warnings, SOON, "the removal guard")
        # Where a route of somebody else still stands, the daemon may repair its own in the meantime.
        ways = (each for each in before if len(each) > 3)  # an end of a tunnel is no route
        stuck = {each[0] for each in ways if each[0] in self.excused and is_vandals(each)}
        kept = [each for each in self._ways_to_the_crowd() if each[0] not in stuck]
        assert kept == [each for each in before if each[0] not in stuck]
        if for_good and self.ground.is_patient:
            self.patience = SOON + HOLD
        else:
            for lease, each in attributes.items():
                self.write(lease, each)

    def _be_heard(self) -> None:
        """See the daemon follow a peer to where nobody was before: it knows of all that came before that."""
        lease = self._seen_players()[0]
        for host in (211, 212):  # It may be the first already, though its lease makes no sense now.
            self.write(lease, self.setting.attributes(host, mac=6))
            self.settle()

    def _seen_players(self) -> list[str]:
        """Leases that the kernel shows to be followed: neither the host nor somebody else has the subnet.

        With any other, nothing tells whether the daemon has heard. If it has missed that the crowd came back,
        the next loss continues the last one, of which it has warned already.
        """
        return [
            lease
            for lease in map(self.setting.lease, PLAYERS)
            if lease not in self.taken and self.excused.isdisjoint(map(str, nets(lease).values()))
        ]

    def _lose_the_crowd(self) -> dict[str, dict[str, Any]]:
        peers = self.peers()
        found = {lease: peers[lease] for lease in map(self.setting.lease, CROWD)}
        for lease in found:
            self.remove(lease)
        return found

    def _ways_to_the_crowd(self) -> list[Any]:
        """The routes that lead there, or what the pump knows."""
        bases = {self.setting.lease(number).partition("/")[0] for number in CROWD}
        ours = self.ground.look().ours()
        ends = [each for tunnel in ours["tunnels"].values() for each in tunnel["fdb"]]
        return [each for each in (*ours["routes"], *ends) if each[0].partition("/")[0] in bases]

    def _forget_history(self) -> None:
        etcd = self.ground.lab.etcd
        etcd.set("/unrelated", "")  # Nothing cannot be forgotten twice.
        etcd.forget_history()
