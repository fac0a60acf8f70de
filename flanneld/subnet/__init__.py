"""Leases: the interface of a store, its implementations, and their storage formats."""

from flanneld.runtime.imports import defer

# python-etcd imports it for SRV records, which are not used here: a third of its memory.
defer("dns.resolver")
# urllib3 imports it only to detect HTTP/2 support, which is not used here: 14 ms and 2 MiB.
defer("urllib3.http2", "probe")
