"""The configuration of container runtimes for CNI: what flannel's plug-in would delegate, kept in a file.

The runtime then calls ``bridge`` and ``host-local`` itself, so a node needs neither that plug-in nor its
interpreter. The format is that of github.com/containernetworking/cni, SPEC.md; the delegation is that of
github.com/flannel-io/cni-plugin, flannel_linux.go.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, MsgspecError, Struct, convert, field
from msgspec.json import decode

from flanneld.errors import Fatal, cause_of
from flanneld.model import FAMILIES, IPNetwork
from flanneld.options import Options
from flanneld.runtime import clock, files
from flanneld.state.table import Failure, LastingTable, Put, Report, Scope, Seen
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import KeptFile, Stamp, SubnetEnv, stamp_of

log = logging.getLogger(__name__)

#: Name of the table.
TABLE = "cni-conf"
#: Bytes of a template or configuration, at most.
MAX_SIZE = 256 * 1024
#: Key of the file by which its maker is known, with the number of plug-ins that are not others' additions.
MARK = "flanneld"
#: How often the file is repaired after other programs. Some exist that want to be the only network.
REPAIRS = 2

Conf = dict[str, Any]


class _Ipam(Struct):
    type: str = ""
    routes: list[Any] | None = None


class _Plugin(Struct):
    type: str = ""
    ipam: _Ipam | None = None


class _Shape(Struct):
    """Parts of a configuration that this module reads."""

    plugins: list[_Plugin] = []
    flanneld: int = 0


class _Flannel(Struct):
    type: Literal["flannel"]
    delegate: _Plugin = field(default_factory=_Plugin)
    ipam: _Ipam = field(default_factory=_Ipam)


class _Template(Struct):
    """A configuration whose first plug-in is flannel's."""

    name: str
    plugins: Annotated[list[dict[str, Any]], Meta(min_length=1)]


def read_template(path: Path) -> Conf:
    """Return the configuration for flannel's plug-in from which ours is made. Raises ``Fatal``."""
    try:
        conf = parsed(files.read(path, MAX_SIZE))
        first = convert(conf, _Template).plugins[0]
        convert(first, _Flannel)
        problem = "its delegate has a name or ipam" if {"name", "ipam"} & {*first.get("delegate", ())} else ""
    except (OSError, MsgspecError) as error:
        problem = cause_of(error)
    if problem:
        raise Fatal(
            f"-cni-template: {path} cannot be used: {problem}",
            "give a CNI configuration for flannel's plug-in, as in docs/containers.md",
        )
    return conf


def delegated(template: Conf, env: SubnetEnv) -> Conf:
    """Return the template with the delegate in the place of flannel's plug-in (pure).

    The runtime is told not to check containers unless the template says otherwise: ``bridge`` 1.1 misses its
    own routes if they name no gateway. Upstream's plug-in checks nothing either.
    """
    first, *others = template["plugins"]
    delegate = {key: first[key] for key in ("capabilities",) if key in first} | first.get("delegate", {})
    kind = delegate.setdefault("type", "bridge")
    # Exactly one of the two has to masquerade.
    delegate.setdefault("ipMasq", not env.ip_masq)
    delegate.setdefault("mtu", env.mtu)
    if kind == "bridge":
        delegate.setdefault("isGateway", True)
    ipam = dict(first.get("ipam", {}))
    ipam.setdefault("type", "host-local")
    ipam["ranges"] = [[{"subnet": str(net)}] for net in _ordered(env.subnets)]
    ipam["routes"] = [*(ipam.get("routes") or ()), *({"dst": str(net)} for net in _ordered(env.networks))]
    return (
        {"disableCheck": True}
        | template
        | {"plugins": [delegate | {"ipam": ipam}, *others], MARK: 1 + len(others)}
    )


def _ordered(nets: Sequence[IPNetwork]) -> Iterator[IPNetwork]:
    return (net for family in FAMILIES for net in nets if net.version == family)


class CniConf(KeptFile, frozen=True, gc=False):
    """The file with the part of its content that is ours, as JSON."""

    table = TABLE

    @classmethod
    def of(cls, path: Path, conf: Conf) -> CniConf:
        return cls(path, json.dumps(conf, sort_keys=True).encode())

    @property
    def conf(self) -> Conf:
        return parsed(self.content)


