"""Sessions with the API server, configured as kubectl and pods are.

Configuration, credentials and the connection pool come from the ``kubernetes`` package. Its generated models
are not used: they would cost half a second at start and ten times the memory. Imported only with
``-kube-subnet-mgr``.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from flanneld.errors import Fatal, Retryable, install_command
from flanneld.runtime.imports import defer
from flanneld.runtime.logs import Once
from flanneld.runtime.sockets.http_client import Pool, TlsPool
from flanneld.runtime.sockets.interruptible import InterruptibleSocket

log = logging.getLogger(__name__)

for _package in ("kubernetes", "kubernetes.config", "kubernetes.utils"):
    defer(_package)
try:
    from kubernetes.client import configuration, rest
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
except ModuleNotFoundError as missing:
    raise Fatal(
        f"-kube-subnet-mgr needs the Python package kubernetes ({missing})",
        install_command("kubernetes", "python3-kubernetes"),
    ) from None


_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
#: Files with credentials that a kubeconfig names.
_NAMED_FILES = re.compile(
    r"""(?:tokenFile|client-certificate|client-key)["']?\s*:\s*(?:"([^"]+)"|'([^']+)'|([^\s"',}]+))"""
)
#: For each file with credentials the numbers that change with it; None for a missing one.
Files = tuple[tuple[int, int, int] | None, ...]
#: Exceptions that the kubernetes package raises for a malformed configuration, or for one that needs a
#: package which is not installed.
_WRONG = (
    ConfigException,
    ApiException,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
)
_once = Once()


def _shown(text: str) -> str:
    """Return a message of the kubernetes package on one line, without kubeconfig contents and passwords."""
    return re.sub("//.*@", "//", " ".join(text.partition("{")[0].split()))


def _pass_on(record: logging.LogRecord) -> bool:
    """Filter out records of the kubernetes package; log each of its failures once, without secrets.

    The package logs to the root logger, every time, and its messages quote the kubeconfig.
    """
    if "/kubernetes/" not in record.pathname:
        return True
    _once.warn(log, record.funcName, f"Part of the kubeconfig is unusable: {_shown(record.getMessage())}")
    return False


logging.getLogger().addFilter(_pass_on)


class ApiSession(Struct, frozen=True, gc=False):
    """Pooled connections to the API server with one set of credentials, read from ``files``."""

    url: str
    files: Files
    _settings: Any
    _manager: Any  # urllib3's PoolManager

    def request(self, method: str, target: str, headers: Mapping[str, str], **options: Any) -> Any:
        """Send a request and return urllib3's response, with its body unread.

        ``target`` is path and query. An expired bearer token is read again first. Raises ``Retryable``.
        """
        return self._manager.urlopen(
            method,
            self.url + target,
            headers={**headers, **self._login()},
            retries=False,
            redirect=False,
            preload_content=False,
            **options,
        )

    def close(self) -> None:
        self._manager.clear()

    def _login(self) -> dict[str, str]:
        try:
            value = self._settings.auth_settings().get("BearerToken", {}).get("value") or ""
        except _WRONG as error:
            raise _unusable(error) from error
        scheme, _, secret = value.strip().partition(" ")
        if scheme == "bearer":  # as the package spells it; some proxies compare the scheme case-sensitively
            scheme = "Bearer"
        return {"Authorization": f"{scheme} {secret}"} if value else {}


class Access:
    """Address and credentials of the API server, from the flags or else from the pod's service account.

    Raises ``Fatal`` if neither is there.
    """

    def __init__(self, url: str, kubeconfig: str, environ: Mapping[str, str]) -> None:
        self._url = url
        self._kubeconfig = kubeconfig
        #: Host of the API server, empty until a session was opened.
        self.host = ""
        if url or kubeconfig:
            self.name = re.sub(r"(?s)^([A-Za-z]+://)?.*@", r"\1", url) or f"the server in {kubeconfig}"
        elif environ.get(_SERVICE_HOST):
            self.name = f"{environ[_SERVICE_HOST]} port {environ.get('KUBERNETES_SERVICE_PORT', '')}"
        else:
            raise Fatal(
                f"-kube-subnet-mgr does not know the API server: this is no pod, {_SERVICE_HOST} is not set",
                "give -kubeconfig-file or -kube-api-url",
            )

    def open(self, interruptible_socket: InterruptibleSocket) -> ApiSession:
        """Read the configuration and return a session that is not connected yet. Raises ``Retryable``."""
        settings, files = configuration.Configuration(), self.files()
        try:
            self._load(settings)
            url = self._complete(self._url or settings.host)
            manager = rest.RESTClientObject(settings).pool_manager
        except _WRONG as error:
            raise _unusable(error) from error
        manager.pool_classes_by_scheme = {
            "http": partial(Pool, interruptible_socket=interruptible_socket),
            "https": partial(TlsPool, interruptible_socket=interruptible_socket),
        }
        self.host = urlsplit(url).hostname or ""
        return ApiSession(url.rstrip("/"), files, settings, manager)

    def files(self) -> Files:
        """Return the present state of the files with credentials."""
        paths: list[Path] = []
        if self._kubeconfig:
            config = Path(self._kubeconfig)
            with suppress(OSError):
                found = _NAMED_FILES.findall(config.read_text(encoding="utf-8", errors="replace"))
                paths = [config, *(config.parent / "".join(names) for names in found)]
        elif not self._url:
            from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME

            paths = [Path(SERVICE_TOKEN_FILENAME)]
        return tuple(map(_state_of, paths))

    def clean_up(self) -> None:
        """Remove the temporary files in which the kubernetes package keeps certificates and keys."""
        loader = sys.modules.get("kubernetes.config.kube_config")
        if loader is not None:
            loader._cleanup_temp_files()  # noqa: SLF001 - else it waits for an orderly end of the interpreter

    def _complete(self, url: str) -> str:
        """Return ``url`` with a scheme: a bare host and port means http, as in Go.

        A kubeconfig must name the scheme, so that its credentials are never sent in the clear by accident.
        """
        scheme, separator, _ = url.partition("://")
        if not separator and not self._kubeconfig:
            return f"http://{url}"
        if scheme.lower() not in ("http", "https"):
            raise ConfigException("the URL of the API server begins neither with https:// nor with http://")
        return url

    def _load(self, settings: Any) -> None:
        if self._kubeconfig:
            _load_kubeconfig(self._kubeconfig, settings)
        elif not self._url:
            from kubernetes.config.incluster_config import load_incluster_config

            load_incluster_config(settings)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load_kubeconfig(file: str, settings: Any) -> None:
    from kubernetes.config import kube_config
    from yaml import YAMLError

    try:
        Path(file).open("rb").close()
        kube_config.load_kube_config(file, client_configuration=settings, persist_config=False)
    except YAMLError as error:
        raise ConfigException(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    except OSError:
        kube_config._cleanup_temp_files()  # noqa: SLF001 - on a full disk one may be there in part, for good
        raise
    except _WRONG:
        raise
    except Exception as error:  # logins by plug-ins raise exceptions of their own, as google-auth does
        raise ConfigException(f"{file}: {' '.join(str(error).split())}") from error


def _unusable(error: Exception) -> Retryable:
    text = _shown(str(error))
    if isinstance(error, OSError) and error.filename:
        text = f"cannot read {error.filename}: {error.strerror}"
    return Retryable(
        f"cannot read address and credentials of the API server: {text}",
        "correct -kubeconfig-file, or mount the service account",
    )
