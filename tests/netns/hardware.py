"""A firmware of its own for a daemon."""

from __future__ import annotations

from tests.lab.daemon import own_command
from tests.lab.forks import OWN_UUID


def on_hardware(product_uuid: str) -> list[str]:
    """The command of the daemon under test, on a machine with this UUID."""
    return [*OWN_UUID, product_uuid, *own_command()]
