"""A firmware of its own for a daemon: on this machine all nodes have one, or none."""

from __future__ import annotations

from tests.lab.daemon import own_command

#: ``ip netns exec`` mounts a /sys of its own, so nobody else sees this.
_SCRIPT = (
    "mount -t tmpfs none /sys/class && mkdir -p /sys/class/dmi/id"
    ' && echo "$1" > /sys/class/dmi/id/product_uuid && shift && exec "$@"'
)


def on_hardware(product_uuid: str) -> list[str]:
    """The command of the daemon under test, on a machine with this UUID."""
    return ["sh", "-c", _SCRIPT, "sh", product_uuid, *own_command()]
