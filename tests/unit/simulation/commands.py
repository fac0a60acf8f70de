"""Commands of iproute2 and ethtool on the model of a kernel: those that others need to spoil its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_interface, ip_network

from msgspec.structs import replace

from flanneld.state.resources import PROTO_BOOT, FdbEntry, ForeignLink, Neighbor, Route, Vxlan
from tests.unit.simulation.kernel import EEXIST, ENOENT, Kernel, KernelError

#: Device whose routes are of a kind that is never flannel's.
OTHER_KIND = "lo"


def run(kernel: Kernel, command: str) -> None:
    """Do what a command does. Raises ``KernelError``."""
    words = command.split()
    if words[0] == "true":
        return
    program, *words = [word for word in words if word != "-6"]
    area, verb, *rest = words
    match program, area:
        case "ip", "link":
            _link(kernel, verb, rest)
        case "ethtool", "-K":
            name, (_, state) = verb, rest
            kernel.set_link(replace(_vxlan(kernel, name), cpu_checksums=state == "off"))
        case "ip", "address":
            _address(kernel, verb, rest)
        case "ip", "neigh":
            _neighbor(kernel, verb, rest[0], _options(rest[1:]))
        case "bridge", "fdb":
            _fdb(kernel, verb, rest[0], _options(rest[1:]))
        case "ip", "route":
            _route(kernel, verb, rest)
        case _:
            raise NotImplementedError(command)


def _options(words: Sequence[str]) -> Mapping[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def _link(kernel: Kernel, verb: str, words: Sequence[str]) -> None:
    name = words[0]
    match [verb, *words[1:]]:
        case ["del"]:
            kernel.delete_link(name)
        case ["add", "type", kind]:
            kernel.add_link(ForeignLink(name, kind))
        case ["set", "down"]:
            kernel.set_down(name)
        case ["set", "name", new]:
            kernel.rename_link(name, new)
        case ["set", "mtu", number]:
            kernel.set_link(replace(_vxlan(kernel, name), mtu=int(number)))
        case ["set", "address", mac]:
            kernel.set_link(replace(_vxlan(kernel, name), mac=mac))
        case ["set", "type", "vxlan", "learning"]:
            kernel.set_link(replace(_vxlan(kernel, name), learning=True))
        case other:
            raise NotImplementedError(str(other))


def _vxlan(kernel: Kernel, name: str) -> Vxlan:
    link = kernel.devices.get(name)
    if not isinstance(link, Vxlan):
        raise KernelError(ENOENT)
    return link


def _address(kernel: Kernel, verb: str, words: Sequence[str]) -> None:
    text, _, device = words
    address = ip_interface(text)
    if verb == "add":
        kernel.add_address(device, address.ip, address.network.prefixlen)
    else:
        kernel.delete_address(device, address.ip)


def _neighbor(kernel: Kernel, verb: str, target: str, options: Mapping[str, str]) -> None:
    entry = Neighbor(options["dev"], ip_address(target), options.get("lladdr", ""))
    there = kernel.neighbors.get(entry.key)
    if verb == "add" and there is not None:
        raise KernelError(EEXIST)
    # One that is not permanent is none for us.
    if verb == "del" or options["nud"] != "permanent":
        if kernel.neighbors.pop(entry.key, None) is None:
            raise KernelError(ENOENT)
        return
    kernel.replace_neighbor(entry)


def _fdb(kernel: Kernel, verb: str, mac: str, options: Mapping[str, str]) -> None:
    remote = ip_address(options.get("dst", "0.0.0.0"))
    entry = FdbEntry(options["dev"], mac, remote, has_overrides="port" in options)
    if verb == "add" and entry.key in kernel.fdb:
        raise KernelError(EEXIST)
    if verb != "del":
        kernel.replace_fdb(entry)
    elif kernel.fdb.pop(entry.key, None) is None:
        raise KernelError(ENOENT)


def _route(kernel: Kernel, verb: str, words: Sequence[str]) -> None:
    if words[0] == "blackhole":
        words = [words[1], "dev", OTHER_KIND]
    destination, options = ip_network(words[0]), _options(words[1:])
    if verb == "del":
        there = kernel.at(destination)
        if not there:
            raise KernelError(ENOENT)
        kernel.delete_route(there[0].route, there[0].metric)
        return
    gateway = ip_address(options["via"]) if "via" in options else None
    way = kernel.route_to(gateway) if gateway is not None else None
    device = options.get("dev") or (way.device if way else "")
    kernel.add_route(
        Route(destination, device, gateway),
        int(options.get("proto", PROTO_BOOT)),
        int(options.get("metric", 0)),
        over=verb == "replace",
        in_front=verb == "prepend",
    )
