"""Registry of backends by name: built-in ones, and those of installed packages."""

from __future__ import annotations

from importlib import import_module

from flanneld.backends.contract import Backend, Factory, ports
from flanneld.compat.flags import quoted
from flanneld.config import Config
from flanneld.errors import Fatal, shown

#: Group of entry points in other packages.
GROUP = "flanneld.backends"
#: Module and factory of each built-in backend.
BUILT_IN = {
    "ali-vpc": ("flanneld.backends.cloud.ali", "build"),
    "alloc": ("flanneld.backends.host_gw", "Alloc"),
    "aws-vpc": ("flanneld.backends.cloud.aws", "build"),
    "extension": ("flanneld.backends.extension.backend", "Extension"),
    "gce": ("flanneld.backends.cloud.gce", "build"),
    "host-gw": ("flanneld.backends.host_gw", "HostGw"),
    "ipip": ("flanneld.backends.ipip", "IpipBackend"),
    "ipsec": ("flanneld.backends.ipsec.backend", "Ipsec"),
    "tencent-vpc": ("flanneld.backends.cloud.tencent", "build"),
    "udp": ("flanneld.backends.udp.backend", "Udp"),
    "wireguard": ("flanneld.backends.wireguard.backend", "WireGuardBackend"),
    "vxlan": ("flanneld.backends.vxlan", "VxlanBackend"),
}


def factory_for(config: Config) -> Factory:
    """Return the factory of the backend, or of both with ``Backend.Also``. Raises ``Fatal``."""
    first = load(config.backend_type)
    if config.also is None:
        return first
    from flanneld.backends.switching import beside  # most nodes run one backend

    return beside(first, load(config.also.backend_type))


def load(name: str) -> Factory:
    """Load the factory of a backend by its name in any case: built-in, or from an installed package.

    Raises ``Fatal`` if there is none.
    """
    if own := BUILT_IN.get(name.lower()):
        factory: Factory = getattr(import_module(own[0]), own[1])
        return factory
    from importlib.metadata import entry_points  # 20 ms and 2 MiB, only for those who need it

    offered = {each.name: each for each in entry_points(group=GROUP)}
    entry = offered.get(name.lower())
    if entry is None:
        raise Fatal(
            f"unknown backend type {quoted(shown(name))}",
            f"set Backend.Type in the network config to one of: {', '.join(sorted({*BUILT_IN, *offered}))}",
        )
    offer: Factory = entry.load()
    return offer


def described(name: str) -> type[Backend]:
    """Return the class of a backend, for what is true of all its nodes; the base if it is unknown here."""
    try:
        factory: Factory | None = load(name) if name else None
    except Exception:  # another package's module may raise anything
        return Backend
    found = getattr(factory, "described", factory)
    return found if isinstance(found, type) and issubclass(found, Backend) else Backend


def clear_ports(config: Config) -> tuple[int, ...]:
    """Return the ports at which a config's tunnels take unencrypted packets; 0 is IP protocol 4, ipip."""
    both = ((described(each.backend_type), each) for each in (config, config.also) if each)
    return tuple(port for kind, each in both if not kind.encrypts for _, port in ports(kind, each))
