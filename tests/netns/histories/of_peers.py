"""What other nodes do: they come and go, write nonsense, and claim what is not theirs."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.lab.etcd import TTL
from tests.netns.histories.history import History, told
from tests.netns.histories.nonsense import claims, half_sensible, impostors, senseless
from tests.netns.histories.setting import OURS, PLAYERS, address

players = st.sampled_from(PLAYERS)
#: A place in a list whose length only the history knows.
places = st.integers(0, 59)


class OfPeers(History):
    @rule(player=players, host=places, mac=st.integers(1, 4), ttl=st.sampled_from([TTL, TTL, 1]))
    @told
    def a_peer_comes(self, player: int, host: int, mac: int, ttl: int) -> None:
        self.write(self.setting.lease(player), self.setting.attributes(self._host(host), mac), ttl)

    @rule(player=players, host=places, to_another_backend=st.booleans())
    @told
    def a_peer_goes(self, player: int, host: int, to_another_backend: bool) -> None:
        if to_another_backend and self.setting.type != "udp":  # udp asks for no type
            type_ = "host-gw" if self.setting.type == "ipip" else "ipip"
            other = {"PublicIP": address(4, self._host(host)), "BackendType": type_}
            self.write(self.setting.lease(player), other)
        else:
            self.remove(self.setting.lease(player))

    @rule(player=players, what=places, half=st.booleans())
    @told
    def a_lease_becomes_nonsense(self, player: int, what: int, half: bool) -> None:
        values = half_sensible(self.setting) if half else ()
        if values:
            self.garble(self.setting.lease(player), values[what % len(values)], wholly=False)
        else:
            values = senseless(self.setting)
            self.garble(self.setting.lease(player), values[what % len(values)], wholly=True)

    @rule(what=places, host=places)
    @told
    def somebody_claims_what_is_not_his(self, what: int, host: int) -> None:
        keys = claims(self.ground.own)
        self.ground.write(keys[what % len(keys)], self.setting.attributes(self._host(host), mac=8))

    @rule(what=places)
    @told
    def somebody_claims_our_public_ip(self, what: int) -> None:
        keys = impostors(self.ground.own)
        ours = {"PublicIP": OURS[4], "PublicIPv6": OURS[6]}
        self.ground.write(keys[what % len(keys)], self.setting.attributes(101, mac=7) | ours)

    def _host(self, place: int) -> int:
        hosts = self.setting.hosts
        return hosts[place % len(hosts)]
