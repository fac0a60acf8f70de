"""The way to etcd: several endpoints, TLS, a login, and whoever else answers there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Etcd, Impostor, Lab, Node, wait_for
from tests.lab.etcd import PORT
from tests.lab.impostor import http
from tests.local_etcd import make_certificates
from tests.netns.apis import both_apis
from tests.netns.gateway import gateway, used_ports

CONFIG = {"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}
TLS_PORT = 2381


def check_news_arrives(etcd: Etcd, node: Node, number: int = 200, deadline: float = 5) -> None:
    """A lease that is written now leads to a route."""
    etcd.put_lease(f"10.5.{number}.0/24", {"PublicIP": f"198.18.0.{number}", "BackendType": "host-gw"})
    node.wait_for_route(f"10.5.{number}.0/24", deadline)


def complaints(node: Node) -> list[str]:
    return [line for line in node.log().splitlines() if not line.startswith("I")]


# ---- several endpoints -------------------------------------------------------------------------


@both_apis
def test_the_death_of_an_endpoint_is_got_over(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    (node,) = lab.add_nodes()
    with gateway(lab, 2391) as first, gateway(lab, 2392) as second:
        # Nobody listens on the last one.
        node.start(
            "-etcd-endpoints=" + ",".join(f"http://{lab.etcd.address}:{p}" for p in (2391, 2392, 2393))
        )
        node.wait_ready()
        check_news_arrives(lab.etcd, node)
        wait_for(lambda: len(used_ports(node)) == 1, what="one endpoint in use")
        (port,) = used_ports(node)
        used, other = (first, 2392) if port == 2391 else (second, 2391)
        used.kill()
        check_news_arrives(lab.etcd, node, 201)
        wait_for(lambda: used_ports(node) == {other}, what=f"connections to port {other}")
        attributes = lab.etcd.leases()[node.subnet()]
        lab.etcd.put_lease(node.subnet(), attributes, ttl=60)
        wait_for(lambda: (lab.etcd.lease(node.subnet()) or {})["ttl"] > 80000, what="a renewal")


def test_an_endpoint_out_of_reach_delays_the_start_by_seconds_only(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    nodes = lab.add_nodes(3)
    # The order is left to chance, so with three nodes it is as good as sure that one asks the dead one first.
    for node in nodes:
        node.start(f"-etcd-endpoints=http://198.18.0.199:{PORT},{lab.etcd.endpoint}")
    for node in nodes:
        node.wait_ready(8)
    check_news_arrives(lab.etcd, nodes[0])


# ---- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def tls_node(lab: Lab, api: str) -> Iterator[tuple[Node, Etcd, Path]]:
    """A node with an etcd of its own that wants certificates, except of the test, and their folder."""
    (node,) = lab.add_nodes()
    folder = node.directory / "tls"
    folder.mkdir()
    make_certificates(folder)
    etcd = Etcd(node.namespace, "127.0.0.1", node.directory, api)
    etcd.start(
        f"--listen-client-urls=http://127.0.0.1:{PORT},https://127.0.0.1:{TLS_PORT}",
        "--client-cert-auth",
        f"--trusted-ca-file={folder / 'ca.crt'}",
        f"--cert-file={folder / 'server.crt'}",
        f"--key-file={folder / 'server.key'}",
    )
    etcd.put_config(CONFIG)
    yield node, etcd, folder
    etcd.kill()


def flags(folder: Path, authority: str, identity: str) -> list[str]:
    given = [f"-etcd-endpoints=https://127.0.0.1:{TLS_PORT}", f"-etcd-cafile={folder / authority}.crt"]
    if identity:
        given += [f"-etcd-certfile={folder / identity}.crt", f"-etcd-keyfile={folder / identity}.key"]
    return given


@both_apis
def test_tls_with_certificates_on_both_sides_carries_everything(tls_node: tuple[Node, Etcd, Path]) -> None:
    node, etcd, folder = tls_node
    node.start(*flags(folder, "ca", "client"))
    node.wait_ready()
    check_news_arrives(etcd, node)
    assert complaints(node) == []
    assert node.stop().status == 0


@pytest.mark.parametrize(
    ("api", "authority", "identity"),
    [("v2", "ca", ""), ("v2", "ca", "other"), ("v2", "other", "client"), ("v3", "other", "client")],
)
def test_a_certificate_that_is_not_accepted_is_complained_about_once(
    tls_node: tuple[Node, Etcd, Path], authority: str, identity: str
) -> None:
    node, etcd, folder = tls_node
    node.start(*flags(folder, authority, identity))
    wait_for(lambda: etcd.log().count("rejected connection") >= 3, what="three tries")
    (complaint,) = complaints(node)
    assert "-etcd-cafile" in complaint or "-etcd-certfile" in complaint
    assert not node.env()
    assert node.stop().status == 0


# ---- a login -----------------------------------------------------------------------------------


@both_apis
def test_a_login_with_no_more_rights_than_needed_carries_everything(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    lab.etcd.require_login("flannel", "secret")
    (node,) = lab.add_nodes()
    node.start("-etcd-username=flannel", "-etcd-password=secret")
    node.wait_ready()
    check_news_arrives(lab.etcd, node)
    lab.etcd.put_lease(node.subnet(), lab.etcd.leases()[node.subnet()], ttl=60)
    wait_for(lambda: (lab.etcd.lease(node.subnet()) or {})["ttl"] > 80000, what="a renewal")
    assert complaints(node) == []


@both_apis
def test_a_login_that_is_put_right_in_etcd_is_taken(lab: Lab) -> None:
    lab.etcd.put_config(CONFIG)
    lab.etcd.require_login("flannel", "another")
    (node,) = lab.add_nodes()
    node.start("-etcd-username=flannel", "-etcd-password=secret")
    (complaint,) = node.wait_for_log("-etcd-password")
    lab.etcd.change_password("flannel", "secret")
    node.wait_ready(10)
    assert complaints(node) == [complaint]


# ---- whoever else answers ----------------------------------------------------------------------


def wait_for_two_requests(impostor: Impostor) -> None:
    wait_for(lambda: impostor.asked >= 2, 10, "two requests")


HTML = "Content-Type: text/html"
ANSWERS = {
    "an error": http("500 Internal Server Error", "oh no", HTML),
    "a web page": http("200 OK", "<html>Welcome!</html>", HTML),
    "JSON that is not etcd's": http(
        "200 OK", '{"kind":"Status","code":200}', "Content-Type: application/json"
    ),
    "not found": http("404 Not Found", "404 page not found", "Content-Type: text/plain"),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_server_that_is_not_etcd_is_reported_once(lab: Lab, answer: str) -> None:
    lab.etcd.put_config(CONFIG)
    lab.etcd.stop()
    (node,) = lab.add_nodes()
    with Impostor(lab.switch, lab.etcd.address, ANSWERS[answer]) as impostor:
        node.start()
        wait_for_two_requests(impostor)
        (complaint,) = node.wait_for_log("Couldn't fetch network config")
        assert lab.etcd.address in complaint
    lab.etcd.start()
    node.wait_ready(10)
    # Between the two nobody listened, which is news.
    assert len(complaints(node)) <= 2
    assert complaints(node)[0] == complaint


@both_apis
def test_no_answer_of_an_impostor_costs_a_peer(lab: Lab) -> None:
    first, second = lab.cluster({"Type": "host-gw"})
    first.container().wait_for_reply(second.container())
    with first.container().ping(second.container()) as ping:
        lab.etcd.stop()
        for answer in ANSWERS.values():
            with Impostor(lab.switch, lab.etcd.address, answer) as impostor:
                wait_for_two_requests(impostor)
        lab.etcd.start()
        check_news_arrives(lab.etcd, first)
        assert ping.lost() == 0
    assert first.running
    assert second.running
