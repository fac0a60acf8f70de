"""Commands for the store of leases: network config, leases, tokens, backups. They need no daemon."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv4Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flanneld import config, options
from flanneld.config import Config
from flanneld.ctl.output import TextTable, in_lines
from flanneld.errors import Fatal, Retryable
from flanneld.model import LeaseKey, name_of
from flanneld.options import Options
from flanneld.runtime import clock
from flanneld.subnet.remote.wire import Reservation

if TYPE_CHECKING:
    from flanneld.subnet.embedded.store import KeyStore
    from flanneld.subnet.embedded.tokens import Tokens
    from flanneld.subnet.remote.leases import LeaseStore

#: Tables for people, a value for programs, and True if something is wrong.
CommandAnswer = tuple[list[TextTable], Any, bool]
Act = Callable[[Options, argparse.Namespace], CommandAnswer]
#: Files with the variables of the daemon: those that its unit for systemd names.
OPTIONS_FILES = (Path("/etc/default/flanneld"), Path("/etc/sysconfig/flanneld"))
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


def read_options(
    flags: Sequence[str], environ: Mapping[str, str], files: Sequence[Path] = OPTIONS_FILES
) -> Options:
    """Return the options, with those of the daemon's own files if none of them names a store.

    Raises the errors of ``options.read``, and ``Fatal`` for a file that this user may not read.
    """
    program = "flannelctl COMMAND"
    given = options.read(flags, environ, program=program)
    if given.names_a_store:
        return given
    left: dict[str, str] = {}
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except PermissionError:
            raise Fatal(
                f"{file} says which store the daemon has, and cannot be read", "run as root"
            ) from None
        pairs = (line.strip().partition("=") for line in lines)
        left |= {
            name: value.strip("\"'") for name, _, value in pairs if name.startswith(f"{options.PREFIX}_")
        }
    return options.read(flags, left | dict(environ), program=program)


@contextmanager
def _leases(chosen: Options) -> Iterator[LeaseStore]:
    """Open the leases in a file or in etcd. Raises ``Fatal`` for another store."""
    from flanneld.subnet.opening import etcd_options
    from flanneld.subnet.remote import leases

    if chosen.kube_subnet_mgr:
        raise Fatal(
            "with Kubernetes a node has a lease, and a reservation, by its podCIDR", "see kubectl get nodes"
        )
    if chosen.remote:
        raise Fatal(
            "a flannel server does not do this for others", "run it there, with -store or -etcd-endpoints"
        )
    if chosen.etcd_api == "both":
        raise Fatal("both APIs of etcd have keys of their own", "give -etcd-api=v2 or v3")
    if chosen.store:
        store = leases.over_file(_opened(chosen))
    else:
        store = leases.over_etcd(etcd_options(chosen), chosen.etcd_api)
    try:
        yield store
    finally:
        store.close()


def ask(question: str, arguments: argparse.Namespace, number: int = 1) -> None:
    """Ask on the terminal, unless ``--yes`` is given ``number`` times. Raises ``Fatal`` for a no."""
    if arguments.yes >= number:
        return
    if not sys.stdin.isatty():
        raise Fatal(question.rstrip("?"), f"if so, give {' '.join(['--yes'] * number)}")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Fatal("nothing was changed")


# ---- the network config -------------------------------------------------------------------------


def _get_config(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    if chosen.kube_subnet_mgr:
        text = Path(chosen.net_config_path).read_text()
    else:
        with _leases(chosen) as store:
            text, _ = store.config_text(arguments.name)
    if not text:
        raise Fatal("there is no network config", "write one: flannelctl config set FILE")
    return [in_lines(text.splitlines())], {"config": text}, False


def _set_config(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.etcd.keys import Conflict

    file = arguments.file
    text = sys.stdin.read() if str(file) == "-" else file.read_text(errors="replace")
    wanted = checked(text)
    if chosen.kube_subnet_mgr:
        patch, namespace = json.dumps({"data": {"net-conf.json": text}}), "kubectl -n kube-flannel"
        change = f"{namespace} patch configmap kube-flannel-cfg --patch {shlex.quote(patch)}"
        return _done(change, f"{namespace} rollout restart daemonset kube-flannel-ds")
    with _leases(chosen) as store:
        former, index = store.config_text(arguments.name)
        if former and config.say_the_same(former, text):
            return _done("the network config is this one already")
        todo = list(consequences(former, wanted))
        if commands := commands_in(wanted):
            ask(f"each node runs these commands of the config as root: {'; '.join(commands)}", arguments)
        try:
            store.write_config(arguments.name, text, index)
        except Conflict:
            raise Fatal(
                "another writer changed the network config meanwhile", "look at it: flannelctl config get"
            ) from None
    return _done("wrote the network config", *todo)


def checked(text: str) -> Config:
    """Parse a network config. Raises ``FlannelError`` also for a key of which a daemon only warns."""
    from flanneld.backends.contract import Backend, carried, read_options
    from flanneld.backends.registry import described, factory_for
    from flanneld.backends.switching import Switching, refuse_pair

    wanted = config.parse(text)
    factory_for(wanted)  # a backend that there is
    found = [(each, described(each.backend_type)) for each in (wanted, wanted.also) if each]
    for each, backend in found:
        carried(backend, each)
        read_options(each, backend.options + (Switching.options if each is wanted.also else ()))
    if wanted.also:
        refuse_pair(*found)
    wrong = [*wanted.warnings]
    if all(backend is not Backend for _, backend in found):  # other packages read theirs in ways of their own
        wrong += config.unread_keys(wanted)
    if wrong:
        raise Fatal(wrong[0], "correct it, or leave the key out")
    return wanted


def consequences(former: str, wanted: Config) -> Iterator[str]:
    """Yield what is to be done on the nodes after a change of the network config (pure)."""
    try:
        old = config.parse(former)
    except Retryable:
        yield "flanneld takes it at its next try: nothing is to be restarted"
        return
    yield "restart flanneld on each node: it reads the network config when it starts"
    if old.ranges != wanted.ranges:
        yield "a node whose subnet does not fit takes another: recreate its containers"
    one, other = (_backend(each) for each in (old, wanted))
    if old.backend_type != wanted.backend_type:
        yield "until then nodes of both backends do not reach each other: Backend.Also avoids that"
    elif {**one, "MTU": 0} != {**other, "MTU": 0}:
        yield "until then nodes with the former settings may not reach those with the new ones"
    if old.backend_type != wanted.backend_type or one.get("MTU") != other.get("MTU"):
        yield "containers keep their MTU: recreate them"


def _backend(one: Config) -> dict[str, Any]:
    found = json.loads(one.source)
    return next((value for key, value in found.items() if key.lower() == "backend"), None) or {}


def commands_in(wanted: Config) -> list[str]:
    """Return the commands that a config has nodes run as root (pure)."""
    from flanneld.backends.extension import backend

    return [
        str(value)
        for each in (wanted, wanted.also)
        if each and each.backend_type == backend.TYPE
        for option in backend.Extension.options
        if option.name.endswith("Command") and (value := each.backend.raw(option.name))
    ]


# ---- leases -------------------------------------------------------------------------------------


def _list_leases(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    with _leases(chosen) as store:
        found, _ = store.leases(arguments.name)
    rows = [
        (
            name_of(each.key),
            ",".join(map(str, each.attrs.public_ips)) or "-",
            each.attrs.backend_type or "-",
            clock.utc_text(each.expires_ns / 1e9) if each.expires_ns else "reserved",
        )
        for each in found
    ]
    return _listed("leases", ("subnet", "public ip", "backend", "ends"), rows)


def _delete_lease(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import nodes

    with _leases(chosen) as store:
        key = _key_of(store, arguments)
        lease, _ = store.lease(arguments.name, key)
        public = lease.attrs.public_ips
        owner = ", ".join(map(str, public)) or "an unknown node"
        ask(f"delete the lease {name_of(key)} of {owner}?", arguments)
        if any(reply.arrived for reply in nodes.echo(public).values()):
            ask(
                f"{owner} answers: its containers lose the network. Delete the lease nevertheless?",
                arguments,
                2,
            )
        store.revoke(arguments.name, key)
    return _done(f"deleted the lease {name_of(key)} of {owner}")


def _key_of(store: LeaseStore, arguments: argparse.Namespace) -> LeaseKey:
    """Return the key of the lease with a subnet, one of two with dual stack. Raises ``Fatal``."""
    keys = (each.key for each in store.leases(arguments.name)[0])
    key = next((each for each in keys if arguments.subnet in each), None)
    if key is None:
        raise Fatal(f"there is no lease of {arguments.subnet}", "flannelctl lease list shows them")
    return key


# ---- reservations -------------------------------------------------------------------------------


class _Reservations(Struct):
    """The reservations of one network."""

    listed: Callable[[], list[Reservation]]
    reserve: Callable[[Reservation], None]
    release: Callable[[LeaseKey], None]


@contextmanager
def _reservations_in(chosen: Options, network: str) -> Iterator[_Reservations]:
    """Open the store that the flags name: -store, -remote, else etcd."""
    if chosen.remote:
        from flanneld.subnet.opening import remote_options
        from flanneld.subnet.remote.store import RemoteStore

        with closing(RemoteStore(remote_options(chosen, network))) as server:
            yield _Reservations(server.reservations, server.reserve, server.release)
        return
    with _leases(chosen) as store:
        name = network or "_"
        yield _Reservations(
            partial(store.reservations, name), partial(store.reserve, name), partial(store.release, name)
        )


def _list_reservations(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    with _reservations_in(chosen, arguments.name) as place:
        rows = [(str(each.subnet), str(each.public_ip)) for each in place.listed()]
    return _listed("reservations", ("subnet", "public_ip"), rows)


def _add_reservation(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    wanted = Reservation(arguments.subnet, arguments.public_ip)
    with _reservations_in(chosen, arguments.name) as place:
        try:
            place.reserve(wanted)
        except Retryable as refusal:
            if "lease already taken" not in refusal.problem:
                raise
            raise Fatal("lease already taken", "choose another: flannelctl lease list has all") from None
    return _done(f"reserved {wanted.subnet} for {wanted.public_ip}")


def _remove_reservation(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    with _reservations_in(chosen, arguments.name) as place:
        place.release((arguments.subnet, None))
    return _done(f"{arguments.subnet} is a lease of 24 hours now")


# ---- tokens -------------------------------------------------------------------------------------


def _tokens(chosen: Options) -> Tokens:
    from flanneld.subnet.embedded.tokens import Tokens

    return Tokens(_opened(chosen).database)


def _create_token(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.tokens import fingerprint_of_pem

    fingerprint = ""
    if chosen.remote_certfile:
        fingerprint = fingerprint_of_pem(Path(chosen.remote_certfile).read_text(errors="replace"))
    token = _tokens(chosen).create(arguments.lasts, fingerprint)
    return [in_lines([token.text])], {"id": token.id, "ends": token.ends, "token": token.text}, False


def _list_tokens(chosen: Options, _arguments: argparse.Namespace) -> CommandAnswer:
    rows = [(each.id, each.ends, each.state) for each in _tokens(chosen).listed()]
    return _listed("tokens", ("id", "ends", "state"), rows)


def _revoke_token(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    _tokens(chosen).revoke(arguments.id)
    return _done(f"revoked {arguments.id}: its nodes are refused from now on")


# ---- the file -----------------------------------------------------------------------------------


def _backup(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    _opened(chosen).database.backup(arguments.file)
    return _done(f"backed up {chosen.store} to {arguments.file}")


def _restore(chosen: Options, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.subnet.embedded.database import restore

    restore(arguments.file, _path(chosen))
    return _done(f"restored {chosen.store} from {arguments.file}")


def _move(chosen: Options, arguments: argparse.Namespace, *, into_file: bool) -> CommandAnswer:
    """Copy every network between the file and etcd. Nothing is overwritten."""
    from flanneld.subnet.copy import move
    from flanneld.subnet.opening import etcd_options

    said: list[str] = []
    dry_run = arguments.dry_run
    store, etcd = _opened(chosen, create=into_file and not dry_run), etcd_options(chosen)
    is_complete = move(store, etcd, chosen.etcd_api, said.append, into_file=into_file, dry_run=dry_run)
    return [in_lines(said)], {"done": said, "complete": is_complete}, not is_complete


def _path(chosen: Options) -> Path:
    if not chosen.store:
        raise Fatal("no store is named", "give -store=/var/lib/flannel/leases.db")
    return Path(chosen.store).absolute()


def _opened(chosen: Options, *, create: bool = False) -> KeyStore:
    from flanneld.subnet.embedded.store import open_file

    return open_file(str(_path(chosen)), create=create)


def _done(text: str, *todo: str) -> CommandAnswer:
    more = {"todo": list(todo)} if todo else {}
    return [in_lines((text, *todo))], {"done": text, **more}, False


def _listed(what: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> CommandAnswer:
    shown = TextTable([name.replace("_", " ") for name in columns], rows)
    return [shown], {what: [dict(zip(columns, row, strict=True)) for row in rows]}, False


# ---- arguments ----------------------------------------------------------------------------------


def _duration(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError("give a number and s, m, h or d, such as 24h")
    return int(found[1]) * _UNITS[found[2]]


_NAME = {"--name": {"default": "", "metavar": "NETWORK", "help": "the network's name, if it has one"}}
_KEY = {"--name": _NAME["--name"] | {"default": "_"}}
_SUBNET = {"subnet": {"type": IPv4Network, "metavar": "SUBNET"}}
_ANY_SUBNET = {"subnet": {"type": ip_network, "metavar": "SUBNET"}}
_YES = {"--yes": {"action": "count", "default": 0, "help": "do not ask; twice to delete a live node's lease"}}
_FILE = {"file": {"type": Path, "metavar": "FILE"}}
_DRY = {"--dry-run": {"action": "store_true", "help": "only list what would be copied"}}

_Acts = dict[str, tuple[Act, str, dict[str, dict[str, Any]]]]
_COMMANDS: dict[str, tuple[str, _Acts]] = {
    "config": (
        "the network config of the cluster",
        {
            "get": (_get_config, "print it", _KEY),
            "set": (
                _set_config,
                "check and write it, and say what the nodes must do",
                {"file": {"type": Path, "metavar": "FILE", "help": "its text as JSON; - for standard input"}}
                | _YES
                | _KEY,
            ),
        },
    ),
    "lease": (
        "the subnets that nodes have",
        {
            "list": (_list_leases, "list them", _KEY),
            "delete": (_delete_lease, "end one", _ANY_SUBNET | _YES | _KEY),
        },
    ),
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
            "export": (partial(_move, into_file=False), "copy its networks to etcd", _DRY),
            "import": (partial(_move, into_file=True), "copy the networks in etcd to it", _DRY),
        },
    ),
}
