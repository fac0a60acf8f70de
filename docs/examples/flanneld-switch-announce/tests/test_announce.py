"""The backend and its table, in the reconciler, against a switch that speaks HTTP."""

from __future__ import annotations

import json
import socket
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from flanneld_switch_announce.backend import LONGEST_TIMEOUT, HostGwAnnounce
from flanneld_switch_announce.switch import Announcement

from flanneld.backends import registry
from flanneld.backends.contract import ExitPolicy, Host, exit_policy
from flanneld.config import parse
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs, Uplink
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.runtime import clock
from flanneld.runtime.sockets.http_client import HttpClient
from flanneld.state.permits import Knowledge, Permits
from flanneld.state.resources import Route

PROJECT = Path(__file__).resolve().parents[1]
OURS, OURS6 = IPv4Address("192.0.2.11"), IPv6Address("2001:db8::11")
UPLINK = Uplink("eth0", 2, 1500, OURS, OURS, OURS6, OURS6)
SUBNET, IPV6_SUBNET = IPv4Network("10.5.7.0/24"), IPv6Network("fd00:5:0:7::/64")
OUR_ROUTE = {"10.5.7.0/24": {"nextHop": "192.0.2.11"}}
THEIR_ROUTE = {"10.5.8.0/24": {"nextHop": "192.0.2.12"}}


