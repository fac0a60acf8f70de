"""Commands for the store of leases: reservations, tokens, backups and moves. They need no daemon."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Protocol

from flanneld.ctl.output import TextTable
from flanneld.errors import Fatal
from flanneld.model import LeaseKey
from flanneld.options import Options
from flanneld.subnet.remote.wire import Reservation

#: Tables for people, a value for programs, and True if something is wrong.
CommandAnswer = tuple[list[TextTable], Any, bool]
Act = Callable[[Options, argparse.Namespace], CommandAnswer]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_commands(add: Callable[..., argparse.ArgumentParser], parents: list[argparse.ArgumentParser]) -> None:
    """Add the parsers; ``add`` is ``add_parser`` of the subcommands."""
    for name, (meaning, acts) in _COMMANDS.items():
        parser = add(name, parents=parents, help=meaning, allow_abbrev=False)
        subs = parser.add_subparsers(dest="act", required=True, metavar="ACTION")
        for act, (does, help_text, arguments) in acts.items():
            sub = subs.add_parser(act, parents=parents, help=help_text, allow_abbrev=False)
            sub.set_defaults(run=does)
            for argument, settings in arguments.items():
                sub.add_argument(argument, **settings)


# ---- reservations -------------------------------------------------------------------------------


class _Reservations(Protocol):
    def reservations(self) -> list[Reservation]: ...
    def reserve(self, wanted: Reservation) -> None: ...
    def release(self, key: LeaseKey) -> None: ...


class _InStore:
    """Reservations of one network in a store that this process opens itself."""

    def __init__(self, store: Any, network: str) -> None:
        self._store = store
        self._network = network

    def reservations(self) -> list[Reservation]:
        found: list[Reservation] = self._store.reservations(self._network)
        return found

    def reserve(self, wanted: Reservation) -> None:
        self._store.reserve(self._network, wanted)

    def release(self, key: LeaseKey) -> None:
        self._store.release(self._network, key)


@contextmanager
def _reservations_in(options: Options, network: str) -> Iterator[_Reservations]:
    """Open the store that the flags name: -store, -remote, else etcd."""
    from flanneld.subnet.opening import etcd_options, remote_options
    from flanneld.subnet.remote import leases

    if options.remote:
        from flanneld.subnet.remote.store import RemoteStore

        manager = RemoteStore(remote_options(options, network))
        try:
            yield manager
        finally:
            manager.close()
        return
    if options.kube_subnet_mgr:
        raise Fatal("with Kubernetes a node's podCIDR is its reservation", "see kubectl get nodes")
    if options.etcd_api == "both":
        raise Fatal("a reservation is in one API of etcd", "give -etcd-api=v2 or v3")
    if options.store:
        store = leases.over_file(_opened(options))
    else:
        store = leases.over_etcd(etcd_options(options), options.etcd_api)
    try:
        yield _InStore(store, network or leases.UNNAMED)
    finally:
        store.close()


def _list_reservations(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    with _reservations_in(options, arguments.name) as place:
        rows = [(str(each.subnet), str(each.public_ip)) for each in place.reservations()]
    plain = {"reservations": [{"subnet": subnet, "public_ip": ip} for subnet, ip in rows]}
    return [TextTable(("subnet", "public IP"), rows)], plain, False


def _add_reservation(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    wanted = Reservation(arguments.subnet, arguments.public_ip)
    with _reservations_in(options, arguments.name) as place:
        place.reserve(wanted)
    return _done(f"reserved {wanted.subnet} for {wanted.public_ip}")


def _remove_reservation(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    with _reservations_in(options, arguments.name) as place:
        place.release((arguments.subnet, None))
    return _done(f"{arguments.subnet} is a lease of 24 hours now")


# ---- tokens -------------------------------------------------------------------------------------


def _create_token(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.tokens import Tokens, fingerprint_of_pem

    fingerprint = ""
    if options.remote_certfile:
        fingerprint = fingerprint_of_pem(Path(options.remote_certfile).read_text(errors="replace"))
    token = Tokens(_opened(options).database).create(arguments.lasts, fingerprint)
    return [TextTable((), [(token.text,)])], {"id": token.id, "ends": token.ends, "token": token.text}, False


def _list_tokens(options: Options, _arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.tokens import Tokens

    found = Tokens(_opened(options).database).listed()
    plain = {"tokens": [{"id": each.id, "ends": each.ends, "state": each.state} for each in found]}
    return (
        [TextTable(("id", "ends", "state"), [(each.id, each.ends, each.state) for each in found])],
        plain,
        False,
    )


def _revoke_token(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.tokens import Tokens

    Tokens(_opened(options).database).revoke(arguments.id)
    return _done(f"revoked {arguments.id}: its nodes are refused from now on")


# ---- the file -----------------------------------------------------------------------------------


def _backup(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    _opened(options).database.backup(arguments.file)
    return _done(f"backed up {options.store} to {arguments.file}")


def _restore(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.database import restore

    restore(arguments.file, _path(options))
    return _done(f"restored {options.store} from {arguments.file}")


def _export(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    return _move(options, arguments, into_file=False)


def _import(options: Options, arguments: argparse.Namespace) -> CommandAnswer:
    return _move(options, arguments, into_file=True)


def _move(options: Options, arguments: argparse.Namespace, *, into_file: bool) -> CommandAnswer:
    """Copy every network between the file and etcd. Nothing is overwritten."""
    from flanneld.subnet.embedded.store import open_file
    from flanneld.subnet.etcd.copy import move
    from flanneld.subnet.opening import etcd_options

    store = open_file(str(_path(options)), create=into_file and not arguments.dry_run)
    said: list[str] = []
    is_complete = move(
        store,
        etcd_options(options),
        options.etcd_api,
        said.append,
        into_file=into_file,
        dry_run=arguments.dry_run,
    )
    return (
        [TextTable((), [(line,) for line in said])],
        {"done": said, "complete": is_complete},
        not is_complete,
    )


def _path(options: Options) -> Path:
    if not options.store:
        raise Fatal("no store is named", "give -store=/var/lib/flannel/leases.db")
    return Path(options.store).absolute()


def _opened(options: Options) -> Any:
    from flanneld.subnet.embedded.store import open_file

    return open_file(str(_path(options)))


def _done(text: str) -> CommandAnswer:
    return [TextTable((), [(text,)])], {"done": text}, False


# ---- arguments ----------------------------------------------------------------------------------


def _duration(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError("give a number and s, m, h or d, such as 24h")
    return int(found[1]) * _UNITS[found[2]]


_NAME = {"--name": {"default": "", "metavar": "NETWORK", "help": "the network's name, if it has one"}}
_SUBNET = {"subnet": {"type": IPv4Network, "metavar": "SUBNET"}}
_FILE = {"file": {"type": Path, "metavar": "FILE"}}
_DRY = {"--dry-run": {"action": "store_true", "help": "only list what would be copied"}}

_Acts = dict[str, tuple[Act, str, dict[str, dict[str, Any]]]]
_COMMANDS: dict[str, tuple[str, _Acts]] = {
    "reservation": (
        "subnets that stay a node's",
        {
            "list": (_list_reservations, "list them", _NAME),
            "add": (
                _add_reservation,
                "keep a subnet for the node with a public IP",
                _SUBNET | {"public_ip": {"type": IPv4Address, "metavar": "PUBLIC-IP"}} | _NAME,
            ),
            "remove": (_remove_reservation, "make it a lease again", _SUBNET | _NAME),
        },
    ),
    "token": (
        "what lets nodes join a server with -require-token",
        {
            "create": (
                _create_token,
                "print a new one",
                {
                    "--lasts": {
                        "type": _duration,
                        "default": "24h",
                        "metavar": "DURATION",
                        "help": "validity for joins (default: 24h)",
                    }
                },
            ),
            "list": (_list_tokens, "list them", {}),
            "revoke": (_revoke_token, "refuse its nodes", {"id": {"metavar": "ID"}}),
        },
    ),
    "store": (
        "the file of -store",
        {
            "backup": (_backup, "copy it, while it is used", _FILE),
            "restore": (_restore, "make it from a backup, where there is none", _FILE),
            "export": (_export, "copy its networks to etcd", _DRY),
            "import": (_import, "copy the networks in etcd to it", _DRY),
        },
    ),
}
