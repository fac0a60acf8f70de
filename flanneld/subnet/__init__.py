"""Where leases come from: the contract, the stores, and the forms in which leases lie in them."""

from flanneld.runtime.imports import defer

# python-etcd imports it for SRV records, which are never asked for here, and it is a third of its weight.
defer("dns.resolver")
# urllib3 imports it; it looks for the version of a library that is never used here: 14 ms and 2 MiB.
defer("urllib3.http2", "probe")
