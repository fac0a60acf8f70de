"""Where the API server is and how to be let in: the ``kubernetes`` package, as little of it as serves.

Of that package we take the reading of configurations, the credentials and the pool of connections; its
generated models would cost half a second and ten times the memory. Imported only in this mode.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from flanneld.compat.glog import Once
from flanneld.errors import Fatal, Retryable
from flanneld.runtime.connection_pools import Pool, TlsPool
from flanneld.runtime.imports import defer
from flanneld.runtime.interruptible_socket import InterruptibleSocket

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
        "pip install 'flanneld[kubernetes]'",
    ) from None


_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
#: What that package raises for a configuration of a shape that it does not expect, or with a part that needs
#: yet another package.
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
    """What that package says, on one line, without what it quotes of a kubeconfig, and without passwords."""
    return re.sub("//.*@", "//", " ".join(text.partition("{")[0].split()))


def _pass_on(record: logging.LogRecord) -> bool:
    """That package logs failures where everybody's log begins, each time anew and with all that it knows."""
    if "/kubernetes/" not in record.pathname:
        return True
    _once.warn(
        log, record.funcName, f"A part of the kubeconfig does not serve: {_shown(record.getMessage())}"
    )
    return False


logging.getLogger().addFilter(_pass_on)


class Session(Struct, frozen=True, gc=False):
    """Connections with one set of credentials."""

    url: str
    _settings: Any
    _manager: Any  # urllib3's PoolManager

    def request(self, method: str, target: str, headers: Mapping[str, str], **options: Any) -> Any:
        """``target`` is path and query; the answer is urllib3's. A token is read again when it is due."""
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
        if scheme == "bearer":  # as that package has it; not every proxy knows that case is nothing here
            scheme = "Bearer"
        return {"Authorization": f"{scheme} {secret}"} if value else {}


class Access:
    """The way to the API server that the flags name, else that of a pod; ``Fatal`` if there is none."""

    def __init__(self, url: str, kubeconfig: str, environ: Mapping[str, str]) -> None:
        self._url = url
        self._kubeconfig = kubeconfig
        if url or kubeconfig:
            self.name = re.sub(r"(?s)^([A-Za-z]+://)?.*@", r"\1", url) or f"the server in {kubeconfig}"
        elif environ.get(_SERVICE_HOST):
            self.name = f"{environ[_SERVICE_HOST]} port {environ.get('KUBERNETES_SERVICE_PORT', '')}"
        else:
            raise Fatal(
                f"-kube-subnet-mgr does not know the API server: this is no pod, {_SERVICE_HOST} is not set",
                "give -kubeconfig-file or -kube-api-url",
            )

    def open(self, line: InterruptibleSocket) -> Session:
        """Read the configuration anew and connect to nothing yet. Raises ``Retryable``."""
        settings = configuration.Configuration()
        try:
            self._load(settings)
            url = self._complete(self._url or settings.host)
            manager = rest.RESTClientObject(settings).pool_manager
        except _WRONG as error:
            raise _unusable(error) from error
        manager.pool_classes_by_scheme = {
            "http": partial(Pool, line=line),
            "https": partial(TlsPool, line=line),
        }
        return Session(url.rstrip("/"), settings, manager)

    def clean_up(self) -> None:
        """Remove the files in which that package puts certificates and keys out of a kubeconfig."""
        loader = sys.modules.get("kubernetes.config.kube_config")
        if loader is not None:
            loader._cleanup_temp_files()  # noqa: SLF001 - else it waits for an orderly end of the interpreter

    def _complete(self, url: str) -> str:
        """A host and a port alone mean http, as in Go; but no credentials are sent in the clear unasked."""
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


def _unusable(error: Exception) -> Retryable:
    text = _shown(str(error))
    if isinstance(error, OSError) and error.filename:
        text = f"cannot read {error.filename}: {error.strerror}"
    return Retryable(
        f"the way to the API server cannot be read: {text}",
        "correct -kubeconfig-file, or mount the service account",
    )
