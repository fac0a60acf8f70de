"""Subnet managers by option. Each is imported when opened, because it needs libraries of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flanneld.options import Options
from flanneld.subnet.manager import SubnetManager

if TYPE_CHECKING:
    from flanneld.subnet.etcd.endpoints import EtcdOptions
    from flanneld.subnet.remote.connection import RemoteServer
    from flanneld.subnet.remote.tls import TlsFiles


def open_manager(options: Options, environ: Mapping[str, str]) -> SubnetManager:
    """Return the subnet manager that the options select. Raises ``Fatal`` for unusable options."""
    if options.remote:
        from flanneld.subnet.remote.manager import RemoteManager, RemoteOptions

        return RemoteManager(RemoteOptions(remote_servers(options), remote_tls(options)))
    if not options.kube_subnet_mgr:
        from flanneld.subnet.etcd.choice import open_etcd

        return open_etcd(etcd_options(options), options.etcd_api)
    from flanneld.subnet.kube.manager import KubeManager, KubeOptions

    return KubeManager(
        KubeOptions(
            api_url=options.kube_api_url,
            kubeconfig=options.kubeconfig_file,
            annotation_prefix=options.kube_annotation_prefix,
            net_config=options.net_config_path,
            state_dir=options.state_dir,
        ),
        environ,
    )


def etcd_options(options: Options) -> EtcdOptions:
    """Return the options for etcd, credentials included."""
    from flanneld.subnet.etcd.endpoints import EtcdOptions

    return EtcdOptions(
        endpoints=options.etcd_endpoints,
        prefix=options.etcd_prefix,
        username=options.etcd_username,
        password=options.etcd_password,
        keyfile=options.etcd_keyfile,
        certfile=options.etcd_certfile,
        cafile=options.etcd_cafile,
        transport=options.etcd_transport,
    )


def remote_servers(options: Options) -> tuple[RemoteServer, ...]:
    """Return the flannel servers in the given order."""
    from flanneld.subnet.remote.connection import RemoteServer

    parts = [urlsplit(f"//{server}") for server in options.remote]
    return tuple(RemoteServer(each.hostname or "", each.port or 0) for each in parts)


def remote_tls(options: Options) -> TlsFiles:
    """Return the TLS files of a flannel server, or of its client."""
    from flanneld.subnet.remote.tls import TlsFiles

    return TlsFiles(options.remote_certfile, options.remote_keyfile, options.remote_cafile)