class Switch:
    """A switch on a port of this host. ``routes`` is its table, ``writes`` are the requests to change it."""

    def __init__(self, port: int = 0) -> None:
        self.routes: dict[str, Any] = {}
        self.writes: list[str] = []
        #: By method, what to answer instead: a status, and a body.
        self.faults: dict[str, tuple[int, str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        if method != "GET":
            self.writes.append(f"{method} {path}")
        if method in self.faults:
            return self.faults[method]
        subnet = path.removeprefix("/routes/")
        if method == "GET" and path == "/routes":
            return 200, json.dumps(self.routes)
        if method == "PUT" and subnet != path:
            self.routes[subnet] = json.loads(body)
            return 201, ""
        known = self.routes.pop(subnet, None) if method == "DELETE" else None
        return (404, "") if known is None else (204, "")


def _handler(switch: Switch) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, text = switch.answer(self.command, self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_DELETE = _serve  # noqa: N815

        def log_message(self, *_message: object) -> None:
            """Keep the tests' output clean."""

    return Handler


@pytest.fixture
def switch() -> Iterator[Switch]:
    switch = Switch()
    yield switch
    switch.stop()


class Node:
    """The reconciler over the tables of a backend, without a kernel."""

    def __init__(self, url: str, subnet: IPv4Network = SUBNET, **options: Any) -> None:
        # On a busy machine the default is over before the switch has its turn.
        patient: dict[str, Any] = {"SwitchURL": url, "TimeoutSeconds": LONGEST_TIMEOUT}
        self.backend = make(**patient | options)
        own = Lease(self.backend.attributes(), subnet, IPV6_SUBNET)
        announced = [each for each in self.backend.local(own) if isinstance(each, Announcement)]
        self.sweeps = True
        self.reconciler = Reconciler(
            self.backend.tables(),
            desired_by_table(announced),
            lambda: False,
            permits=Permits(lambda: Knowledge(synced=self.sweeps)),
        )

    def audit(self, *, sweep: bool = True) -> tuple[list[str], list[str], list[str]]:
        """Return the made, removed and refused objects."""
        self.sweeps = sweep
        report = self.reconciler.converge(clock.now())
        (state,) = self.reconciler.states()
        refused = [*filter(None, [state.problem]), *map(str, report.failed)]
        return [*map(str, report.made)], [*map(str, report.removed)], refused

    def close(self) -> None:
        is_removed = exit_policy(self.backend) is ExitPolicy.REMOVE
        self.reconciler.close(remove=["switch"] if is_removed else ())


def make(*, dual_stack: bool = False, **options: Any) -> HostGwAnnounce:
    config = {
        "Network": "10.5.0.0/16",
        "EnableIPv6": dual_stack,
        "IPv6Network": "fd00:5::/48",
        "Backend": {"Type": "host-gw-announce", **options},
    }
    host = Host(UPLINK, None, lambda _: None, lambda _: None, bytes, http=HttpClient(threading.Event()).ask)
    return HostGwAnnounce(parse(json.dumps(config)), host)


def test_the_subnet_is_announced_with_the_public_ip_as_next_hop(switch: Switch) -> None:
    assert Node(switch.url).audit(sweep=False) == (["switch route 10.5.7.0/24 via 192.0.2.11"], [], [])
    assert switch.routes == OUR_ROUTE


def test_both_families_are_announced(switch: Switch) -> None:
    Node(switch.url, dual_stack=True).audit()
    assert switch.routes == OUR_ROUTE | {"fd00:5:0:7::/64": {"nextHop": "2001:db8::11"}}


def test_present_announcement_is_not_repeated(switch: Switch) -> None:
    node = Node(switch.url)
    node.audit()
    assert node.audit() == ([], [], [])
    assert switch.writes == ["PUT /routes/10.5.7.0/24"]


@pytest.mark.parametrize(
    "left",
    [
        {},
        {"10.5.7.0/24": {"nextHop": "192.0.2.99"}},
        {"10.5.7.0/24": {"nextHop": "nobody"}},
        {"10.5.7.0/24": "192.0.2.11"},
        {"10.5.7.0/24": {"nextHop": int(OURS)}},
        {"": None},
    ],
)
def test_a_lost_or_spoilt_announcement_is_made_again(switch: Switch, left: dict[str, Any]) -> None:
    node = Node(switch.url)
    node.audit()
    switch.routes = left
    made, _, failed = node.audit()
    assert (len(made), failed) == (1, [])
    assert switch.routes == left | OUR_ROUTE


def test_stale_announcement_is_removed_at_the_first_sweep(switch: Switch) -> None:
    Node(switch.url, subnet=IPv4Network("10.5.6.0/24")).audit()
    node = Node(switch.url)
    assert node.audit(sweep=False)[1] == []
    assert node.audit()[1] == ["switch route 10.5.6.0/24 via 192.0.2.11"]
    assert switch.routes == OUR_ROUTE


def test_closing_withdraws_our_announcement_and_no_other(switch: Switch) -> None:
    switch.routes = dict(THEIR_ROUTE)
    node = Node(switch.url)
    node.audit()
    assert switch.routes == THEIR_ROUTE | OUR_ROUTE
    node.close()
    assert switch.routes == THEIR_ROUTE


def test_a_switch_that_is_down_is_reported_and_tried_again(switch: Switch) -> None:
    node = Node(switch.url)
    switch.stop()
    made, removed, failed = node.audit()
    assert (made, removed) == ([], [])
    assert failed == [f"{switch.url} does not answer: connection refused; see whether it is up and reachable"]
    again = Switch(switch.port)
    try:
        assert node.audit()[0] == ["switch route 10.5.7.0/24 via 192.0.2.11"]
        assert again.routes == OUR_ROUTE
    finally:
        again.stop()


@pytest.mark.parametrize(
    "fault", [(500, "{}"), (404, "{}"), (200, "[]"), (200, "<html>"), (200, "[" * 100_000)]
)
def test_an_answer_that_makes_no_sense_is_a_failure_and_no_empty_table(
    switch: Switch, fault: tuple[int, str]
) -> None:
    node = Node(switch.url)
    node.audit()
    switch.faults["GET"] = fault
    made, removed, failed = node.audit()
    assert (made, removed, len(failed)) == ([], [], 1)
    assert switch.writes == ["PUT /routes/10.5.7.0/24"]


@pytest.mark.parametrize("status", [404, 507])
def test_a_refused_announcement_is_reported_and_made_later(switch: Switch, status: int) -> None:
    node = Node(switch.url)
    switch.faults["PUT"] = (status, "")
    assert len(node.audit()[2]) == 1
    switch.faults.clear()
    assert len(node.audit()[0]) == 1
    assert switch.routes == OUR_ROUTE


def test_an_announcement_that_others_removed_is_withdrawn_without_complaint(
    switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(switch.url)
    node.audit()
    switch.faults["DELETE"] = (404, "")
    node.close()
    assert switch.writes[-1] == "DELETE /routes/10.5.7.0/24"
    assert caplog.text == ""


def test_a_switch_that_never_answers_costs_no_more_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = Node(f"http://127.0.0.1:{silent.getsockname()[1]}", TimeoutSeconds=0.1)
        assert "no whole answer within 0.1 s" in node.audit()[2][0]


def test_a_port_where_nobody_speaks_http_is_reported() -> None:
    def babble(server: socket.socket) -> None:
        caller, _ = server.accept()
        with caller:
            caller.recv(4096)
            caller.sendall(b"What do you want?\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        thread = threading.Thread(target=babble, args=(server,))
        thread.start()
        failed = Node(f"http://127.0.0.1:{server.getsockname()[1]}").audit()[2]
        thread.join()
    assert "does not answer: it does not speak HTTP" in failed[0]


def test_a_name_that_cannot_be_one_is_reported() -> None:
    assert "its name cannot be resolved" in Node("http://switch..example").audit()[2][0]


def test_a_closing_daemon_is_not_stopped_by_a_switch_that_is_down(
    switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(switch.url)
    switch.stop()
    node.close()
    assert f"Cannot close switch: {switch.url} does not answer" in caplog.text


@pytest.mark.parametrize(
    "url",
    ["", "switch", "192.0.2.1:8080", "ftp://switch", "https://switch", "http://", "http://switch:99999",
     "http://[::1", "http://user:secret@switch", "http://switch?a=b", 8080],
)  # fmt: skip
def test_a_bad_url_is_fatal_and_the_remedy_shows_a_good_one(url: object) -> None:
    with pytest.raises(Fatal, match=r"^Backend.SwitchURL .*; set it to .*http://192.0.2.1:8080$") as refusal:
        make(SwitchURL=url)
    assert "secret" not in str(refusal.value)


def test_a_missing_url_is_fatal() -> None:
    with pytest.raises(Fatal, match="SwitchURL"):
        make()


@pytest.mark.parametrize("seconds", [0, -1, 2.5, "1", True, []])
def test_a_timeout_out_of_bounds_is_fatal(seconds: object) -> None:
    with pytest.raises(Fatal, match=r"TimeoutSeconds .*; set it to a number above 0, up to 2$"):
        make(SwitchURL="http://192.0.2.1", TimeoutSeconds=seconds)


def test_nodes_with_and_without_announcements_are_one_network() -> None:
    backend = make(SwitchURL="http://192.0.2.1")
    own = Lease(backend.attributes(), SUBNET)
    assert own.attrs.backend_type == "host-gw"
    subnet, public_ip = IPv4Network("10.5.8.0/24"), IPv4Address("192.0.2.12")
    peer = Lease(LeaseAttrs(public_ip, None, "host-gw"), subnet)
    assert list(backend.peer(own, peer)) == [Route(subnet, "eth0", public_ip)]


def test_an_announcement_and_a_kernel_route_to_one_subnet_do_not_clash() -> None:
    assert Announcement(SUBNET, OURS).key != Route(SUBNET, "eth0", OURS).key


def test_an_installed_package_offers_the_backend_to_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"flanneld_switch_announce-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{each} = {where}" for each, where in project["entry-points"][registry.GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.load("Host-GW-Announce") is HostGwAnnounce
