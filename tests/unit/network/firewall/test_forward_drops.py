"""Chains of others that drop what is forwarded, and how to make them accept our packets."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from flanneld.network.firewall.forward_drops import Dropping

NETWORK = IPv4Network("10.5.0.0/16")


@pytest.mark.parametrize(
    ("dropping", "commands"),
    [
        (
            Dropping("native", 4, "inet firewalld", "filter_FORWARD", by_rule=True),
            [
                "firewall-cmd --permanent --zone=trusted --add-source=10.5.0.0/16",
                "firewall-cmd --reload",
            ],
        ),
        (
            Dropping("native", 4, "inet a", "forward"),
            [
                "nft insert rule inet a forward ip saddr 10.5.0.0/16 accept",
                "nft insert rule inet a forward ip daddr 10.5.0.0/16 accept",
            ],
        ),
        (
            Dropping("legacy", 4, "ip filter", "FORWARD"),
            [
                "iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT",
                "iptables-legacy -I FORWARD -d 10.5.0.0/16 -j ACCEPT",
            ],
        ),
    ],
)
def test_chain_is_made_to_accept_by_the_program_whose_it_is(dropping: Dropping, commands: list[str]) -> None:
    assert [" ".join(words) for words in dropping.commands(NETWORK)] == commands
