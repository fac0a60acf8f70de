"""What others do to the kernel of the node: to what is the daemon's, and for themselves."""

from __future__ import annotations

import time

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.netns.histories.history import History, told
from tests.netns.histories.of_peers import places
from tests.netns.histories.packet_filter import damage, foreign_rules, script, survivors
from tests.netns.histories.setting import GATEWAY, PLAYERS, UPLINK, address, home, nets
from tests.netns.histories.vandalism import ANYWHERE, BOUNCE, BOUNCED, DEVICE, ROUTES, TUNNEL, WORDS, foreign
from tests.netns.histories.wanted import DATA, PUBLIC_IP

#: Who repairs the same more often than this in a minute takes it for a fight, and waits.
_FIGHT, _MINUTE = 4, 60.0


class OfVandals(History):
    @rule(
        what=st.lists(st.sampled_from(ROUTES + ANYWHERE), min_size=1, max_size=2),
        peer=places,
        quiet=st.booleans(),
    )
    @told
    def somebody_tampers_with_a_way(self, what: list[str], peer: int, quiet: bool) -> None:
        if self.setting.type == "udp":  # The ways are in the pump.
            what = [each for each in what if each in ANYWHERE]
        self._tamper(what, peer, quiet)

    @precondition(lambda self: self.setting.devices)
    @rule(what=st.lists(st.sampled_from(TUNNEL), min_size=1, max_size=3), peer=places, quiet=st.booleans())
    @told
    def somebody_tampers_with_the_tunnel(self, what: list[str], peer: int, quiet: bool) -> None:
        if self.setting.type != "vxlan":
            what = [each for each in what if each in DEVICE]
        self._tamper(what, peer, quiet)

    @rule(what=places)
    @told
    def somebody_adds_what_is_his(self, what: int) -> None:
        choice = foreign(self.setting)
        command = choice[what % len(choice)]
        if command in self.added:
            return
        self.node.namespace.ip(command)
        self.added.append(command)
        now = self.ground.look().foreign()
        assert sum(map(len, now.values())) > sum(map(len, self.foreign.values())), f"{command}: gone at once"
        self.foreign = now

    @precondition(lambda self: self.setting.is_direct)
    @rule(host=places, how=st.sampled_from([f"via {GATEWAY[4]}", f"dev {UPLINK}", ""]))
    @told
    def a_host_moves(self, host: int, how: str) -> None:
        """Behind the gateway, onto our link, or to where it was."""
        hosts = self.setting.hosts
        where = address(4, hosts[host % len(hosts)])
        self.detours.pop(where, None)
        if how:
            self.detours[where] = f"ip route add {where}/32 {how}"
        self.ground.act(f"ip route del {where}/32", *([self.detours[where]] if how else []))
        self.foreign = self.ground.look().foreign()
        self.kept.clear()

    @rule(peer=places)
    @told
    def the_host_gets_a_network_where_a_peer_is_or_loses_it(self, peer: int) -> None:
        number = PLAYERS[peer % len(PLAYERS)]
        lease = self.setting.lease(number)
        self.kept.pop(lease, None)
        self.heard.pop(lease, None)
        self.ground.act(f"ip address {'del' if lease in self.taken else 'add'} {home(number)} dev br9")
        self.taken ^= {lease}
        self.foreign = self.ground.look().foreign()

    @rule(value=st.integers(0, 2), name=st.sampled_from(["all", "eth0", "default"]))
    @told
    def somebody_sets_a_sysctl(self, value: int, name: str) -> None:
        path = f"net/ipv4/conf/{name}/rp_filter"
        self.node.namespace.sysctl(path, value)
        self.sysctls[path] = value

    # ---- the packet filter -----------------------------------------------------------------------

    @rule(what=places, quiet=st.booleans())
    @told
    def somebody_damages_the_packet_filter(self, what: int, quiet: bool) -> None:
        if not self._may_damage():
            return
        choice = damage(self.setting)
        chosen = choice[what % len(choice)]
        done = self.node.run(*script(self.setting, chosen.command), check=False)
        if done.returncode == 0:
            self.foreign_rules = survivors(self.foreign_rules, chosen)
        if quiet:
            self.settle()

    @rule(what=places)
    @told
    def somebody_adds_rules_of_his_own(self, what: int) -> None:
        self.settle()  # There has to be the chain.
        choice = foreign_rules(self.setting)
        self.node.run(*script(self.setting, choice[what % len(choice)]))
        now = self.ground.rules()[1]
        assert len(now) == len(self.foreign_rules) + 1
        self.foreign_rules = now

    def _may_damage(self) -> bool:
        """Not so often that it looks like a fight."""
        now = time.monotonic()
        recent = [moment for moment in self.ground.damages if moment > now - _MINUTE]
        self.ground.damages[:] = recent
        if len(recent) * len(self.setting.families) >= _FIGHT:
            return False
        self.ground.damages.append(now)
        return True

    # ---- how -------------------------------------------------------------------------------------

    def _tamper(self, what: list[str], place: int, quiet: bool) -> None:
        """Do something to what leads to one of the peers, and perhaps wait until it is healed."""
        if quiet:
            self.settle()
        leases = self.peers()
        peers = sorted(leases)
        lease = peers[place % len(peers)] if peers else ""
        family = self.setting.families[place % len(self.setting.families)]
        words = WORDS[family] | {"device": self.setting.devices.get(family, "")}
        if lease:
            subnet = nets(lease)[family]
            data = leases[lease].get(DATA[family]) or {}
            words |= {"subnet": str(subnet), "base": str(subnet[0]), "mac": data.get("VtepMAC", "")}
            words |= {"host": leases[lease].get(PUBLIC_IP[family], "")}
        for each in what:
            if each == BOUNCE:
                again = (*(f"ip {command}" for command in self.added), *self.detours.values())
                self.ground.act(*BOUNCED, *again)
            elif lease or "{subnet}" not in each:
                if "replace" in each and "{subnet}" in each:
                    self.strays.add(words["subnet"])
                    if not quiet:
                        self.excused.add(words["subnet"])
                self.ground.act(each.format_map(words))
        if quiet:
            self.settle()
