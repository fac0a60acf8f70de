"""Stores by option. Each is imported when opened, because it needs libraries of its own."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flanneld.options import Options
from flanneld.subnet.store import Store

if TYPE_CHECKING:
    from flanneld.runtime.sockets.http_connection import TlsFiles
    from flanneld.subnet.etcd.transport import EtcdOptions
    from flanneld.subnet.remote.store import RemoteOptions


def open_store(options: Options, environ: Mapping[str, str], network: str = "") -> Store:
    """Open the store that the options name; ``network`` is the network's name, if it has one.

    Raises ``Fatal`` for options that cannot be used.
    """
    if options.remote:
        from flanneld.subnet.remote.store import RemoteStore

        return RemoteStore(remote_options(options, network))
    if options.store:
        from flanneld.subnet.embedded.store import open_file, store_of

        return store_of(open_file(options.store), network)
    if not options.kube_subnet_mgr:
        from flanneld.subnet.etcd.api_choice import open_etcd

        return open_etcd(etcd_options(options, network), options.etcd_api)
    from flanneld.subnet.kube.store import KubeOptions, KubeStore

    return KubeStore(
        KubeOptions(
            api_url=options.kube_api_url,
            kubeconfig=options.kubeconfig_file,
            annotation_prefix=options.kube_annotation_prefix,
            net_config=options.net_config_path,
            state_dir=options.state_dir,
        ),
        environ,
    )


def etcd_options(options: Options, network: str = "") -> EtcdOptions:
    """Return how to reach etcd, and the credentials for it."""
    from flanneld.subnet.etcd.transport import EtcdOptions

    return EtcdOptions(
        endpoints=options.etcd_endpoints,
        prefix=posixpath.join(options.etcd_prefix, network) if network else options.etcd_prefix,
        username=options.etcd_username,
        password=options.etcd_password,
        keyfile=options.etcd_keyfile,
        certfile=options.etcd_certfile,
        cafile=options.etcd_cafile,
        transport=options.etcd_transport,
    )


def remote_options(options: Options, network: str = "") -> RemoteOptions:
    """Return how to reach the flannel servers, and the token for them."""
    from flanneld.subnet.remote.store import RemoteOptions

    secret_file = posixpath.join(options.state_dir, "node-secret") if options.state_dir else ""
    return RemoteOptions(
        options.remote, remote_tls(options), network, options.token, options.token_file, secret_file
    )


def remote_tls(options: Options) -> TlsFiles:
    """Return the TLS files of a flannel server, or of its client."""
    from flanneld.runtime.sockets.http_connection import TlsFiles

    return TlsFiles(options.remote_certfile, options.remote_keyfile, options.remote_cafile)
