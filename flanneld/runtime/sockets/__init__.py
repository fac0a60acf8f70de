"""Sockets and HTTP: connections that can be cut, servers, clients, and readers with a time limit."""

from flanneld.runtime.imports import defer

# http.client imports it for any request; a server without TLS needs no OpenSSL, which takes 4 MiB.
defer("ssl")
# urllib3 imports it only to detect HTTP/2 support, which is not used here: 14 ms and 2 MiB.
defer("urllib3.http2", "probe")
