"""Options from the command line and ``FLANNELD_*`` variables, checked once.

``Options`` is the table of flags: each field holds its flag's default and usage text. Names and
defaults are those of Go flanneld; ``iface-wait``, ``state-dir`` and ``etcd-api`` are ours, as some others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flanneld import option_values
from flanneld.compat import flags
from flanneld.compat.flags import Flag, FlagKind, FlagValue
from flanneld.errors import Fatal, FlannelError
from flanneld.model import IPAddress

PREFIX = "FLANNELD"
_KINDS: Mapping[type, FlagKind] = {bool: "bool", int: "int", str: "string", tuple: "string"}


class _FlagRow(Struct, frozen=True):
    """A flag, the reader of its value, and the option's default."""

    flag: Flag
    read: option_values.ParseValue
    default: Any


#: By the name of the field in ``Options``, in that order.
_ROWS: dict[str, _FlagRow] = {}


class UsageError(FlannelError):
    """Error in the command line or the environment: print reason and usage, exit with status 2."""

    def __init__(self, reason: str, usage: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.usage = usage


class HelpWanted(Exception):
    """Request for ``-help``: print ``usage`` on standard output, exit with status 0."""

    def __init__(self, usage: str) -> None:
        super().__init__(usage)
        self.usage = usage


class VersionWanted(Exception):
    """Request for ``-version``: print the version on standard error, exit with status 0."""


def _flag(
    name: str, default: Any, usage: str, read: option_values.ParseValue = option_values.as_it_is
) -> Any:
    """Add a flag and return its field's default; ``default`` is a tuple if the flag may be repeated."""
    flag = Flag(name, _KINDS[type(default)], default, usage, repeatable=isinstance(default, tuple))
    value = read(default, name)
    _ROWS[name.replace("-", "_")] = _FlagRow(flag, read, value)
    return value


class Options(Struct, frozen=True):
    """All options, each named as its flag with ``_`` for ``-``. Its repr shows no password."""

    etcd_endpoints: tuple[str, ...] = _flag(
        "etcd-endpoints",
        "http://127.0.0.1:4001,http://127.0.0.1:2379",
        "client `URLs` of etcd, separated by commas",
        option_values.endpoints,
    )
    etcd_prefix: str = _flag("etcd-prefix", "/coreos.com/network", "`key` under which etcd holds the network")
    etcd_keyfile: str = _flag("etcd-keyfile", "", "`file` with the TLS key to show to etcd")
    etcd_certfile: str = _flag("etcd-certfile", "", "`file` with the TLS certificate to show to etcd")
    etcd_cafile: str = _flag("etcd-cafile", "", "`file` with the authority that signed etcd's certificate")
    etcd_username: str = _flag("etcd-username", "", "`name` of the etcd user")
    etcd_password: str = _flag("etcd-password", "", "`password` of the etcd user")
    etcd_api: str = _flag(
        "etcd-api",
        "auto",
        "`API` of etcd: v2, v3, both during a move, or auto for the one with a network config",
        option_values.one_of("auto", "v2", "v3", "both"),
    )
    etcd_transport: str = _flag(
        "etcd-transport",
        "auto",
        "`protocol` of etcd's v3 API: json, grpc, or auto for json unless etcd refuses it",
        option_values.one_of("auto", "json", "grpc"),
    )
    listen: str = _flag(
        "listen", "", "serve the leases in etcd on this `address` to clients of -remote: host:port or fd://"
    )
    store: str = _flag(
        "store", "", "keep the leases in this `file` instead of etcd; with -listen for other nodes, too"
    )
    network: str = _flag(
        "network", "", "`network` of a new -store, such as 10.5.0.0/16, or its whole config as JSON"
    )
    serve_only: bool = _flag(
        "serve-only", False, "with -listen and -store: only serve, do not join the network"
    )
    require_token: bool = _flag(
        "require-token", False, "with -listen and -store: require TLS and a token from flannelctl"
    )
    token: str = _flag(
        "token", "", "`token` for a server that requires one; visible to other users of this host"
    )
    token_file: str = _flag("token-file", "", "`file` with the token for a server that requires one")
    remote: tuple[option_values.RemoteServer, ...] = _flag(
        "remote",
        "",
        "lease `servers` (-listen) to use instead of etcd: host:port,host:port",
        option_values.servers,
    )
    remote_keyfile: str = _flag("remote-keyfile", "", "`file` with the TLS key, for -listen and -remote")
    remote_certfile: str = _flag(
        "remote-certfile", "", "`file` with the TLS certificate, for -listen and -remote"
    )
    remote_cafile: str = _flag(
        "remote-cafile", "", "`file` with the authority that signed the other side's certificate"
    )
    networks: tuple[str, ...] = _flag(
        "networks",
        "",
        "`names` of the networks below -etcd-prefix to join, separated by commas",
        option_values.network_names,
    )
    watch_networks: bool = _flag(
        "watch-networks", False, "join and leave networks as the store has them: those of -networks, else all"
    )
    max_networks: int = _flag("max-networks", 64, "serve at most this `number` of the store's networks")
    allow_extension: bool = _flag(
        "allow-extension",
        True,
        "let the config run commands as root (backend extension)\nwith several networks only if given",
    )
    subnet_dir: str = _flag(
        "subnet-dir", "/run/flannel/networks", "`directory` with a subnet file for each of several networks"
    )
    iface: tuple[str, ...] = _flag(
        "iface",
        (),
        "`interface`, by name or address, that leads to other nodes\nmay be repeated: the first found wins",
    )
    iface_regex: tuple[str, ...] = _flag(
        "iface-regex",
        (),
        "`pattern` for the interface's address, else its name\nmay be repeated; tried after every -iface",
        option_values.patterns,
    )
    iface_can_reach: IPAddress | None = _flag(
        "iface-can-reach",
        "",
        "take the interface through which this `address` is reached; tried last",
        option_values.ip,
    )
    iface_wait: int = _flag("iface-wait", 0, "`seconds` to wait for a matching interface", option_values.wait)
    subnet_file: str = _flag(
        "subnet-file", "/run/flannel/subnet.env", "`file` to which this node's subnet is written"
    )
    public_ip: IPv4Address | None = _flag(
        "public-ip", "", "IPv4 `address` at which other nodes reach this one", option_values.ipv4
    )
    public_ipv6: IPv6Address | None = _flag(
        "public-ipv6", "", "IPv6 `address` at which other nodes reach this one", option_values.ipv6
    )
    subnet_lease_renew_margin: int = _flag(
        "subnet-lease-renew-margin",
        60,
        "renew the lease this many `minutes` before it ends",
        option_values.margin,
    )
    ip_masq: bool = _flag("ip-masq", False, "masquerade traffic that leaves the network")
    ip_masq_fully_random_disable: bool = _flag(
        "ip-masq-fully-random-disable", False, "masquerade without fully random source ports"
    )
    kube_subnet_mgr: bool = _flag("kube-subnet-mgr", False, "keep the leases in Kubernetes instead of etcd")
    kube_api_url: str = _flag("kube-api-url", "", "`URL` of the Kubernetes API server")
    kube_annotation_prefix: str = _flag(
        "kube-annotation-prefix", "flannel.alpha.coreos.com", "`prefix` of the node annotations"
    )
    kubeconfig_file: str = _flag(
        "kubeconfig-file", "", "kubeconfig `file` with address and credentials of the API server"
    )
    net_config_path: str = _flag(
        "net-config-path", "/etc/kube-flannel/net-conf.json", "`file` with the network config, for Kubernetes"
    )
    cni_conf: str = _flag(
        "cni-conf",
        "",
        "`file` with the CNI configuration to keep, such as /etc/cni/net.d/10-flannel.conflist",
    )
    cni_template: str = _flag(
        "cni-template",
        "/etc/kube-flannel/cni-conf.json",
        "`file` from which -cni-conf is made: the CNI configuration for flannel's plug-in",
    )
    cni_bin: str = _flag("cni-bin", "/opt/cni/bin", "`directory` of the CNI plug-ins that -cni-conf needs")
    state_dir: str = _flag(
        "state-dir",
        "/var/lib/flannel",
        "`directory` for this node's secret, and if it exists for the node list with Kubernetes",
    )
    secret_dir: str = _flag(
        "secret-dir", "/run/flannel", "`directory` in which backends keep their keys, as Go flanneld does"
    )
    healthz_ip: str = _flag("healthz-ip", "0.0.0.0", "`address` of the health server")  # noqa: S104
    healthz_port: int = _flag("healthz-port", 0, "`port` of the health server (0: off)", option_values.port)
    iptables_resync: int = _flag(
        "iptables-resync", 5, "`seconds` between two checks of the firewall rules", option_values.resync
    )
    iptables_forward_rules: bool = _flag(
        "iptables-forward-rules", True, "let the firewall forward the network's traffic"
    )
    iptables_rules: str = _flag(
        "iptables-rules",
        "own-chains",
        "`set` of firewall rules: own-chains, or v0.12 for those of Go flanneld 0.12",
        option_values.one_of("own-chains", "v0.12"),
    )
    iptables_flavour: str = _flag(
        "iptables-flavour",
        "auto",
        "`tables` that iptables' rules go to: legacy, nft, or auto for those in use on this host",
        option_values.one_of("auto", "legacy", "nft"),
    )
    route_protocol_spread: str = _flag(
        "route-protocol-spread",
        "auto",
        "`choice` of routes' protocol numbers: auto varies them if there are many, off leaves boot",
        option_values.one_of("auto", "off"),
    )
    ip_blackhole_route: bool = _flag(
        "ip-blackhole-route", False, "keep a blackhole route for this node's subnet"
    )
    guard_tunnel: bool = _flag(
        "guard-tunnel", False, "let only the nodes' public IPs send packets into the tunnel: vxlan, udp, ipip"
    )
    keep_forwarding: bool = _flag(
        "keep-forwarding", False, "switch IP forwarding on again when another program switches it off"
    )
    set_node_network_unavailable: bool = _flag(
        "set-node-network-unavailable", True, "clear the node's NetworkUnavailable condition"
    )
    removal_guard: bool = _flag("removal-guard", True, "relist the leases before removing most peers at once")
    peer_probes: int = _flag(
        "peer-probes", 0, "ICMP probes to peers per minute (0: off)", option_values.probes
    )
    follow_path_mtu: bool = _flag(
        "follow-path-mtu",
        False,
        "lower the network's MTU on this node to what the paths to peers carry; a tunnel is needed",
    )
    disable_tx_checksum_offload: bool = _flag(
        "disable-tx-checksum-offload",
        False,
        "let the CPU compute checksums on VXLAN devices; false leaves the devices as they are",
    )
    answer_port: int = _flag(
        "answer-port",
        0,
        "UDP `port`, inside the network, at which other nodes' flannelctl asks this node; 0 for none",
        option_values.answer_port,
    )
    wireguard_port: int = _flag(
        "wireguard-port",
        0,
        "UDP `port` of wireguard on this node only, for NAT (0: ListenPort)",
        option_values.own_port,
    )
    public_name: str = _flag(
        "public-name",
        "",
        "DNS `name` of this node's public address, for wireguard with Mesh",
        option_values.host_name,
    )
    cleanup: bool = _flag(
        "cleanup", False, "remove and list all objects of the network in the subnet file, and exit"
    )
    all: bool = _flag("all", False, "with -cleanup: remove the objects of every flannel on this host")
    migrate_etcd_v2_to_v3: bool = _flag(
        "migrate-etcd-v2-to-v3", False, "copy config and leases from etcd's v2 API to v3, list them and exit"
    )
    plan: bool = _flag("plan", False, "print the changes that a start would make, as commands, and exit")
    dry_run: bool = _flag("dry-run", False, "with -cleanup or -migrate-etcd-v2-to-v3: only list the changes")
    v: int = _flag("v", 0, "verbosity `level` of the log")
    vmodule: str = _flag("vmodule", "", "verbosity of single source files, as `pattern=level,...`")
    logging_format: str = _flag(
        "logging-format",
        "text",
        "`layout` of log lines: text as glog's, or json",
        option_values.one_of("text", "json"),
    )
    log_backtrace_at: str = _flag(
        "log_backtrace_at", "", "add a stack trace to the log lines of this `file:line`"
    )
    #: Names of the flags that the command line or the environment sets, also to their defaults.
    given: frozenset[str] = frozenset()

    @property
    def names_a_store(self) -> bool:
        """Return True if a flag selects the store, so that etcd on this host is not just the default."""
        return bool("etcd-endpoints" in self.given or self.kube_subnet_mgr or self.remote or self.store)

    @property
    def has_networks(self) -> bool:
        """Return True if the daemon serves several networks, each with a name."""
        return bool(self.networks) or self.watch_networks

    @property
    def is_errand(self) -> bool:
        """Return True if the options name a one-shot action instead of serving."""
        return self.cleanup or self.migrate_etcd_v2_to_v3 or self.plan

    def described(self) -> str:
        """Return the non-default options as ``name=value`` words for one log line, secrets masked."""
        return " ".join(
            f"{entry.flag.name}={word}"
            for name, entry in _ROWS.items()
            if getattr(self, name) != entry.default
            for word in _words(entry.flag, getattr(self, name))
        )

    def __repr__(self) -> str:
        return f"Options({self.described()})"


FLAGS: tuple[Flag, ...] = tuple(entry.flag for entry in _ROWS.values())
#: Present names of flags by their former ones, which are accepted, too.
_FORMER = {"removal-brake": "removal-guard"}
_ACCEPTED = (
    *FLAGS,
    *(replace(flag, name=old) for old, new in _FORMER.items() for flag in FLAGS if flag.name == new),
)
#: No option, and never read from the environment.
_VERSION = Flag("version", "bool", False, "print the version and exit")


#: A secret in a network config. Keys are taken in any case, as Go does.
_SECRET = re.compile(r'("(?:psk|accesskeysecret)"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE)


def _words(flag: Flag, value: Any) -> Iterator[str]:
    if flag.name in ("etcd-password", "token"):
        yield "***"
    elif flag.name == "network":
        yield _word(_SECRET.sub(r'\1"***"', value))
    elif flag.repeatable:
        yield from map(_word, value)
    elif isinstance(value, tuple):
        yield ",".join(_word(str(each)) for each in value)
    else:
        yield _word(str(value).lower() if isinstance(value, bool) else str(value))


def _word(text: str) -> str:
    text = re.sub("(?s)^([^@]*?://)?.+@", r"\1***@", text)
    return text if text and text.isprintable() and " " not in text else flags.quoted(text)


def read(argv: Sequence[str], environ: Mapping[str, str], program: str = "flanneld") -> Options:
    """Parse the arguments after the program's name, then the environment for flags that are not given.

    Raises ``UsageError`` for invalid arguments, ``HelpWanted`` or ``VersionWanted`` if they ask for it,
    and ``Fatal`` for a value out of bounds.
    """
    try:
        line = _by_present_name(flags.parse((*_ACCEPTED, _VERSION), argv))
        if line.pop(_VERSION.name, False):
            raise VersionWanted
        rest = (flag for flag in _ACCEPTED if _FORMER.get(flag.name, flag.name) not in line)
    except flags.HelpRequested:
        raise HelpWanted(usage(program)) from None
    except flags.FlagError as error:
        raise UsageError(str(error), usage(program)) from None
    try:
        variables = _by_present_name(flags.from_environment(rest, environ, PREFIX))
    except flags.FlagError as error:
        # A service's log: the usage would only bury it.
        raise UsageError(f"{error}; correct or unset it", "") from None
    sources = {name: f"-{name}" for name in line}
    sources |= {name: flags.variable(name, PREFIX) for name in variables}
    return _checked(line | variables, sources)


def _by_present_name(given: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    former = {_FORMER[name]: value for name, value in given.items() if name in _FORMER}
    return former | {name: value for name, value in given.items() if name not in _FORMER}


#: Variables of Go flanneld that mean nothing here, each with the reason.
WITHOUT_EFFECT = {
    "EVENT_QUEUE_DEPTH": "changes of nodes wait in no queue of a fixed size",
    "CONT_WHEN_CACHE_NOT_READY": "the start waits for the list of nodes, and goes on by itself",
}


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return unknown ``FLANNELD_*`` variables, each with the most similar known one."""
    known = [flags.variable(flag.name, PREFIX) for flag in _ACCEPTED]
    unknown = [name for name in sorted(environ) if name.startswith(f"{PREFIX}_") and name not in known]
    unknown = [name for name in unknown if not _is_of_a_service(name, environ[name])]
    if not unknown:
        return []
    from difflib import get_close_matches  # rarely needed, and it takes its time

    # Without the prefix, which would make all of them similar.
    rest = {name.removeprefix(PREFIX): name for name in known}
    close = ((name, get_close_matches(name.removeprefix(PREFIX), rest, n=1)) for name in unknown)
    return [(name, rest[found[0]] if found else "") for name, found in close]


def _is_of_a_service(name: str, value: str) -> bool:
    """Return True for variables that Kubernetes and Docker set for a service named flanneld."""
    of_port = r"_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?"
    is_link = re.search(f"{of_port}$", name) and re.match("(tcp|udp|sctp)://", value)
    return bool(is_link or re.search(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)_\w+$", name))


def usage(program: str) -> str:
    """Return the usage text: one line about the program, then all flags, then a newline."""
    return f"Usage: {program} [-flag=value ...]\n" + flags.usage((*FLAGS, _VERSION))


def _checked(given: Mapping[str, FlagValue], sources: Mapping[str, str]) -> Options:
    options = Options(
        **{
            name: entry.read(given[flag], sources[flag])
            for name, entry in _ROWS.items()
            if (flag := entry.flag.name) in given
        },
        given=frozenset(given),
    )
    if options.cleanup and options.migrate_etcd_v2_to_v3:
        raise Fatal("-cleanup and -migrate-etcd-v2-to-v3 are two things", "give one of them")
    _check_store(options)
    if options.all and not options.cleanup:
        raise Fatal(f"{sources['all']} says what -cleanup removes", "give -cleanup too, or leave it out")
    if options.dry_run and not (options.cleanup or options.migrate_etcd_v2_to_v3):
        raise Fatal(
            f"{sources['dry-run']} says what -cleanup or -migrate-etcd-v2-to-v3 would do",
            "give one of them too, or leave it out",
        )
    return options


def _check_store(options: Options) -> None:
    """Raise ``Fatal`` if two stores are named."""
    if options.listen and options.remote:
        raise Fatal("--listen and --remote are mutually exclusive", "give one of them")
    if options.kube_subnet_mgr and (options.listen or options.remote):
        flag = "listen" if options.listen else "remote"
        raise Fatal(f"-{flag} and -kube-subnet-mgr name two stores", "give one of them")
    if options.listen and options.etcd_api == "both" and not options.store:
        raise Fatal("-listen serves one API of etcd, not both", "set -etcd-api=v2 or v3, or leave it out")
    if options.has_networks and (options.kube_subnet_mgr or options.plan or options.etcd_api == "both"):
        other = (
            "-kube-subnet-mgr" if options.kube_subnet_mgr else "-plan" if options.plan else "-etcd-api=both"
        )
        raise Fatal(f"{other} is for one network", "leave -networks and -watch-networks out")
    if options.has_networks and options.guard_tunnel:
        raise Fatal("-guard-tunnel is for one network: several may share a port", "leave it out")
    if options.has_networks and options.cni_conf:
        raise Fatal("-cni-conf is for one network", "leave it out, and install flannel's plug-in")
    _check_file(options)
    _check_token(options)


def _check_file(options: Options) -> None:
    """Raise ``Fatal`` for options that contradict a store in a file."""
    if options.store and (options.remote or options.kube_subnet_mgr):
        flag = "remote" if options.remote else "kube-subnet-mgr"
        raise Fatal(f"-store and -{flag} name two stores", "give one of them")
    if options.network and not options.store:
        raise Fatal("-network is for the network in -store", "give -store too, or write the config to etcd")
    for name, is_given in (("serve-only", options.serve_only), ("require-token", options.require_token)):
        if is_given and not (options.listen and options.store):
            raise Fatal(f"-{name} is for -listen with -store", "give both of them, or leave it out")


def _check_token(options: Options) -> None:
    for name, text in (("token", options.token), ("token-file", options.token_file)):
        if text and not options.remote:
            raise Fatal(f"-{name} is for -remote", "give -remote too, or leave it out")
    if options.token and options.token_file:
        raise Fatal("-token and -token-file are two tokens", "give one of them")