class CniConfTable(LastingTable):
    """Table of the one file. Plug-ins that other programs add behind ours stay.

    The file is written once subnet.env and the plug-ins in ``programs`` are there, since the first pod may
    come at once. A program that keeps changing our part is given way after ``REPAIRS`` repairs.
    """

    name = TABLE
    vital = False
    needs = frozenset({subnet_file.TABLE})

    def __init__(self, path: Path, template: Conf, programs: Path) -> None:
        super().__init__(clock.now)
        self._template = template
        self.what = f"the contents of {path}"
        self._path = path
        self._programs = programs
        self._stamp: Stamp | None = None
        #: The desired state that was last in the file, and the repairs since then.
        self._settled: CniConf | None = None
        self._repairs = 0
        #: The plug-in that the last write lacked.
        self._missing: Path | None = None

    def desired(self, env: SubnetEnv) -> CniConf:
        """Return the file for a node with these contents of subnet.env."""
        return CniConf.of(self._path, delegated(self._template, env))

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield the file, without what others added."""
        self._stamp = stamp_of(self._path)
        present = _present(self._path)
        if present is None:
            return
        found = CniConf.of(self._path, present | {"plugins": _plugins(present)[: present.get(MARK)]})
        if scope.desired.get(found.key) == found:
            self._settle(found)
        yield Seen(found)

    def put(self, puts: Sequence[Put]) -> Report:
        """Write the file. Raises ``OSError``."""
        report = Report()
        for put in puts:
            assert isinstance(put.want, CniConf)
            is_repair = self._settled == put.want
            self._missing = next((each for each in self._needed(put.want) if not each.exists()), None)
            if self._missing:
                reason = f"the plug-in {self._missing} is missing"
                report.failed.append(Failure(put.want, reason, "install the CNI plug-ins there"))
            elif is_repair and self._repairs == REPAIRS:
                reason = f"another program changed or removed it more than {REPAIRS} times"
                report.failed.append(Failure(put.want, reason, "find that program, then restart flanneld"))
            else:
                self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
                files.replace(self._path, f"{self._text(put.want)}\n".encode())
                self._stamp = stamp_of(self._path)
                report.made.append(put.want)
                self._settle(put.want)
                if is_repair:
                    self._repairs += 1
                    what = "removed" if put.was is None else "changed"
                    report.details[put.want.key] = f"another program had {what} it"
                else:
                    log.info("Wrote %s", self._path)
        return report

    def has_changed(self) -> bool:
        return self._stamp != stamp_of(self._path) or bool(self._missing and self._missing.exists())

    def script(self, scope: Scope) -> Iterator[str]:
        """Yield the command that writes the file, unless it has the desired content."""
        for want in scope.desired.values():
            if isinstance(want, CniConf) and want not in [seen.resource for seen in self.read(scope)]:
                yield f"printf '%s\\n' {shlex.quote(self._text(want))} > {shlex.quote(str(self._path))}"

    def _settle(self, found: CniConf) -> None:
        if self._settled != found:
            self._settled = found
            self._repairs = 0

    def _needed(self, want: CniConf) -> Iterator[Path]:
        for plugin in _plugins(want.conf):
            for each in (plugin, plugin.get("ipam") or {}):
                if kind := each.get("type"):
                    yield self._programs / kind

    def _text(self, want: CniConf) -> str:
        """Return the content to write: ours, and what others added to the present file."""
        conf, present = want.conf, _present(self._path) or {}
        added: list[Conf] = []
        if MARK in present:
            added = _plugins(present)[present[MARK] :]
        elif present.get("name") == conf["name"]:  # It was written for flannel's plug-in.
            ours = {"flannel", *(each.get("type") for each in conf["plugins"])}
            added = [each for each in _plugins(present) if each.get("type") not in ours]
        return json.dumps(conf | {"plugins": [*conf["plugins"], *added]}, indent=2)


def open_table(options: Options) -> CniConfTable:
    """Return the table for -cni-conf. Raises ``Fatal`` for a bad template."""
    template = read_template(Path(options.cni_template))
    return CniConfTable(Path(options.cni_conf), template, Path(options.cni_bin))


def is_flannelds(path: Path) -> bool:
    """Return True for a file that this daemon has written, whatever others added."""
    return MARK in (_present(path) or {})


def _present(path: Path) -> Conf | None:
    """Return a file's content, {} for what is no configuration, None if there is no file.

    A link is none: the file that it leads to belongs to others.
    """
    if path.is_symlink():
        return {}
    try:
        return parsed(files.read(path, MAX_SIZE))
    except FileNotFoundError:
        return None
    except (OSError, MsgspecError):
        return {}


def parsed(content: bytes) -> Conf:
    """Return a configuration. Raises ``MsgspecError`` for what is none."""
    try:
        conf: Conf = decode(content, type=dict[str, Any])
    except RecursionError as error:
        raise DecodeError(str(error)) from None
    convert(conf, _Shape)
    return conf


def _plugins(conf: Conf) -> list[Conf]:
    plugins: list[Conf] = conf.get("plugins", [])
    return plugins
