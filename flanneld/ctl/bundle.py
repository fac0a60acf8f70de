"""``flannelctl bundle``: an archive of diagnostics for a remote expert, without secrets.

Key files are read only to mask their contents.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from flanneld.ctl.redaction import redact, secrets_in
from flanneld.errors import FlannelError, Retryable, cause_of
from flanneld.options import Options
from flanneld.runtime import clock
from flanneld.runtime.command_runner import CommandRunner

#: Bytes of one file in the archive; the end of a longer one is kept.
LONGEST = 8 << 20
#: Commands for diagnosis, by the file in the archive.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "kernel/links": ("ip", "-details", "-statistics", "link"),
    "kernel/addresses": ("ip", "address"),
    "kernel/routes-ipv4": ("ip", "-4", "route", "show", "table", "all"),
    "kernel/routes-ipv6": ("ip", "-6", "route", "show", "table", "all"),
    "kernel/policy-ipv4": ("ip", "-4", "rule"),
    "kernel/policy-ipv6": ("ip", "-6", "rule"),
    "kernel/neighbours": ("ip", "neighbour"),
    "kernel/fdb": ("bridge", "fdb"),
    # Without "nokeys" it would show the keys of security associations.
    "kernel/xfrm-states": ("ip", "xfrm", "state", "list", "nokeys"),
    "kernel/xfrm-policies": ("ip", "xfrm", "policy"),
    # "dump" would show private keys.
    "kernel/wireguard": ("wg", "show"),
    "kernel/sockets": ("ss", "-tuln"),
    "firewall/nftables": ("nft", "list", "ruleset"),
    "firewall/iptables-legacy": ("iptables-legacy-save",),
    "firewall/ip6tables-legacy": ("ip6tables-legacy-save",),
    "system/uname": ("uname", "-a"),
    "system/unit": ("systemctl", "cat", "flanneld.service"),
    "log/journal": ("journalctl", "--unit=flanneld", "--lines=5000", "--no-pager", "--output=short-precise"),
}
#: Files that configure the daemon.
FILES = (
    "/etc/default/flanneld",
    "/etc/sysconfig/flanneld",
    "/etc/os-release",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv4/conf/all/rp_filter",
    "/proc/sys/net/ipv6/conf/all/forwarding",
)


class Content(Struct, frozen=True):
    """File of the archive, not yet redacted."""

    name: str
    text: str


def default_name() -> str:
    """Return the archive's name if none is given, with the time in UTC."""
    return f"flannel-{clock.utc_text(clock.wall()).replace(':', '')}.tar.gz"


def write(path: Path, contents: list[Content], secrets: set[str]) -> None:
    """Write a compressed archive of redacted files that only its owner may read.

    Raises ``FlannelError`` if the file exists or cannot be written.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".tar")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for content in contents:
            data = redact(content.text, secrets).encode(errors="backslashreplace")[-LONGEST:]
            entry = tarfile.TarInfo(f"{stem}/{content.name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(clock.wall())
            archive.addfile(entry, io.BytesIO(data))
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(made.getvalue())
    except FileExistsError:
        raise FlannelError(f"{path} exists", "name another file") from None
    except OSError as error:
        raise FlannelError(f"cannot write {path}: {cause_of(error)}", "name another file") from error


def gather(answers: Mapping[str, Any], wanted: Options) -> list[Content]:
    """Return the answers of flannelctl's commands, this host's files, and the output of its programs."""
    paths = (*FILES, wanted.subnet_file, wanted.net_config_path)
    return [
        *(Content(f"{name}.json", json.dumps(answer, indent=2)) for name, answer in answers.items()),
        *_files(paths),
        *_outputs(CommandRunner(threading.Event(), LONGEST)),
    ]


def known_secrets(wanted: Options) -> set[str]:
    """Return the secrets of flannel on this host: passwords, keys in files, variables named like secrets."""
    found = {wanted.etcd_password, wanted.token}
    if wanted.token_file:
        found.add((_read(Path(wanted.token_file)) or "").strip())
    for name in ("/etc/default/flanneld", "/etc/sysconfig/flanneld"):
        found |= secrets_in(_read(Path(name)) or "")
    with suppress(OSError):
        for path in Path(wanted.secret_dir).iterdir():
            # Files beside them, such as subnet.env, are world-readable.
            if path.is_file() and not path.stat().st_mode & 0o077:
                found.add((_read(path) or "").strip())
    return found


def _files(paths: tuple[str, ...]) -> Iterator[Content]:
    for path in dict.fromkeys(paths):
        if (text := _read(Path(path))) is not None:
            yield Content(f"files{path}", text)


def _read(path: Path) -> str | None:
    try:
        with path.open(errors="backslashreplace") as file:
            return file.read(LONGEST)
    except OSError:
        return None


def _outputs(runner: CommandRunner) -> Iterator[Content]:
    for name, command in COMMANDS.items():
        yield Content(name, _output(lambda: runner.run(command, merged=True).output))  # noqa: B023 - called at once


def _output(run: Callable[[], str]) -> str:
    """Return the output of a command, or the reason why it has none."""
    try:
        return run()
    except Retryable as error:
        return f"{error}\n"
