"""Where leases come from: the contract, the stores, and the forms in which leases lie in them."""

from flanneld.runtime.imports import lazily, package_without_init

# python-etcd imports it for SRV records, which are never asked for here, and it is a third of its weight.
lazily("dns.resolver")
# urllib3 imports it; it looks for the version of a library that is never used here: 14 ms and 2 MiB.
package_without_init("urllib3.http2")
