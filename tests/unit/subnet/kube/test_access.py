"""The way to the API server: flags, kubeconfig, service account; and how little is loaded for it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest

from flanneld.errors import Fatal, NoAnswer, Retryable
from flanneld.runtime.sockets.interruptible import InterruptibleSocket
from flanneld.subnet.kube.access import Access
from flanneld.subnet.kube.api import Api, ApiTimeouts
from tests.lab.credentials import make_certificates, write_kubeconfig
from tests.lab.kube_api.faults import Fault
from tests.local_kube import FLANNEL_TOKEN, running_kube

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_the_url_of_the_flag_outweighs_that_of_the_kubeconfig(tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "config", "http://192.0.2.1:6443", "secret", None)
    session = Access("http://192.0.2.2:6443/", str(tmp_path / "config"), {}).open(InterruptibleSocket())
    assert session.url == "http://192.0.2.2:6443"
    assert Access("", str(tmp_path / "config"), {}).open(InterruptibleSocket()).url == "http://192.0.2.1:6443"


def test_a_host_and_a_port_alone_mean_http_as_in_go() -> None:
    assert Access("192.0.2.1:8080", "", {}).open(InterruptibleSocket()).url == "http://192.0.2.1:8080"


@pytest.mark.parametrize("flag", ["", "192.0.2.2:6443", "ftp://192.0.2.2"])
def test_credentials_are_not_sent_where_the_url_does_not_say_how(tmp_path: Path, flag: str) -> None:
    write_kubeconfig(tmp_path / "config", "192.0.2.1:6443", "secret", None)
    with pytest.raises(Retryable, match="neither with https:// nor with http://; correct -kubeconfig-file"):
        Access(flag, str(tmp_path / "config"), {}).open(InterruptibleSocket())


@pytest.mark.parametrize("scheme", ["https://", "HTTPS://", ""])
def test_a_password_in_the_url_is_not_shown(scheme: str) -> None:
    assert Access(f"{scheme}me:se@cret@192.0.2.1:6443", "", {}).name == f"{scheme}192.0.2.1:6443"


def test_without_flags_the_pod_says_where_it_is() -> None:
    assert Access("", "", POD).name == "10.96.0.1 port 443"
    with pytest.raises(Fatal, match="KUBERNETES_SERVICE_HOST is not set; give -kubeconfig-file"):
        Access("", "", {})


@pytest.mark.parametrize("text", [None, "", "[]", "a: [", "\x00", "apiVersion: v1\nkind: Config\n"])
def test_a_kubeconfig_that_is_missing_or_wrong_is_waited_for(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Retryable, match="cannot read address and credentials of the API server"):
        Access("", str(file), {}).open(InterruptibleSocket())


def kubeconfig(path: Path, user: str, cluster: str = "server: https://192.0.2.1:6443") -> Path:
    """One with these entries of its user and its cluster, as YAML in one line."""
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        f"clusters: [{{name: l, cluster: {{{cluster}}}}}]\n"
        f"users: [{{name: f, user: {user}}}]\n"
        "contexts: [{name: c, context: {cluster: l, user: f}}]\n"
    )
    return path


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ("token", "server: https://192.0.2.1:6443"),
        ("[]", "server: 5"),
        ("{auth-provider: {name: gcp}}", "server: https://192.0.2.1:6443"),
        ("{token: x}", "server: 'https://192.0.2.1:6443', proxy-url: 5"),
    ],
)
def test_a_kubeconfig_of_a_shape_that_nobody_expects_is_waited_for(
    tmp_path: Path, user: str, cluster: str
) -> None:
    with pytest.raises(Retryable, match="cannot read address and credentials of the API server"):
        Access("", str(kubeconfig(tmp_path / "config", user, cluster)), {}).open(InterruptibleSocket())


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ("{token: null, client-key-data: s3cr3t}", "server: https://192.0.2.1:6443"),
        ("{token: s3cr3t: x}", "server: https://192.0.2.1:6443"),
        ("{token: x}", "server: 'https://192.0.2.1:6443', proxy-url: 'http://me:s3cr3t@['"),
    ],
)
def test_kubeconfig_errors_show_no_secret(tmp_path: Path, user: str, cluster: str) -> None:
    with pytest.raises(Retryable) as failure:
        Access("", str(kubeconfig(tmp_path / "config", user, cluster)), {}).open(InterruptibleSocket())
    assert "s3cr3t" not in str(failure.value)


def test_a_failure_that_the_package_only_logs_is_told_once_and_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access("", str(kubeconfig(tmp_path / "config", "{exec: null, password: s3cr3t}")), {})
    for _ in range(2):
        access.open(InterruptibleSocket()).close()
    assert caplog.text.count("Expected key exec") == 1
    assert "s3cr3t" not in caplog.text


def test_a_service_account_that_is_not_mounted_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Retryable, match="mount the service account"):
        Access("", "", POD).open(InterruptibleSocket())


def test_a_server_that_another_authority_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
        make_certificates(folder, "127.0.0.1")
    with running_kube(tls=ours) as kube:
        for folder in (ours, others):
            write_kubeconfig(folder / "config", kube.url, FLANNEL_TOKEN, folder / "ca.crt")
        assert "items" in Api(Access("", str(ours / "config"), {}), ApiTimeouts()).get("/api/v1/nodes")
        with pytest.raises(NoAnswer, match="certificate verify failed: "):
            Api(Access("", str(others / "config"), {}), ApiTimeouts()).get("/api/v1/nodes")


def test_keys_out_of_a_kubeconfig_do_not_stay_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_certificates(tmp_path, "127.0.0.1")
    config = kubeconfig_with_data(tmp_path, "https://127.0.0.1:1")
    before = set(tmp_path.iterdir())
    access = Access("", str(config), {})
    access.open(InterruptibleSocket())
    assert len(set(tmp_path.iterdir()) - before) == 1
    access.clean_up()
    assert set(tmp_path.iterdir()) == before


def test_such_a_file_that_did_not_fit_on_the_disk_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_certificates(tmp_path, "127.0.0.1")
    access = Access("", str(kubeconfig_with_data(tmp_path, "https://127.0.0.1:1")), {})
    before = set(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(Retryable):
            access.open(InterruptibleSocket())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    access.open(InterruptibleSocket())
    (file,) = set(tmp_path.iterdir()) - before
    assert file.read_bytes() == (tmp_path / "ca.crt").read_bytes()
    access.clean_up()


def test_a_daemon_that_fails_leaves_no_such_file_and_came_again_when_told_to(tmp_path: Path) -> None:
    make_certificates(tmp_path, "127.0.0.1")
    net_config, files = tmp_path / "net-conf.json", tmp_path / "files"
    net_config.write_text('{"Network":"10.5.0.0/16"}')
    files.mkdir()
    with running_kube(tls=tmp_path) as kube:
        kube.control.add_fault(Fault("list", status=429, retry_after=2))
        kube.control.put_node("n1", "10.5.1.0/24")
        config = kubeconfig_with_data(tmp_path, kube.url)
        daemon = [sys.executable, "-m", "flanneld", "--kube-subnet-mgr", f"--kubeconfig-file={config}"]
        flags = [f"--net-config-path={net_config}", f"--subnet-file={tmp_path}/env", "--iface=no-such"]
        flags += [f"--state-dir={tmp_path}"]
        environ = {**os.environ, "NODE_NAME": "n1", "TMPDIR": str(files)}
        done = subprocess.run([*daemon, *flags], env=environ, capture_output=True, text=True, check=False)
        refused, answered = kube.control.requests("list")
    assert answered["time"] - refused["time"] >= 2
    assert (done.returncode, "no-such" in done.stderr) == (1, True)
    assert list(files.iterdir()) == []


def kubeconfig_with_data(folder: Path, url: str) -> Path:
    """A kubeconfig with the authority's certificate in it instead of its place."""
    config, authority = folder / "config", folder / "ca.crt"
    write_kubeconfig(config, url, FLANNEL_TOKEN, authority)
    data = b64encode(authority.read_bytes()).decode()
    place = f"certificate-authority: {authority}"
    text = config.read_text()
    assert place in text
    config.write_text(text.replace(place, f"certificate-authority-data: {data}"))
    return config


@pytest.mark.parametrize("name", ["token", '"the token"', "'the token'"])
def test_file_with_credentials_is_watched_however_its_name_is_quoted(tmp_path: Path, name: str) -> None:
    config, own = tmp_path / "kubeconfig", tmp_path / name.strip("\"'")
    config.write_text(f"users:\n- user:\n    tokenFile: {name}\n")
    access = Access("", str(config), {})
    before = access.files()
    own.write_text("new")
    assert access.files() != before
