"""Where leases come from: the contract, the stores, and the forms in which leases lie in them."""

from flanneld.imports import lazily

# python-etcd imports it for SRV records, which are never asked for here, and it is a third of its weight.
lazily("dns.resolver")
