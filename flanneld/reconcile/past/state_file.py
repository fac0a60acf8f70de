"""State file beside subnet.env: the record of this host's last run, and facts about the host for it."""

from __future__ import annotations

import json
import logging
import threading
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flanneld.compat.glog import OneTimeWarnings
from flanneld.errors import Refused
from flanneld.model import LeaseKey
from flanneld.reconcile.past.ownership import Device, FileStamp, Machine, RunRecord, StoreAddress
from flanneld.runtime import files
from flanneld.subnet.codec import format_attrs, parse_attrs

log = logging.getLogger(__name__)

PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")
_VERSION = 1
#: Bytes. A few hundred are usual; each adopted route takes 30 more.
_MAX_SIZE = 4 << 20


class StateFile:
    """State file: read once, and written on each change unless ``is_dry_run``.

    From any thread; never raises.
    """

    def __init__(self, path: Path, *, is_dry_run: bool = False) -> None:
        self._path = path
        self._is_dry_run = is_dry_run
        self._lock = threading.Lock()
        self._desired = RunRecord()
        self._written: RunRecord | None = None
        self._once = OneTimeWarnings()

    def load(self) -> RunRecord | None:
        """Read the record of the last run. An invalid file is logged and counts as missing."""
        try:
            found = _parse(files.read(self._path, _MAX_SIZE))
        except FileNotFoundError:
            return None
        except (
            OSError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            Refused,
            TypeError,
            ValueError,
        ) as error:
            problem = f"{type(error).__name__} {error}".strip()
            self._once.warn(log, "load", f"Ignoring the state file {self._path}: {problem}")
            return None
        with self._lock:
            self._desired = self._written = found
        return found

    def update(self, **changes: Any) -> None:
        """Change fields of the record, and write it if the file differs."""
        with self._lock:
            self._desired = replace(self._desired, **changes)
            if self._desired != self._written:
                self._write()

    def try_again(self) -> None:
        """Write the record again after a failed write."""
        self.update()

    def is_writable(self) -> bool:
        """Write the record and return True on success: a claim's result must be recordable afterwards."""
        with self._lock:
            return self._write()

    def _write(self) -> bool:
        if self._is_dry_run:
            return True
        try:
            self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
            files.replace(self._path, _text(self._desired).encode(), 0o600)
        except OSError as error:
            self._once.warn(
                log,
                "write",
                f"Cannot write the state file {self._path}: {error.strerror}; make its directory writable, or"
                " after a restart nothing that an earlier run left is recognised",
            )
            return False
        self._once.clear("write")
        self._written = self._desired
        return True


def stamp_of(path: Path) -> FileStamp | None:
    """Return the stamp of a file, which each write changes; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(found.st_ino, found.st_mtime_ns)


def product_uuid() -> str:
    """Return the firmware's UUID of this machine; empty if it is missing or unreadable for this user."""
    return _line(PRODUCT_UUID).lower()


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _text(state: RunRecord) -> str:
    stamp, attributes = state.subnet_file, state.attributes
    return (
        json.dumps(
            {
                "version": _VERSION,
                "boot_id": state.boot_id,
                "hardware_address": state.machine.hardware_address,
                "product_uuid": state.machine.product_uuid,
                "store": state.store,
                "subnets": [str(net) if net else None for net in state.subnets],
                "attributes": format_attrs(attributes, with_ipv6=True) if attributes else None,
                "devices": [
                    {"index": each.index, "kind": each.kind, "mac": each.mac, "name": each.name}
                    for each in state.devices
                ],
                "subnet_file": {"inode": stamp.inode, "mtime_ns": stamp.mtime_ns} if stamp else None,
                "adopts": state.adopts,
                "adopted": sorted(map(str, state.adopted)),
                "store_addresses": [
                    {"address": str(each.address), "hour": each.hour, "is_outside": each.is_outside}
                    for each in state.store_addresses
                ],
                "store_tried": state.store_tried,
            },
            indent=1,
        )
        + "\n"
    )


def _parse(content: bytes) -> RunRecord:
    top = json.loads(content)
    if top["version"] != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    stamp, attributes = top["subnet_file"], top["attributes"]
    return RunRecord(
        boot_id=str(top["boot_id"]),
        machine=Machine(str(top["hardware_address"]), str(top["product_uuid"])),
        store=str(top["store"]),
        subnets=_subnets(top["subnets"]),
        attributes=parse_attrs(attributes) if attributes is not None else None,
        devices=tuple(
            Device(int(each["index"]), str(each["kind"]), str(each["mac"]), str(each["name"]))
            for each in top["devices"]
        ),
        subnet_file=FileStamp(int(stamp["inode"]), int(stamp["mtime_ns"])) if stamp else None,
        adopts=bool(top["adopts"]),
        adopted=frozenset(ip_network(text) for text in top["adopted"]),
        store_addresses=tuple(
            StoreAddress(ip_address(each["address"]), int(each["hour"]), each["is_outside"] and True)
            for each in top.get("store_addresses", ())  # not in files of earlier versions
        ),
        store_tried=int(top.get("store_tried", 0)),
    )


def _subnets(texts: list[str | None]) -> LeaseKey:
    subnet, ipv6_subnet = texts
    return (
        IPv4Network(subnet) if subnet is not None else None,
        IPv6Network(ipv6_subnet) if ipv6_subnet is not None else None,
    )
