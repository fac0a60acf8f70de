"""What the options mean for the parts of the daemon: which store, which interface, what else to make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from flanneld.model import Lease
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.options import Options
from flanneld.state.resources import Blackhole, Resource
from flanneld.subnet.manager import NodeStore, SubnetManager

if TYPE_CHECKING:
    from flanneld.subnet.etcd.endpoints import EtcdOptions


def open_manager(wanted: Options, environ: Mapping[str, str]) -> SubnetManager:
    """The store the options name. Imported here: nobody needs the libraries of more than one."""
    if wanted.kube_subnet_mgr:
        from flanneld.subnet.kube.manager import KubeManager, KubeOptions

        return KubeManager(
            KubeOptions(
                api_url=wanted.kube_api_url,
                kubeconfig=wanted.kubeconfig_file,
                annotation_prefix=wanted.kube_annotation_prefix,
                net_config=wanted.net_config_path,
                state_dir=wanted.state_dir,
            ),
            environ,
        )
    from flanneld.subnet.etcd.choice import open_etcd

    return open_etcd(etcd_options(wanted), wanted.etcd_api)


def etcd_options(wanted: Options) -> EtcdOptions:
    """How to reach etcd, and as whom."""
    from flanneld.subnet.etcd.endpoints import EtcdOptions

    return EtcdOptions(
        endpoints=wanted.etcd_endpoints,
        prefix=wanted.etcd_prefix,
        username=wanted.etcd_username,
        password=wanted.etcd_password,
        keyfile=wanted.etcd_keyfile,
        certfile=wanted.etcd_certfile,
        cafile=wanted.etcd_cafile,
        transport=wanted.etcd_transport,
    )


def interface_choice(wanted: Options) -> InterfaceChoice:
    """How the options want the uplink chosen."""
    return InterfaceChoice(
        ifaces=wanted.iface,
        regexes=wanted.iface_regex,
        can_reach=str(wanted.iface_can_reach or ""),
        public_ip=wanted.public_ip,
        public_ipv6=wanted.public_ipv6,
    )


def choice_for(wanted: Options, manager: SubnetManager) -> InterfaceChoice:
    """The same, but for public addresses the store's word counts more, as upstream has it.

    May raise ``Retryable``.
    """
    choice = interface_choice(wanted)
    if not isinstance(manager, NodeStore):
        return choice
    ipv4, ipv6 = manager.public_ips()
    return replace(choice, public_ip=ipv4 or choice.public_ip, public_ipv6=ipv6 or choice.public_ipv6)


def extras_for(wanted: Options, lease: Lease) -> tuple[Resource, ...]:
    """What the options want of the kernel, whoever the peers and whatever the backend.

    A blackhole, so that what is for a container that is no more does not go round between host and gateway.
    """
    nets = lease.key if wanted.ip_blackhole_route else ()
    return tuple(Blackhole(net) for net in nets if net is not None)
