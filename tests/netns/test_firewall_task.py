"""The firewall task on real tables: each way to set rules, what disturbs them, and what was there before."""

from __future__ import annotations

import fcntl
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flanneld.reconcile.firewall import retire
from tests.lab import wait_for
from tests.netns.firewall_host import NETS, WAYS, Host, host
from tests.netns.rule_keeper import read_nets
from tests.unit.network.firewall.test_rules import GOLDEN

#: The legacy tables are looked at every second here, others only when the kernel says that rules are gone.
RESYNC = 1.0
#: Steps of a task in which it has looked at each of its tables, and found nothing to do.
STEPS = 3
SOON = 3.0

FLUSHES = {
    "nft": [
        "nft flush ruleset",
        "iptables-nft -F",
        "iptables-nft -t nat -F",
        "iptables-nft -t nat -D POSTROUTING 1",
    ],
    "nftables": [
        "nft flush ruleset",
        "nft delete table ip flannel-ipv4",
        "nft flush chain ip flannel-ipv4 postrtg",
    ],
    "legacy": ["iptables-legacy -F", "iptables-legacy -t nat -F", "iptables-legacy -F FLANNEL-FWD"],
}
FLUSHES["python-iptables"] = FLUSHES["legacy"]

LOOK_ALIKES = """
iptables-{0} -A FORWARD -s 10.5.0.0/16 -j ACCEPT
iptables-{0} -A FORWARD -d 10.5.0.0/16 -j ACCEPT -m comment --comment 'flanneld forward'
iptables-{0} -t nat -A POSTROUTING -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully
iptables-{0} -N FLANNEL-FWD
iptables-{0} -A FLANNEL-FWD -s 10.5.3.0/24 -p tcp -j DROP
iptables-{0} -A FORWARD -i eth1 -j FLANNEL-FWD
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path) as made:
        yield made


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def golden(name: str) -> list[str]:
    """The rules in a golden file, as ``Host.rules`` gives them."""
    table, found = "", []
    for line in (GOLDEN / f"{name}.txt").read_text().splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith("-A"):
            found.append(f"{table} {line}")
    return sorted(found, key=lambda line: line.split()[:3])


def everything(style: str = "own-chains") -> list[str]:
    return golden(f"{style}-both-ipv4") + golden(f"{style}-both-ipv6")


def native() -> list[str]:
    return [
        line for family in (4, 6) for line in (GOLDEN / f"native-ipv{family}.nft").read_text().splitlines()
    ]


def wanted(way: str, style: str = "own-chains") -> list[str]:
    return native() if way == "nftables" else everything(style)


def wait_until_right(machine: Host, way: str) -> None:
    wait_for(lambda: machine.state(way) == wanted(way), SOON, "the rules to be right again")


# ---- setting them -------------------------------------------------------------------------------


def test_the_rules_are_those_of_upstream(machine: Host, way: str) -> None:
    machine.set_once(**WAYS[way])
    assert machine.state(way) == wanted(way)


@pytest.mark.parametrize("way", ["nft", "legacy", "python-iptables"])
def test_the_rules_of_v012_are_set_on_demand(machine: Host, way: str) -> None:
    machine.set_once(style="v0.12", **WAYS[way])
    assert machine.state(way) == everything("v0.12")
    assert machine.chains("nft" if way == "nft" else "legacy") == []


def test_only_requested_rules_are_set(machine: Host, way: str) -> None:
    machine.set_once(masquerade=False, **WAYS[way])
    assert [line for line in machine.state(way) if "masq" in line] == []
    assert [line for line in machine.state(way) if "flanneld forward" in line]


def test_rules_no_longer_requested_are_removed(machine: Host, way: str) -> None:
    machine.set_once(**WAYS[way])
    machine.set_once(masquerade=False, **WAYS[way])
    assert [line for line in machine.state(way) if "masq" in line] == []


def test_a_second_start_finds_all_right_and_writes_nothing(machine: Host, way: str) -> None:
    machine.set_once(**WAYS[way])
    environment, notes = machine.spies()
    with machine.watched() as written:
        lease_keeper = machine.keep(environment=environment, **WAYS[way])
        lease_keeper.stop()
        assert written.changes() == []
    assert "-restore" not in notes.read_text()
    assert [
        line for line in lease_keeper.lines("IWEF") if line.startswith(("Made", "Removed", "Restored"))
    ] == []


def test_correct_rules_cause_no_write_and_no_command(machine: Host, way: str) -> None:
    environment, notes = machine.spies()
    lease_keeper = machine.keep(environment=environment, resync=1, **WAYS[way])
    with machine.watched() as written:
        notes.write_text("")
        logged, steps = lease_keeper.lines("IWEF"), lease_keeper.steps()

        def looked_at_them_again() -> bool:
            assert written.changes() == []  # It makes a table, of which the kernel tells the task.
            return lease_keeper.steps() >= steps + STEPS

        wait_for(looked_at_them_again, 60, "the task to look at its rules")
    assert notes.read_text() == ""
    assert lease_keeper.lines("IWEF") == logged


def test_the_legacy_tables_are_not_made_by_looking(machine: Host) -> None:
    machine.set_once(flavour="auto")
    with machine.namespace.entered():
        tables = [Path(f"/proc/thread-self/net/{name}_tables_names").read_text() for name in ("ip", "ip6")]
    assert tables == ["", ""]


def test_python_iptables_makes_no_table_that_is_not_needed(machine: Host) -> None:
    machine.set_once(**WAYS["python-iptables"])
    with machine.namespace.entered():
        assert sorted(Path("/proc/thread-self/net/ip_tables_names").read_text().split()) == ["filter", "nat"]


# ---- being disturbed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "flush"), [(way, flush) for way, flushes in FLUSHES.items() for flush in flushes]
)
def test_flushed_rules_are_restored(machine: Host, way: str, flush: str) -> None:
    lease_keeper = machine.keep(resync=RESYNC, **WAYS[way])
    machine.sh(flush)
    wait_until_right(machine, way)
    lease_keeper.wait_for_line("Restored our rules")
    assert all("missing were" in line for line in lease_keeper.lines())


def test_the_culprit_is_named(machine: Host) -> None:
    lease_keeper = machine.keep(**WAYS["nft"])
    machine.sh("iptables-nft -t nat -F POSTROUTING")
    lease_keeper.wait_for_line("Restored our rules with iptables-nft, ")
    lease_keeper.wait_for_line(" after a change by iptables-nft: missing were nat POST")


@pytest.mark.parametrize("way", ["nft", "legacy", "python-iptables"])
def test_look_alikes_and_rules_of_others_are_left_alone(machine: Host, way: str) -> None:
    flavour = "nft" if way == "nft" else "legacy"
    machine.sh(LOOK_ALIKES.format(flavour))
    before = machine.rules(flavour)
    machine.set_once(former=NETS, **WAYS[way])
    machine.sh(f"iptables-{flavour} -D FORWARD -j FLANNEL-FWD -m comment --comment 'flanneld forward'")
    machine.set_once(former=NETS, **WAYS[way])
    after = machine.rules(flavour)
    assert [line for line in after if line in before] == before
    assert set(golden("own-chains-both-ipv4")) <= set(after)


@contextmanager
def appending(machine: Host, flavour: str) -> Iterator[list[str]]:
    """A program that adds one rule after the other meanwhile; all of them, as ``Host.rules`` gives them."""
    stop = threading.Event()
    rules: list[str] = []

    def append() -> None:
        while not stop.is_set():
            rule = f"-A FORWARD -m comment --comment n{len(rules)} -j ACCEPT"
            machine.sh(f"iptables-{flavour} -w {rule}")
            rules.append(f"filter {rule}")

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield rules
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("way", ["nft", "legacy", "python-iptables"])
def test_two_daemons_and_a_third_program_lose_no_rule(machine: Host, way: str) -> None:
    flavour = "nft" if way == "nft" else "legacy"
    neighbour = [("10.6.0.0/16", "10.6.1.0/24")]
    ours = golden("own-chains-both-ipv4")
    theirs = [line.replace("10.5.72.", "10.6.1.").replace("10.5.", "10.6.") for line in ours]
    with appending(machine, flavour) as third:
        keepers = [
            machine.start(resync=1, nets=[NETS[0]], **WAYS[way]),
            machine.start(resync=1, nets=neighbour, **WAYS[way]),
        ]
        for lease_keeper in keepers:
            lease_keeper.wait_started()
        for _ in range(3):
            machine.sh(
                f"iptables-{flavour} -w -t nat -F FLANNEL-POSTRTG; iptables-{flavour} -w -D FLANNEL-FWD 1"
            )
            wait_for(lambda: {*ours, *theirs} <= set(machine.rules(flavour)), 10, "both daemons' rules")

    def all_there() -> bool:
        there = machine.rules(flavour)
        in_order = [
            [line for line in dict.fromkeys(there) if line in rules] == rules
            for rules in (third, ours, theirs)
        ]
        return all(in_order)

    wait_for(all_there, 10, "every rule of all three to be there")
    assert set(machine.rules(flavour)) == {*third, *ours, *theirs}


def test_a_fight_is_waged_slowly_and_named(machine: Host) -> None:
    lease_keeper = machine.keep(nets=[NETS[0]], **WAYS["nft"])

    def fight() -> bool:
        machine.namespace.run("nft", "flush", "chain", "ip", "nat", "POSTROUTING")
        return "Another program keeps changing the rules" in lease_keeper.log()

    wait_for(fight, 30, "the fight to be named")
    repairs = lease_keeper.times("Restored our rules")
    pauses = [after - before for before, after in itertools.pairwise(repairs)]
    assert len(pauses) >= 7
    least = (0.2, 0.2, 0.2, 0.2, 0.4, 0.8, 1.6)
    assert all(pause > short for pause, short in zip(pauses, least, strict=False))
    assert sum("Another program keeps changing the rules" in line for line in lease_keeper.lines()) == 1


# ---- commands that do not do what they should -----------------------------------------------------


def test_a_failing_command_is_logged_once_and_tried_again(machine: Host) -> None:
    tries = machine.directory / "tries"
    script = f"echo again >>{tries}; echo 'no luck' >&2; exit 1"
    environment = machine.stub(["iptables-nft-restore"], script)
    lease_keeper = machine.keep(environment=environment, nets=[NETS[0]], **WAYS["nft"])
    lease_keeper.wait_for_line("iptables-nft-restore --noflush --wait=5 ended with status 1: no luck")
    wait_for(lambda: tries.read_text().count("again") >= 3, 30, "further tries")
    assert len(lease_keeper.lines()) == 1
    (machine.directory / "bin/iptables-nft-restore").unlink()
    lease_keeper.wait_for_line("The rules for IPv4 are in place")
    assert machine.rules("nft") == golden("own-chains-both-ipv4")


def test_a_reading_that_fails_is_not_an_empty_table(machine: Host) -> None:
    machine.set_once(nets=[NETS[0]], **WAYS["nft"])
    environment = machine.stub(["iptables-nft"], "echo 'cannot read' >&2; exit 4")
    with machine.watched() as written:
        lease_keeper = machine.keep(environment=environment, nets=[NETS[0]], **WAYS["nft"])
        lease_keeper.wait_for_line("ended with status 4: cannot read")
        assert written.changes() == []


def test_a_hanging_command_does_not_keep_the_daemon_from_stopping(machine: Host) -> None:
    environment = machine.stub(["iptables-nft-restore"], f"touch {machine.directory}/begun; sleep 1000")
    lease_keeper = machine.start(environment=environment, **WAYS["nft"])
    wait_for((machine.directory / "begun").exists, what="the command to run")
    lease_keeper.stop()


@pytest.mark.parametrize("way", ["legacy", "python-iptables"])
def test_a_lock_that_is_held_is_waited_for_and_named_once(machine: Host, way: str) -> None:
    with machine.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = time.monotonic()
        lease_keeper = machine.start(nets=[NETS[0]], **WAYS[way])
        lease_keeper.wait_for_line("another program held the xtables lock for 5 s", 20)
        assert time.monotonic() - begin > 5
        assert len(lease_keeper.lines()) == 1
    lease_keeper.wait_for_line("The rules for IPv4 are in place")
    assert machine.rules("legacy") == golden("own-chains-both-ipv4")


def test_a_lock_that_is_held_does_not_keep_the_daemon_from_stopping(machine: Host) -> None:
    with machine.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lease_keeper = machine.start(nets=[NETS[0]], **WAYS["python-iptables"])
        lease_keeper.wait_for_line("Setting up masking rules")
        lease_keeper.stop()
    assert "xtables lock" not in lease_keeper.log(), "it has waited for the lock to the end"


def test_an_iptables_without_random_ports_masquerades_all_the_same(machine: Host) -> None:
    refuse = 'text=$(cat); case $text in *--random-fully*) echo "unknown option" >&2; exit 2; esac; '
    environment = machine.stub(
        ["iptables-nft-restore"],
        refuse + 'echo "$text" | exec -a iptables-nft-restore /usr/sbin/iptables-nft-restore "$@"',
    )
    lease_keeper = machine.keep(environment=environment, nets=[NETS[0]], **WAYS["nft"])
    assert machine.rules("nft") == [
        line.removesuffix(" --random-fully") for line in golden("own-chains-both-ipv4")
    ]
    assert [line for line in lease_keeper.lines() if "masquerading without" in line]


NO_TOOLS = "for flavour in nft legacy; do mount --bind /dev/null /usr/sbin/xtables-$flavour-multi; done"


@pytest.mark.parametrize("masquerade", [True, False])
def test_a_host_without_iptables_is_told_what_to_install(machine: Host, masquerade: bool) -> None:
    lease_keeper = machine.start(before=NO_TOOLS, masquerade=masquerade)
    if masquerade:
        assert lease_keeper.wait() == 1
    else:
        lease_keeper.wait_started()
    assert "install the Debian package iptables" in lease_keeper.log()


# ---- what was there before --------------------------------------------------------------------------

PLACES = {
    **WAYS,
    "v0.12": {**WAYS["nft"], "style": "v0.12"},
    "legacy v0.12": {**WAYS["python-iptables"], "style": "v0.12"},
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *itertools.permutations(["nft", "legacy", "nftables"], 2),
        ("nft", "v0.12"),
        ("v0.12", "nft"),
        ("v0.12", "python-iptables"),
        ("v0.12", "nftables"),
        ("legacy v0.12", "python-iptables"),
        ("python-iptables", "legacy v0.12"),
        ("legacy v0.12", "v0.12"),
    ],
)
def test_a_change_of_the_way_leaves_nothing_of_the_old_one(machine: Host, old: str, new: str) -> None:
    machine.set_once(**PLACES[old])
    machine.set_once(former=NETS, **PLACES[new])
    style = str(PLACES[new].get("style", "own-chains"))
    right: dict[str, list[str]] = {"nft": [], "legacy": [], "nftables": []}
    right["nftables" if new == "nftables" else str(PLACES[new]["flavour"])] = wanted(new, style)
    assert {place: machine.state(place) for place in right} == right


def test_chains_of_flannel_0_20_are_taken_over(machine: Host) -> None:
    machine.sh(
        "iptables-nft-restore --noflush <<'.'\n*nat\n:FLANNEL-POSTRTG - [0:0]\n"
        '-I POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG\n'
        '-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN\n'
        '-A FLANNEL-POSTRTG -s 10.5.0.0/16 -d 10.5.0.0/16 -m comment --comment "flanneld masq" -j RETURN\n'
        "COMMIT\n.\n"
    )
    machine.set_once(nets=[NETS[0]], **WAYS["nft"])
    assert machine.rules("nft") == golden("own-chains-both-ipv4")


def test_rules_of_gos_nftables_are_taken_over(machine: Host) -> None:
    machine.sh(
        "nft add table ip flannel-ipv4\n"
        "nft add chain ip flannel-ipv4 postrtg '{ type nat hook postrouting priority srcnat; }'\n"
        "nft add rule ip flannel-ipv4 postrtg meta mark 0x4000 return\n"
        "nft add rule ip flannel-ipv4 postrtg ip saddr != 10.5.72.0/24 ip daddr 10.5.0.0/16 return\n"
    )
    machine.set_once(**WAYS["nftables"])
    assert sorted(machine.state("nftables")) == sorted(native())


SPARED = ["192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32"]


def test_spared_destinations_come_before_the_masquerading_rules(machine: Host, way: str) -> None:
    machine.set_once(spared=SPARED, **WAYS[way])
    state = [line for line in machine.state(way) if "masq" in line]
    for net in SPARED:
        at, *_ = (place for place, line in enumerate(state) if net.removesuffix("/32") in line)
        after = [line for line in state[at:] if "MASQUERADE" in line or "masquerade" in line]
        assert "RETURN" in state[at] or "return" in state[at]
        assert len(after) == (2 if ":" in net else 4)
    again = machine.set_once(spared=SPARED, **WAYS[way])
    assert "Made" not in again
    machine.set_once(**WAYS[way])
    assert machine.state(way) == wanted(way)


def test_nodes_of_an_earlier_run_are_spared_until_the_leases_are_known(machine: Host, way: str) -> None:
    nodes = ["192.0.2.7", "192.0.2.8", "2001:db8::7"]
    keeper = machine.keep(nodes=nodes, **WAYS[way])
    wait_for(lambda: "2001:db8::7" in "".join(machine.state(way)), SOON, "the nodes to be spared")
    keeper.stop()
    before = machine.state(way)
    machine.set_once(nodes=[], **WAYS[way])
    assert machine.state(way) == before
    keeper = machine.keep(nodes=nodes[:1], **WAYS[way])
    wait_for(lambda: "2001:db8::7" not in "".join(machine.state(way)), SOON, "a node to be forgotten")
    assert "192.0.2.7" in "".join(machine.state(way))
    assert "192.0.2.8" not in "".join(machine.state(way))


@pytest.mark.parametrize("wish", ["nodes", "spared"])
def test_too_many_exceptions_for_iptables_are_a_condition_and_none_for_nftables(
    machine: Host, way: str, wish: str
) -> None:
    addresses = [f"192.0.{number // 128}.{2 * (number % 128) + 1}" for number in range(257)]
    keeper = machine.keep(**WAYS[way] | {wish: addresses})
    if way == "nftables":
        wait_for(lambda: "192.0.2.1" in machine.native(), SOON, "the nodes to be spared")
        assert "MasqueradeExceptions" not in keeper.log()
    else:
        keeper.wait_for_line("MasqueradeExceptions, and iptables is given 256 at most; set EnableNFTables")
        assert machine.state(way) == wanted(way)


def test_rules_of_go_replace_exceptions_and_are_replaced_by_them(machine: Host) -> None:
    machine.set_once(spared=SPARED, **WAYS["nft"])
    # Go flannel empties its chains at the start, and writes the rules without exceptions.
    for family in (4, 6):
        rules = GOLDEN / f"own-chains-both-ipv{family}.txt"
        machine.sh(f"ip{'6' if family == 6 else ''}tables-nft-restore --noflush <{rules}")
    assert "192.0.2.0/24" not in "".join(machine.state("nft"))
    machine.set_once(spared=SPARED, **WAYS["nft"])
    assert "192.0.2.0/24" in "".join(machine.state("nft"))


#: A policy that drops, and what a host has to run against it.
POLICIES = {
    "nft": ("iptables-nft -P FORWARD DROP", "iptables-nft -I FORWARD -s 10.5.0.0/16 -j ACCEPT"),
    "legacy": ("iptables-legacy -P FORWARD DROP", "iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT"),
    "native": (
        "nft add table inet wall; nft add chain inet wall passing"
        " '{ type filter hook forward priority 0; policy drop; }'",
        "nft insert rule inet wall passing ip saddr 10.5.0.0/16 accept",
    ),
}
#: Where our own rules accept, and so outweigh a policy.
OURS = {"nft": "nft", "legacy": "legacy", "python-iptables": "legacy", "nftables": ""}


@pytest.mark.parametrize("place", POLICIES)
def test_a_policy_that_wins_over_our_rules_is_reported_with_what_helps(
    machine: Host, way: str, place: str
) -> None:
    drop, remedy = POLICIES[place]
    machine.sh(drop)
    reported = machine.keep(**WAYS[way]).lines()
    assert any(remedy in line for line in reported) == (OURS[way] != place)


@pytest.mark.parametrize("place", POLICIES)
def test_a_policy_is_reported_when_forwarding_is_left_to_others_until_they_accept(
    machine: Host, place: str
) -> None:
    machine.sh(POLICIES[place][0])

    def warnings() -> list[str]:
        return machine.keep(masquerade=False, forward=False, nets=[NETS[0]]).lines()

    (line,) = warnings()
    machine.sh(line.partition("run as root: ")[2])
    assert warnings() == []


# ---- taking it all away ---------------------------------------------------------------------------


def everywhere(machine: Host) -> dict[str, list[str]]:
    return {place: machine.state(place) for place in ("nft", "legacy", "nftables")}


@pytest.fixture
def full(machine: Host) -> Host:
    """A host with rules of flannel in every place."""
    for way in ("nft", "legacy", "nftables"):
        machine.set_once(**WAYS[way])
    # Each start has removed what the one before it had set elsewhere.
    machine.sh("iptables-nft-restore", stdin=text("own-chains-both-ipv4"))
    machine.sh("ip6tables-nft-restore", stdin=text("v0.12-both-ipv6"))
    machine.sh("iptables-legacy-restore", stdin=text("v0.12-both-ipv4"))
    machine.sh("ip6tables-legacy-restore", stdin=text("own-chains-both-ipv6"))
    assert all(everywhere(machine).values())
    return machine


def text(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text()


def remove_everything(machine: Host, *, dry_run: bool) -> list[str]:
    with machine.namespace.entered(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XTABLES_LOCKFILE", str(machine.lock))
        removed, failures = retire([(each.network, each.subnet) for each in read_nets(NETS)], dry_run=dry_run)
    assert failures == []
    return removed


def test_a_dry_run_changes_nothing_and_tells_what_would_go(full: Host) -> None:
    before = everywhere(full)
    told = remove_everything(full, dry_run=True)
    assert everywhere(full) == before
    assert told == remove_everything(full, dry_run=False)


def test_all_of_flannels_rules_go(full: Host) -> None:
    remove_everything(full, dry_run=False)
    assert everywhere(full) == {"nft": [], "legacy": [], "nftables": []}
    assert full.chains("nft") == full.chains("legacy") == []


def test_rules_of_others_stay_when_flannels_go(machine: Host) -> None:
    machine.sh(LOOK_ALIKES.format("nft"))
    before = machine.rules("nft")
    machine.set_once(**WAYS["nft"])
    remove_everything(machine, dry_run=False)
    assert [line for line in machine.rules("nft") if line in before] == before
    assert [line for line in machine.rules("nft") if line not in before] == [
        'filter -A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD'
    ], "what leads to a rule of theirs stays too"


def test_a_chain_that_others_lead_to_is_only_emptied(machine: Host) -> None:
    machine.set_once(**WAYS["nft"])
    machine.sh("iptables-nft -A FORWARD -i eth1 -j FLANNEL-FWD")
    told = remove_everything(machine, dry_run=False)
    assert machine.rules("nft") == ["filter -A FORWARD -i eth1 -j FLANNEL-FWD"]
    assert machine.chains("nft") == ["FLANNEL-FWD"]
    assert "iptables-nft: filter FLANNEL-FWD, emptied but not removed: a rule leads there" in told
