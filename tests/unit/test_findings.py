"""Commands as lists of arguments, and as a shell reads them."""

from __future__ import annotations

import shlex
from ipaddress import ip_address

from flanneld.findings import command, line


def test_addresses_and_numbers_stand_for_their_texts() -> None:
    made = command("ip", "route", "get", ip_address("192.0.2.1"), "table", 254)
    assert made == ("ip", "route", "get", "192.0.2.1", "table", "254")


def test_arguments_that_a_shell_would_take_apart_are_quoted() -> None:
    commands = (("echo", "$(reboot); a b"), ("true",))
    assert line(commands) == "echo '$(reboot); a b'; true"
    assert shlex.split(line(commands[:1])) == list(commands[0])
