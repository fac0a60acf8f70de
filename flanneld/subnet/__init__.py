"""Leases: the interface of a store, its implementations, and their storage formats."""

from flanneld.runtime.imports import defer

# python-etcd imports both for its own requests and for SRV records, which are not used here.
defer("dns.resolver")
defer("urllib3")
