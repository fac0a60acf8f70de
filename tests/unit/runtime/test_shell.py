"""Commands as lists of arguments, and as a shell reads them."""

from __future__ import annotations

import shlex
from ipaddress import ip_address

from flanneld.runtime import shell


def test_addresses_and_numbers_stand_for_their_texts() -> None:
    made = shell.command("ip", "route", "get", ip_address("192.0.2.1"), "table", 254)
    assert made == ("ip", "route", "get", "192.0.2.1", "table", "254")


def test_arguments_that_a_shell_would_take_apart_are_quoted() -> None:
    commands = (("echo", "$(reboot); a b"), ("true",))
    assert shell.line(commands) == "echo '$(reboot); a b'; true"
    assert shlex.split(shell.line(commands[:1])) == list(commands[0])
