"""How daemon and pump find each other when somebody else has taken their name."""

from __future__ import annotations

import errno
import os
from itertools import count

import pytest

from flanneld.backends.udp import control

_numbers = count()


def new_name() -> str:
    return f"test{os.getpid()}.meeting{next(_numbers)}"


def test_a_pump_is_found_by_its_usual_name() -> None:
    name = new_name()
    with control.listen(name):
        assert control.addresses_of(name) == [control.address_of(name)]


def test_without_a_pump_the_usual_name_is_tried() -> None:
    name = new_name()
    assert control.addresses_of(name) == [control.address_of(name)]


def test_a_name_is_had_once() -> None:
    name = new_name()
    with control.listen(name), pytest.raises(OSError, check=lambda why: why.errno == errno.EADDRINUSE):
        control.listen(name)


def test_proxy_at_another_address_is_found_after_the_usual_one() -> None:
    name = new_name()
    with control.listen(name), control.listen_elsewhere(name) as elsewhere:
        usual, other = control.addresses_of(name)
        assert usual == control.address_of(name)
        assert elsewhere.getsockname() == os.fsencode(other)
        with control.new_socket() as connection:
            control.connect(connection, other, 3.0)
            assert control.other_end(connection) == (os.getpid(), True)


def test_the_pump_of_another_device_is_another_one() -> None:
    name = new_name()
    with control.listen_elsewhere(f"{name}0"):
        assert control.addresses_of(name) == [control.address_of(name)]
