"""``flannelctl bundle``: an archive of diagnostics for a remote expert, without secrets.

Key files are read only to mask their contents. Known secret values are masked at any place, and a text that
looks like a secret by its name or form even if its value is unknown.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flanneld.ctl.store_commands import OPTIONS_FILES
from flanneld.errors import FlannelError, Retryable, cause_of
from flanneld.options import Options
from flanneld.runtime import clock
from flanneld.runtime.command import CommandRunner

MASK = "***"
#: Shorter values would mask parts of ordinary words.
_SHORTEST = 4
#: Names whose values are secret; the names of files are not.
_NAME = (
    r"[\w.-]*(?:password|passwd|secret|token|psk"
    r"|private[\s_-]?key|preshared[\s_-]?key|access[_-]?key\w*|api[_-]?key)"
)
_BY_NAME = (
    # JSON: the value is a string.
    re.compile(rf'("{_NAME}"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE),
    # JSON inside a JSON string.
    re.compile(rf'(\\"{_NAME}\\"\s*:\s*)\\"(?:[^"\\])*\\"', re.IGNORECASE),
    # Variables, flags and wg's output: name=value, name: value.
    re.compile(rf"(\b-{{0,2}}{_NAME}\s*[=:]\s*)(?![\"{{\[])\S+", re.IGNORECASE),
)
_USER_OF_URL = re.compile(r"(\w+://)[^/\s\"'@]*@")
_BEARER = re.compile(r"((?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the given secrets, and without texts that look like secrets."""
    masked = (each for each in secrets if len(each) >= _SHORTEST and each != MASK)
    for secret in sorted(masked, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _PEM.sub(MASK, text)
    text = _USER_OF_URL.sub(rf"\g<1>{MASK}@", text)
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    in_json, in_string, in_words = _BY_NAME
    text = in_json.sub(rf'\g<1>"{MASK}"', text)
    text = in_string.sub(rf'\g<1>\\"{MASK}\\"', text)
    return in_words.sub(rf"\g<1>{MASK}", text)


def secrets_in(text: str) -> set[str]:
    """Return the values of variables in a file whose names mark them as secret."""
    found = set()
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and re.fullmatch(_NAME, name.strip(), re.IGNORECASE):
            found.add(value.strip().strip("\"'"))
    return found


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
    *map(str, OPTIONS_FILES),
    "/etc/os-release",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv4/conf/all/rp_filter",
    "/proc/sys/net/ipv6/conf/all/forwarding",
)


def default_name() -> str:
    """Return the archive's name if none is given, with the time in UTC."""
    return f"flannel-{clock.utc_text(clock.wall()).replace(':', '')}.tar.gz"


def write(path: Path, contents: Iterable[tuple[str, str]], secrets: set[str]) -> None:
    """Write a compressed archive that only its owner may read, of files by name and text, redacted.

    Raises ``FlannelError`` if the file exists or cannot be written.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".tar")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in contents:
            data = redact(text, secrets).encode(errors="backslashreplace")[-LONGEST:]
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(clock.wall())
            archive.addfile(entry, io.BytesIO(data))
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(made.getvalue())
    except FileExistsError:
        raise FlannelError(f"{path} exists", "name another file") from None
    except OSError as error:
        raise FlannelError(f"cannot write {path}: {cause_of(error)}", "name another file") from error


def gather(answers: Mapping[str, Any], wanted: Options) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file: the answers of flannelctl, this host's files, output of programs."""
    for name, answer in answers.items():
        yield f"{name}.json", json.dumps(answer, indent=2)
    for path in dict.fromkeys((*FILES, wanted.subnet_file, wanted.net_config_path)):
        if (text := _read(Path(path))) is not None:
            yield f"files{path}", text
    runner = CommandRunner(threading.Event(), LONGEST)
    for name, command in COMMANDS.items():
        try:
            output = runner.run(command, merged=True).output
        except Retryable as error:
            output = f"{error}\n"
        yield name, output


def known_secrets(wanted: Options) -> set[str]:
    """Return the secrets of flannel on this host: passwords, keys in files, variables named like secrets."""
    found = {wanted.etcd_password, wanted.token}
    if wanted.token_file:
        found.add((_read(Path(wanted.token_file)) or "").strip())
    for file in OPTIONS_FILES:
        found |= secrets_in(_read(file) or "")
    with suppress(OSError):
        for path in Path(wanted.secret_dir).iterdir():
            # Files beside them, such as subnet.env, are world-readable.
            if path.is_file() and not path.stat().st_mode & 0o077:
                found.add((_read(path) or "").strip())
    return found


def _read(path: Path) -> str | None:
    try:
        with path.open(errors="backslashreplace") as file:
            return file.read(LONGEST)
    except OSError:
        return None
