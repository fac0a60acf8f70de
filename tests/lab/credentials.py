"""Certificates, kubeconfig files and what a pod finds of its service account."""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(folder: Path, address: str) -> Path:
    """Make ca, server and admin (.crt and .key) in a folder, unless they are there; return it."""
    if (folder / "server.crt").exists():
        return folder
    _openssl(folder, "req", "-x509", *_KEY, "-subj", "/CN=kubernetes", "-keyout", "ca.key", "-out", "ca.crt")
    (folder / "names").write_text(f"subjectAltName=IP:{address},DNS:kubernetes.default.svc\n")
    for name in ("server", "admin"):
        request = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        _openssl(folder, "req", "-new", *_KEY, *request)
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")
    return folder


def trusting(ca: Path) -> ssl.SSLContext:
    """Return a client's settings that trust an authority as Go does: Python 3.13's default asks for more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context


def write_kubeconfig(path: Path, url: str, token: str, ca: Path | None = None) -> None:
    """Write a kubeconfig with one cluster, one user and one context."""
    authority = f"    certificate-authority: {ca}\n" if ca else ""
    path.write_text(
        "apiVersion: v1\nkind: Config\n"
        f"clusters:\n- name: lab\n  cluster:\n    server: {url}\n{authority}"
        f"users:\n- name: flannel\n  user:\n    token: {token}\n"
        "contexts:\n- name: lab\n  context:\n    cluster: lab\n    user: flannel\n"
        "current-context: lab\n"
    )


def write_service_account(
    folder: Path, token: str, ca: Path | None = None, namespace: str = "kube-flannel"
) -> None:
    """Write token, ca.crt and namespace as kubelet does: links into a directory that is replaced at once."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"token": token, "namespace": namespace} | ({"ca.crt": ca.read_text()} if ca else {})
    data = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    data.chmod(0o755)
    for name, text in content.items():
        (data / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..data_tmp").symlink_to(data.name)
    (folder / "..data_tmp").replace(folder / "..data")


def as_pod(folder: Path, command: Sequence[str]) -> list[str]:
    """Run a command so that it finds ``folder`` at /var/run/secrets/kubernetes.io/serviceaccount.

    It sees an empty /run otherwise, in the mount namespace that ``ip netns exec`` makes for it.
    """
    account = "/run/secrets/kubernetes.io/serviceaccount"
    mount = f'mount -t tmpfs tmpfs /run && mkdir -p {account} && mount --bind "$0" {account} && exec "$@"'
    return ["sh", "-c", mount, str(folder), *command]


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
