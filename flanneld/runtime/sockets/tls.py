"""TLS from files that flags name."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from flanneld.errors import Fatal
from flanneld.runtime.sockets.http_connection import failure_text


class TlsFiles(Struct, frozen=True, gc=False):
    """Flags ``-remote-certfile``, ``-remote-keyfile`` and ``-remote-cafile``, each empty if not given.

    ``flags`` is the beginning of their names.
    """

    certfile: str = ""
    keyfile: str = ""
    cafile: str = ""
    flags: str = "-remote"

    def __bool__(self) -> bool:
        """Return True if there is one."""
        return any((self.certfile, self.keyfile, self.cafile))

    def check(self) -> None:
        """Raise ``Fatal`` for half a pair, or for a file that cannot be read."""
        if bool(self.certfile) != bool(self.keyfile):
            problem = f"only one of {self.flags}-certfile and {self.flags}-keyfile is set"
            raise Fatal(problem, "set both, or none")
        for name in ("cafile", "certfile", "keyfile"):
            try:
                if file := getattr(self, name):
                    Path(file).open("rb").close()
            except OSError as error:
                remedy = f"correct {self.flags}-{name} or the file"
                raise Fatal(f"cannot read {file}: {error.strerror}", remedy) from None

    def load(self, context: ssl.SSLContext) -> None:
        """Load authority, certificate and key, as far as given. Raises ``Fatal``."""
        if self.cafile:
            remedy = f"set {self.flags}-cafile to the authority's certificate in PEM format"
            with _refusing(f"{self.cafile} holds no certificates", remedy):
                context.load_verify_locations(self.cafile)
        if self.certfile:
            problem = f"{self.certfile} and {self.keyfile} do not hold a certificate and its key"
            remedy = f"set {self.flags}-certfile and {self.flags}-keyfile to a matching pair in PEM format"
            with _refusing(problem, remedy):
                context.load_cert_chain(self.certfile, self.keyfile, self._no_passphrase)

    def _no_passphrase(self) -> str:
        problem = f"the key in {self.keyfile} is encrypted"
        raise Fatal(problem, f"set {self.flags}-keyfile to a key without a passphrase")


def client_context(files: TlsFiles, *, is_pinned: bool = False) -> ssl.SSLContext:
    """Return a client's TLS. Without an authority the system's are trusted, as in Go.

    With ``is_pinned`` the server is known by its certificate: neither authority nor name is checked.
    """
    files.check()
    # Not create_default_context: since Python 3.13 it refuses authorities that Go accepts.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if is_pinned:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED if files.cafile else ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    files.load(context)
    if not files.cafile and not is_pinned:
        context.load_default_certs()
    return context


@contextmanager
def _refusing(problem: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise Fatal(f"{problem}: {failure_text(error, 0)}", remedy) from None
