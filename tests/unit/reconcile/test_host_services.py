"""What a backend may ask of its host, for a daemon and for a dry run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flanneld.errors import Retryable
from flanneld.reconcile.local_node import services_of_daemon, services_of_dry_run
from flanneld.runtime.sockets.http_client import HttpRequest


class Echo(BaseHTTPRequestHandler):
    """Answers with the method."""

    def _serve(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.command.encode())

    do_GET = do_POST = _serve  # noqa: N815

    def log_message(self, *_message: object) -> None:
        """Keep the tests' output clean."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_daemon_keeps_keys_runs_commands_and_makes_requests(tmp_path: Path, url: str) -> None:
    services = services_of_daemon(str(tmp_path), {}, threading.Event())
    assert services.secret("wgkey", lambda: b"key") == b"key"
    assert (tmp_path / "wgkey").read_bytes() == b"key"
    assert services.run(("cat",), None, "input").output == "input"
    assert services.http(HttpRequest("POST", url)).body == b"POST"


def test_a_variable_names_another_key_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "key"
    environ = {"WIREGUARD_KEY_FILE": str(elsewhere)}
    services = services_of_daemon(str(tmp_path), environ, threading.Event())
    services.secret("wgkey", lambda: b"key", variable="WIREGUARD_KEY_FILE")
    assert elsewhere.read_bytes() == b"key"
    assert not (tmp_path / "wgkey").exists()


def test_a_dry_run_changes_nothing(tmp_path: Path, url: str) -> None:
    services = services_of_dry_run(str(tmp_path), {})
    assert services.secret("wgkey", lambda: b"key") == b"key"
    with pytest.raises(Retryable, match="a dry run starts no command; "):
        services.run(f"touch {tmp_path}/made")
    with pytest.raises(Retryable, match="a dry run makes no POST request; "):
        services.http(HttpRequest("POST", url))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_reads(tmp_path: Path, url: str) -> None:
    services_of_daemon(str(tmp_path), {}, threading.Event()).secret("wgkey", lambda: b"key")
    services = services_of_dry_run(str(tmp_path), {})
    assert services.secret("wgkey", lambda: b"another") == b"key"
    assert services.http(HttpRequest("GET", url)).body == b"GET"
