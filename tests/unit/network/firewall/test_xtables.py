"""Tables of iptables-legacy as the kernel holds them.

The layout is from linux/netfilter/x_tables.h, linux/netfilter_ipv4/ip_tables.h and its sister for IPv6.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall import xtables
from flanneld.network.firewall.fate import Rule, Test
from flanneld.network.firewall.xtables import TableDump
from flanneld.network.rtnetlink.netlink import MalformedNetlink

#: What follows the addresses: interfaces, protocol, flags, inversions, unused, offsets of the target and of
#: the next entry, unused, packets and bytes.
REST = {4: "64sHBBIHHI2Q", 6: "64sHxBB3xIHHI2Q"}
SOURCE_INVERTED, DESTINATION_INVERTED, INTERFACE_INVERTED = 0x08, 0x10, 0x01
NO_ADDRESS: dict[Family, str] = {4: "0.0.0.0/0", 6: "::/0"}
RANDOM, RANDOM_FULLY = 1 << 2, 1 << 4


def extension(name: str, data: bytes, size: int | None = None) -> bytes:
    """A match or a target."""
    data += b"\0" * (-len(data) % 8)
    return struct.pack("@H29sB", 32 + len(data) if size is None else size, name.encode(), 0) + data


def standard(verdict: int) -> bytes:
    return extension("", struct.pack("@i", verdict))


def error(chain: str) -> bytes:
    return extension("ERROR", struct.pack("30s", chain.encode()))


def comment(text: str) -> bytes:
    return extension("comment", struct.pack("256s", text.encode()))


def mark(value: int, mask: int, *, inverted: bool = False) -> bytes:
    return extension("mark", struct.pack("@IIB", value, mask, inverted))


def masquerade(family: Family, flags: int) -> bytes:
    return extension("MASQUERADE", struct.pack("@4xI" if family == 4 else "@I", flags))


#: An entry of a family, once it is known where chains begin.
Entry = Callable[[Family, Mapping[str, int]], bytes]


def entry(
    target: bytes | str,
    *matches: bytes,
    source: str = "",
    destination: str = "",
    masks: tuple[bytes, bytes] | None = None,
    interface: bytes = b"",
    protocol: int = 0,
    flags: int = 0,
    inversions: int = 0,
) -> Entry:
    """``target`` may be a chain to jump to."""

    def packed(family: Family, begins: Mapping[str, int]) -> bytes:
        nets = [ip_network(each or NO_ADDRESS[family]) for each in (source, destination)]
        addresses = b"".join(net.network_address.packed for net in nets)
        lengths = b"".join(masks or [net.netmask.packed for net in nets])
        inside = b"".join(matches)
        end = standard(begins.get(target, 0)) if isinstance(target, str) else target
        form = f"@{len(addresses + lengths)}s{REST[family]}"
        size = struct.calcsize(form)
        offsets = 0, size + len(inside), size + len(inside) + len(end), 0, 0, 0
        head = struct.pack(form, addresses + lengths, interface, protocol, flags, inversions, *offsets)
        return head + inside + end

    return packed


def assembled(
    family: Family, built_in: Mapping[str, Sequence[Entry]], own: Mapping[str, Sequence[Entry]], policy: int
) -> TableDump:
    """Each built-in chain ends with its policy, one of our own with a return, and the table with an error."""
    begins: dict[str, int] = {}
    for _ in range(2):  # at first to see where the chains begin
        data = b""
        entries = 0
        hooks: dict[str, tuple[int, int]] = {}
        for name, inside in {**built_in, **own}.items():
            if name in own:
                data += entry(error(name))(family, begins)
                entries += 1
            begins[name] = len(data)
            data += b"".join(each(family, begins) for each in inside)
            if name in built_in:
                hooks[name] = begins[name], len(data)
            data += entry(standard(policy if name in built_in else -5))(family, begins)
            entries += len(inside) + 1
        data += entry(error("ERROR"))(family, begins)
    return TableDump(family, hooks, entries + 1, data)


def table(
    family: Family, *entries: Entry, own: Mapping[str, Sequence[Entry]] | None = None, policy: int = -2
) -> TableDump:
    return assembled(family, {"INPUT": [], "FORWARD": entries, "OUTPUT": []}, own or {}, policy)


FROM: dict[Family, str] = {4: "10.5.0.0/16", 6: "fc00:5::/48"}
SINGLE: dict[Family, str] = {4: "10.5.1.2/32", 6: "fc00:5::2/128"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("number", "verdict"),
    [(-1, "DROP"), (-2, "ACCEPT"), (-4, "QUEUE"), (-5, "RETURN"), (-9, "")],
)
def test_verdict_of_a_rule_is_a_negative_number(number: int, verdict: str, family: Family) -> None:
    own = {"FLANNEL-FWD": [entry(standard(-2))]}
    assert table(family, entry(standard(number)), own=own).rules("FORWARD") == (Rule(verdict),)


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_of_a_chain_end_with_its_policy_or_its_return(family: Family) -> None:
    own = {
        "FLANNEL-FWD": [entry(standard(-2)), entry(standard(-1))],
        "EMPTY": [],
        "FLANNEL-FWD-2": [entry("EMPTY")],
    }
    found = table(family, entry("FLANNEL-FWD"), entry("FLANNEL-FWD-2"), own=own, policy=-1)
    assert found.rules("FORWARD") == (Rule("FLANNEL-FWD"), Rule("FLANNEL-FWD-2"))
    assert found.rules("INPUT") == found.rules("OUTPUT") == found.rules("EMPTY") == ()
    assert found.rules("FLANNEL-FWD") == (Rule("ACCEPT"), Rule("DROP"))
    assert found.rules("FLANNEL-FWD-2") == (Rule("EMPTY"),)
    assert found.rules("FLANNEL") is None
    assert found.count() == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_chain_whose_name_is_also_in_a_comment_is_found(family: Family) -> None:
    found = table(
        family, entry(standard(-1), comment("FLANNEL-FWD")), own={"FLANNEL-FWD": [entry(standard(-2))]}
    )
    assert found.rules("FORWARD") == (Rule("DROP", comment="FLANNEL-FWD"),)
    assert found.rules("FLANNEL-FWD") == (Rule("ACCEPT"),)
    assert table(family, entry(standard(-1), comment("FLANNEL-FWD"))).rules("FLANNEL-FWD") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_rule_without_a_target_counts_packets_and_a_jump_may_lead_to_a_built_in_chain(family: Family) -> None:
    counts = assembled(family, {"INPUT": [entry("FORWARD")], "FORWARD": []}, {}, -2)
    assert counts.rules("INPUT") == (Rule("FORWARD"),)
    goes_on = assembled(family, {"INPUT": [entry("next")], "FORWARD": []}, {}, -2)
    size = goes_on.hooks["INPUT"][1]
    assert goes_on.rules("INPUT") == (Rule("INPUT"),)  # the offset 0
    assert table(family, entry(standard(2 * size))).rules("FORWARD") == (Rule(""),)


@pytest.mark.parametrize("family", FAMILIES)
def test_addresses_of_a_rule_are_read_with_their_negation(family: Family) -> None:
    net, host = ip_network(FROM[family]), ip_network(SINGLE[family])
    both = table(
        family,
        entry(standard(-2), source=FROM[family], destination=SINGLE[family]),
        entry(standard(-2), source=FROM[family], inversions=SOURCE_INVERTED),
        entry(standard(-2), destination=FROM[family], inversions=DESTINATION_INVERTED),
        entry(standard(-2), inversions=SOURCE_INVERTED),
    )
    everything = ip_network(NO_ADDRESS[family])
    assert both.rules("FORWARD") == (
        Rule("ACCEPT", (Test("source", (net,)), Test("destination", (host,)))),
        Rule("ACCEPT", (Test("source", (net,), negated=True),)),
        Rule("ACCEPT", (Test("destination", (net,), negated=True),)),
        Rule("ACCEPT", (Test("source", (everything,), negated=True),)),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("made", "extra"),
    [
        (entry(standard(-2), interface=b"eth0"), "interface"),
        (entry(standard(-2), protocol=17), "protocol"),
        (entry(standard(-2), flags=1), "flags"),
        (entry(standard(-2), inversions=INTERFACE_INVERTED), "inversion"),
        (entry(standard(-2), extension("udp", bytes(16))), "udp"),
        (entry(standard(-2), mark(0x4000, 0x4000, inverted=True)), "mark"),
        (entry(standard(-2), flags=1, protocol=6, interface=b"eth+"), "interface protocol flags"),
    ],
)
def test_rule_with_more_to_it_says_so(made: Entry, extra: str, family: Family) -> None:
    rule = Rule("ACCEPT", extra=extra)
    assert table(family, made).rules("FORWARD") == (rule,)
    assert not rule.is_plain


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_that_is_no_prefix_is_more_than_a_network(family: Family) -> None:
    address = ip_address(SINGLE[family].partition("/")[0]).packed
    odd, none = b"\xff\0" * (len(address) // 2), bytes(len(address))
    for masks, extra in (((odd, none), "mask"), ((none, odd), "mask"), ((odd, odd), "mask mask")):
        found = table(family, entry(standard(-2), masks=masks)).rules("FORWARD")
        assert found == (Rule("ACCEPT", extra=extra),)


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_of_a_rule_are_read_in_their_order(family: Family) -> None:
    found = table(family, entry(standard(-5), comment("flanneld masq"), mark(0x4000, 0x4000)))
    tests = (Test("mark", ((0x4000, 0x4000),)),)
    assert found.rules("FORWARD") == (Rule("RETURN", tests, "flanneld masq"),)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("flags", "random", "extra"),
    [
        (0, False, ""),
        (RANDOM_FULLY, True, ""),
        (RANDOM, True, "flags of MASQUERADE"),
        (RANDOM | RANDOM_FULLY, True, "flags of MASQUERADE"),
    ],
)
def test_flags_of_a_masquerade_are_read(flags: int, random: bool, extra: str, family: Family) -> None:
    found = table(family, entry(masquerade(family, flags))).rules("FORWARD")
    assert found == (Rule("MASQUERADE", random=random, extra=extra),)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_target_is_told_by_its_name(family: Family) -> None:
    found = table(family, entry(extension("LOG", b"\xff" * 32))).rules("FORWARD")
    assert found == (Rule("LOG"),)


@pytest.mark.parametrize("family", FAMILIES)
def test_match_without_a_size_is_malformed(family: Family) -> None:
    for size in (0, 31):
        found = table(family, entry(standard(-2), extension("udp", bytes(16), size)))
        with pytest.raises(MalformedNetlink):
            found.rules("FORWARD")
    assert table(family, entry(standard(-2), extension("udp", b""))).rules("FORWARD")


# ---- questions to the kernel ---------------------------------------------------------------------

SOL = {4: socket.SOL_IP, 6: socket.IPPROTO_IPV6}
SO_GET_INFO, SO_GET_ENTRIES = 64, 65
PLACES = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")


class FakeLibc:
    """Stands in for getsockopt(2): tables by level and name, and how often they have just changed."""

    def __init__(self) -> None:
        self.tables: dict[tuple[int, str], TableDump] = {}
        self.changes = 0

    def getsockopt(self, _: int, level: int, option: int, buffer: Any, length: Any) -> int:
        assert length._obj.value == len(buffer)
        name = buffer.raw[:32].rstrip(b"\0").decode()
        there = self.tables.get((level, name))
        if there is None:
            ctypes.set_errno(errno.ENOENT)
            return -1
        if option == SO_GET_INFO:
            ends = [there.hooks.get(place, (0, 0)) for place in PLACES]
            valid = sum(1 << number for number, place in enumerate(PLACES) if place in there.hooks)
            starts, policies = zip(*ends, strict=True)
            numbers = valid, *starts, *policies, there.entries, len(there.data)
            buffer.raw = struct.pack("@32sI5I5III", name.encode(), *numbers)
            return 0
        assert option == SO_GET_ENTRIES
        assert struct.unpack_from("@32sI", buffer.raw)[1] == len(there.data)
        if self.changes:
            self.changes -= 1
            ctypes.set_errno(errno.EAGAIN)
            return -1
        buffer.raw = buffer.raw[:40] + there.data
        return 0


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> FakeLibc:
    found = FakeLibc()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: found)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_read_from_the_tables_that_are_asked_for(family: Family, libc: FakeLibc) -> None:
    libc.tables = {
        (SOL[family], "filter"): table(family, entry(standard(-1)), own={"OWN": []}),
        (SOL[family], "nat"): table(family, entry(standard(-2)), entry(standard(-5))),
    }
    wanted = [("nat", "FORWARD"), ("filter", "FORWARD"), ("filter", "OWN"), ("nat", "OWN"), ("raw", "OUTPUT")]
    assert xtables.read(family, wanted, {"filter", "nat", "mangle"}) == {
        ("filter", "FORWARD"): (Rule("DROP"),),
        ("filter", "OWN"): (),
        ("nat", "FORWARD"): (Rule("ACCEPT"), Rule("RETURN")),
    }
    assert xtables.read(family, wanted, {"mangle"}) == {}
    with pytest.raises(FileNotFoundError):
        xtables.read(family, wanted, {"raw"})


@pytest.mark.parametrize(("changes", "is_read"), [(9, True), (10, False)])
def test_table_that_changes_meanwhile_is_read_again(changes: int, is_read: bool, libc: FakeLibc) -> None:
    libc.tables[SOL[4], "nat"] = table(4, entry(standard(-2)))
    libc.changes = changes
    if is_read:
        assert xtables.read(4, [("nat", "FORWARD")], {"nat"}) == {("nat", "FORWARD"): (Rule("ACCEPT"),)}
    else:
        with pytest.raises(BlockingIOError, match="table nat changes all the time"):
            xtables.read(4, [("nat", "FORWARD")], {"nat"})
