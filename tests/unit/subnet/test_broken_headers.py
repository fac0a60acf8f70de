"""A server whose headers are broken: what it says is read, and no library's traceback is in the log."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flanneld.compat import glog
from flanneld.errors import Retryable
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions

BODY = (
    b'{"action":"get","node":{"key":"/coreos.com/network/config",'
    b'"value":"{\\"Network\\":\\"10.5.0.0/16\\"}","modifiedIndex":3,"createdIndex":3}}'
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Etcd-Index: 3\r\n"
    b"Content-Length: %d\r\nthis is no header\r\n broken: yes\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                client.sendall(ANSWER)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(20)


def test_a_broken_header_leaves_no_traceback_in_the_log(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    glog.setup()
    manager = open_etcd(EtcdOptions(endpoints=(endpoint,), prefix="/coreos.com/network"), "v2")
    with suppress(Retryable):  # what comes of it is not the point
        manager.network_config()
    manager.close()
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert "urllib3" not in said
