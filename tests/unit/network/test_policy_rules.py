"""Policy rules as the kernel dumps them (linux/fib_rules.h), and as ip-rule(8) takes them."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest

from flanneld.model import FAMILIES
from flanneld.network.host import HostView
from flanneld.network.routing import RTM_GETRULE, PolicyRule, decode
from flanneld.network.rtnetlink.netlink import MalformedNetlink, NetlinkSocket, attribute, u32

TO, FROM, IIF, PRIORITY, MARK, TABLE, MASK, OIF, PROTOCOL = 1, 2, 3, 6, 10, 15, 16, 17, 22
SPORTS, DPORTS = 23, 24
#: struct fib_rule_port_range, and an IP protocol, as attributes.
VXLAN, EPHEMERAL = struct.pack("=HH", 8472, 8472), struct.pack("=HH", 49152, 65535)
OF_UDP = attribute(PROTOCOL, b"\x11")
LOOKUP, GOTO, BLACKHOLE, UNREACHABLE, PROHIBIT = 1, 2, 6, 7, 8
INVERT = 2
AF_INET, AF_INET6 = 2, 10


def dumped(*attributes: bytes, family: int = AF_INET, lengths: tuple[int, int] = (0, 0), tos: int = 0,
           table: int = 254, action: int = LOOKUP, flags: int = 0) -> PolicyRule:  # fmt: skip
    head = struct.pack("=BBBBBBBBI", family, *lengths, tos, table, 0, 0, action, flags)
    data = head + b"".join(attributes)
    return decode(data, 0, len(data))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (dumped(), "from all lookup main"),
        (dumped(table=255), "from all lookup local"),
        (dumped(table=253), "from all lookup default"),
        (dumped(u32(TABLE, 1000), table=252), "from all lookup 1000"),
        (dumped(action=GOTO), "from all goto"),
        (dumped(action=BLACKHOLE), "from all blackhole"),
        (dumped(action=UNREACHABLE), "from all unreachable"),
        (dumped(action=PROHIBIT), "from all prohibit"),
        (dumped(u32(MARK, 0x200), u32(MASK, 0xFF00), table=100), "from all fwmark 0x200/0xff00 lookup 100"),
        (dumped(u32(MARK, 7), u32(MASK, 0xFF), flags=INVERT), "not from all fwmark 0x7/0xff lookup main"),
        (dumped(attribute(IIF, b"eth0\0")), "from all iif eth0 lookup main"),
        (dumped(attribute(OIF, b"eth1\0")), "from all oif eth1 lookup main"),
        (dumped(attribute(FROM, bytes([10, 5, 1, 0])), lengths=(0, 24)), "from 10.5.1.0/24 lookup main"),
        (dumped(attribute(TO, bytes([10, 5, 0, 0])), lengths=(16, 0)), "from all to 10.5.0.0/16 lookup main"),
        (
            dumped(OF_UDP, attribute(DPORTS, VXLAN), action=PROHIBIT),
            "from all ipproto udp dport 8472 prohibit",
        ),
        (
            dumped(attribute(PROTOCOL, b"\x84"), attribute(SPORTS, EPHEMERAL)),
            "from all ipproto 132 sport 49152-65535 lookup main",
        ),
    ],
)
def test_rule_is_written_as_ip_rule_takes_it(found: PolicyRule, text: str) -> None:
    assert found.text == text


def test_protocol_and_ports_of_a_rule_are_read() -> None:
    rule = dumped(OF_UDP, attribute(DPORTS, EPHEMERAL))
    assert (rule.protocol, rule.ports) == (17, (49152, 65535))
    with pytest.raises(MalformedNetlink):
        dumped(attribute(DPORTS, b"\0\1"))


def test_conditions_of_a_rule_are_read() -> None:
    source = ip_network("fd00::/64")
    data = attribute(FROM, source.network_address.packed)
    rule = dumped(data, u32(PRIORITY, 99), attribute(IIF, b"eth0\0"), family=AF_INET6, lengths=(0, 64))
    assert rule == PolicyRule(6, 99, "from fd00::/64 iif eth0 lookup main", source, None, "eth0")
    assert dumped(flags=INVERT) == PolicyRule(4, 0, "not from all lookup main", is_inverted=True)


@pytest.mark.parametrize(
    ("rule", "is_narrow"),
    [
        (dumped(), False),
        (dumped(u32(MARK, 0)), False),
        (dumped(u32(MARK, 1)), False),
        (dumped(attribute(OIF, b"eth1\0")), True),
        (dumped(tos=8), True),
        (dumped(OF_UDP, attribute(DPORTS, VXLAN)), False),
        (dumped(attribute(SPORTS, VXLAN)), True),
        (dumped(flags=1), False),
    ],
)
def test_condition_that_is_not_looked_at_makes_a_rule_narrow(rule: PolicyRule, is_narrow: bool) -> None:
    assert rule.is_narrow is is_narrow


@pytest.mark.parametrize(("priority", "is_default"), [(0, True), (1, False), (32766, True), (32767, True)])
def test_rules_that_every_host_has_are_known_by_their_priority(priority: int, is_default: bool) -> None:
    assert dumped(u32(PRIORITY, priority)).is_default is is_default


TARGET, SOURCE = ip_address("10.5.2.9"), ip_address("10.5.1.9")


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (PolicyRule(4, 9, ""), True),
        (PolicyRule(6, 9, ""), False),
        (PolicyRule(6, 9, "", is_inverted=True), False),
        (PolicyRule(4, 9, "", is_narrow=True), False),
        (PolicyRule(4, 9, "", is_inverted=True), False),
        (PolicyRule(4, 9, "", ip_network("10.5.1.0/24"), ip_network("10.5.2.0/24")), True),
        (PolicyRule(4, 9, "", ip_network("10.5.3.0/24")), False),
        (PolicyRule(4, 9, "", None, ip_network("10.5.3.0/24")), False),
        (PolicyRule(4, 9, "", ip_network("10.5.3.0/24"), is_inverted=True), True),
        (PolicyRule(4, 9, "", ip_network("10.5.3.0/24"), is_narrow=True, is_inverted=True), True),
        (PolicyRule(4, 9, "", iif="cni0"), True),
        (PolicyRule(4, 9, "", iif="eth0"), False),
        (PolicyRule(4, 9, "", mark=(0x200, 0xFF00)), True),
        (PolicyRule(4, 9, "", mark=(0x201, 0xFFFF)), True),
        (PolicyRule(4, 9, "", mark=(0x200, 0xFFFF)), False),
        (PolicyRule(4, 9, "", mark=(0x0, 0x1)), False),
        (PolicyRule(4, 9, "", protocol=17), True),
        (PolicyRule(4, 9, "", protocol=6), False),
        (PolicyRule(4, 9, "", ports=(8472, 8472)), True),
        (PolicyRule(4, 9, "", ports=(8473, 9000)), False),
        (PolicyRule(4, 9, "", ports=(1, 8471)), False),
    ],
)
def test_rule_is_about_packets_that_fulfil_its_conditions(rule: PolicyRule, matches: bool) -> None:
    assert rule.may_match(TARGET, SOURCE, "cni0", 0x201, 17, 8472) is matches


def test_rule_about_senders_is_not_about_packets_of_none() -> None:
    rule = PolicyRule(4, 9, "", ip_network("0.0.0.0/0"))
    assert not rule.may_match(TARGET, None, "")
    assert rule.may_match(TARGET, SOURCE, "")
    assert PolicyRule(4, 9, "").may_match(TARGET, None, "")
    assert not PolicyRule(4, 9, "", protocol=6).may_match(TARGET, None, "")


def test_rule_of_another_family_is_malformed() -> None:
    with pytest.raises(MalformedNetlink):
        dumped(family=7)


def test_kernel_without_ipv6_has_no_rules_and_no_addresses_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to list the rules of a family without any, and lists the addresses of all others."""
    local = struct.pack("=BBBBI", AF_INET, 8, 0, 0, 1) + attribute(1, bytes([127, 0, 0, 1]))

    def dump(_: object, kind: int, _body: bytes) -> Iterator[tuple[bytes, int, int]]:
        if kind == RTM_GETRULE:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        yield local, 0, len(local)

    monkeypatch.setattr(NetlinkSocket, "dump", dump)
    view = HostView()
    assert [len(view.addresses(family)) for family in FAMILIES] == [1, 0]
    assert list(view.rules(6)) == []
