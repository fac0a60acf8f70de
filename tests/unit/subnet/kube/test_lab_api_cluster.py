"""What happens to the objects of the lab's API server: lists, watches, versions, rights and restarts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.credentials import make_certificates, write_kubeconfig, write_service_account
from tests.lab.kube_api.crowd import beat, crowd
from tests.lab.kube_api.faults import Fault
from tests.lab.wait import wait_for
from tests.local_kube import (
    FLANNEL_TOKEN,
    NOBODY,
    LocalKube,
    Reply,
    ask,
    connected,
    parse_reply,
    read_all,
    request_bytes,
    running_kube,
)

NODES = "/api/v1/nodes"
EVENTS = "/api/v1/namespaces/default/events"
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def kube() -> Iterator[LocalKube]:
    with running_kube() as kube:
        for number in range(1, 6):
            kube.control.put_node(f"n{number}", f"10.5.{number}.0/24", labels={"parity": str(number % 2)})
        yield kube


def names(reply: Reply) -> list[str]:
    return [item["metadata"]["name"] for item in reply.json()["items"]]


def patch(kube: LocalKube, name: str, change: dict[str, Any], sub: str = "/status", **options: Any) -> Reply:
    return ask(kube, "PATCH", f"{NODES}/{name}{sub}", json.dumps(change), STRATEGIC, **options)


def watched(kube: LocalKube, query: str = "") -> list[tuple[str, str]]:
    """Type and name of each event."""
    events = ask(kube, "GET", f"{NODES}?watch=true&timeoutSeconds=0.1{query}").events()
    return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]


# ---- lists -------------------------------------------------------------------------------------


def test_pages_show_the_cluster_as_it_was_at_the_first(kube: LocalKube) -> None:
    first = ask(kube, "GET", f"{NODES}?limit=2")
    kube.control.delete_node("n5")
    kube.control.put_node("n6")
    token = first.json()["metadata"]["continue"]
    second = ask(kube, "GET", f"{NODES}?limit=2&continue={token}")
    third = ask(kube, "GET", f"{NODES}?limit=2&continue={second.json()['metadata']['continue']}")
    assert [names(first), names(second), names(third)] == [["n1", "n2"], ["n3", "n4"], ["n5"]]
    assert [page.json()["metadata"].get("remainingItemCount") for page in (first, second, third)] == [
        3,
        1,
        None,
    ]
    assert len({page.json()["metadata"]["resourceVersion"] for page in (first, second, third)}) == 1
    assert "continue" not in third.json()["metadata"]


def test_pages_too_old_can_be_gone_on_with_as_things_are(kube: LocalKube) -> None:
    token = ask(kube, "GET", f"{NODES}?limit=2").json()["metadata"]["continue"]
    kube.control.delete_node("n3")
    kube.control.compact()
    gone = ask(kube, "GET", f"{NODES}?limit=2&continue={token}")
    assert (gone.status, gone.json()["reason"]) == (410, "Expired")
    rest = ask(kube, "GET", f"{NODES}?limit=2&continue={gone.json()['metadata']['continue']}")
    assert names(rest) == ["n4", "n5"]


def test_version_0_is_never_cut_into_pages(kube: LocalKube) -> None:
    assert len(names(ask(kube, "GET", f"{NODES}?limit=2&resourceVersion=0"))) == 5


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("fieldSelector=metadata.name%3Dn2", ["n2"]),
        ("fieldSelector=metadata.name!%3Dn2", ["n1", "n3", "n4", "n5"]),
        ("labelSelector=parity%3D0", ["n2", "n4"]),
        ("labelSelector=parity%3D0&fieldSelector=metadata.name%3Dn4", ["n4"]),
        ("labelSelector=nothing%3Dlike-it", []),
    ],
)
def test_selectors_select(kube: LocalKube, selector: str, selected: list[str]) -> None:
    assert names(ask(kube, "GET", f"{NODES}?{selector}")) == selected
    assert watched(kube, f"&{selector}") == [("ADDED", name) for name in selected]


def test_only_large_answers_are_compressed_and_only_on_request(kube: LocalKube) -> None:
    accept = {"Accept-Encoding": "gzip"}
    assert "Content-Encoding" not in ask(kube, "GET", NODES, headers=accept).headers
    kube.control.put_crowd(20, "10.6.0.0/16", "198.18.1.1")
    plain, packed = ask(kube, "GET", NODES), ask(kube, "GET", NODES, headers=accept)
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) * 4 < len(plain.body)


# ---- how it is written -------------------------------------------------------------------------


def test_2048_bytes_are_the_border_between_a_length_and_chunks(kube: LocalKube) -> None:
    small, large = ask(kube, "GET", f"{NODES}/n1"), ask(kube, "GET", NODES)
    assert len(small.body) <= 2048 < len(large.body)
    assert small.headers["Content-Length"] == str(len(small.body))
    assert large.headers["Transfer-Encoding"] == "chunked"
    assert [len(chunk) for chunk in large.chunks[:-1]] == [2048] * (len(large.chunks) - 1)


def test_one_connection_serves_many_requests_and_watches(kube: LocalKube) -> None:
    with connected(kube) as sock:
        for _ in range(3):
            sock.sendall(request_bytes("GET", f"{NODES}?watch=true&timeoutSeconds=0.05", keep=True))
            raw = b""
            while not raw.endswith(b"\r\n0\r\n\r\n"):
                raw += sock.recv(65536)
            assert len(parse_reply(raw).events()) == 5


# ---- watches -----------------------------------------------------------------------------------


def test_a_watch_begins_after_its_version(kube: LocalKube) -> None:
    before = kube.control.version()
    patch(kube, "n1", {"metadata": {"annotations": {"a": "1"}}})
    kube.control.delete_node("n2")
    kube.control.put_node("n7")
    assert watched(kube, f"&resourceVersion={before}") == [
        ("MODIFIED", "n1"),
        ("DELETED", "n2"),
        ("ADDED", "n7"),
    ]
    assert watched(kube, f"&resourceVersion={kube.control.version()}") == []


def test_a_watch_hears_of_what_enters_and_leaves_its_selection(kube: LocalKube) -> None:
    before = kube.control.version()
    patch(kube, "n1", {"metadata": {"labels": {"parity": "0"}}})
    patch(kube, "n2", {"metadata": {"labels": {"parity": "1"}}})
    query = f"&labelSelector=parity%3D0&resourceVersion={before}"
    assert watched(kube, query) == [("ADDED", "n1"), ("DELETED", "n2")]


def test_news_come_at_once(kube: LocalKube) -> None:
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", f"{NODES}?watch=true&resourceVersion={kube.control.version()}"))
        wait_for(kube.control.watches, what="the watch to begin")
        kube.control.annotate("n3", {"a": "1"})
        raw = b""
        while b'"MODIFIED"' not in raw or not raw.endswith(b"}\n\r\n"):
            raw += sock.recv(65536)
        assert len(parse_reply(raw).chunks) == 1


def test_bookmarks_tell_of_versions_that_others_used_up(kube: LocalKube) -> None:
    kube.control.set_bookmark_interval(0.05)
    version = kube.control.version()
    with connected(kube) as sock:
        query = f"watch=true&allowWatchBookmarks=true&resourceVersion={version}"
        sock.sendall(request_bytes("GET", f"{NODES}?{query}"))
        wait_for(kube.control.watches, what="the watch to begin")
        later = str(kube.control.jump(1000)).encode()
        raw = b""
        while b'"type":"BOOKMARK"' not in raw or later not in raw:
            raw += sock.recv(65536)


def test_a_watch_from_before_the_compaction_ends_with_an_error_event(kube: LocalKube) -> None:
    before = kube.control.version()
    now = kube.control.compact()
    reply = ask(kube, "GET", f"{NODES}?watch=true&resourceVersion={before}")
    (event,) = reply.events()
    assert (reply.status, event["type"], event["object"]["code"]) == (200, "ERROR", 410)
    assert event["object"]["message"] == f"too old resource version: {before} ({now})"
    assert watched(kube, f"&resourceVersion={now}") == []


def test_an_open_watch_survives_the_compaction(kube: LocalKube) -> None:
    with connected(kube) as sock:
        query = f"watch=true&resourceVersion={kube.control.version()}"
        sock.sendall(request_bytes("GET", f"{NODES}?{query}"))
        wait_for(kube.control.watches, what="the watch to begin")
        kube.control.compact()
        kube.control.annotate("n3", {"a": "1"})
        kube.control.disturb_watches(Fault(then="end"))
        assert [event["type"] for event in parse_reply(read_all(sock)).events()] == ["MODIFIED"]


# ---- writes ------------------------------------------------------------------------------------


def test_a_patch_that_changes_nothing_is_no_news(kube: LocalKube) -> None:
    change = {"metadata": {"annotations": {"a": "1"}}}
    first = patch(kube, "n1", change).json()["metadata"]["resourceVersion"]
    assert patch(kube, "n1", change).json()["metadata"]["resourceVersion"] == first
    assert watched(kube, f"&resourceVersion={first}") == []


def test_status_and_node_are_written_by_different_paths(kube: LocalKube) -> None:
    change = {
        "metadata": {"annotations": {"a": "1"}, "labels": {"l": "x"}},
        "spec": {"unschedulable": True},
        "status": {"phase": "Running"},
    }
    by_status = patch(kube, "n1", change).json()
    by_node = patch(kube, "n2", change, sub="").json()
    for node in (by_status, by_node):
        assert (node["metadata"]["annotations"]["a"], node["metadata"]["labels"]["l"]) == ("1", "x")
    assert ("unschedulable" in by_status["spec"], by_status["status"].get("phase")) == (False, "Running")
    assert ("unschedulable" in by_node["spec"], by_node["status"].get("phase")) == (True, None)


def test_times_are_whole_seconds_or_null(kube: LocalKube) -> None:
    condition = {"type": "A", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00.123456Z"}
    (kept,) = patch(kube, "n1", {"status": {"conditions": [condition]}}).json()["status"]["conditions"]
    assert (kept["lastHeartbeatTime"], kept["lastTransitionTime"]) == ("2026-01-01T00:00:00Z", None)


def test_a_node_can_be_replaced_only_in_its_latest_version(kube: LocalKube) -> None:
    node = ask(kube, "GET", f"{NODES}/n1").json()
    kube.control.annotate("n1", {"a": "1"})
    assert ask(kube, "PUT", f"{NODES}/n1", json.dumps(node), JSON).status == 409
    latest = ask(kube, "GET", f"{NODES}/n1").json()
    latest["metadata"]["annotations"] = {"b": "2"}
    assert ask(kube, "PUT", f"{NODES}/n1", json.dumps(latest), JSON).status == 200
    assert kube.control.annotations("n1") == {"b": "2"}


def test_a_finalizer_holds_a_node_that_is_deleted(kube: LocalKube) -> None:
    patch(kube, "n1", {"metadata": {"finalizers": ["test/hold"]}})
    before = kube.control.version()
    kube.control.delete_node("n1")
    assert "deletionTimestamp" in ask(kube, "GET", f"{NODES}/n1").json()["metadata"]
    patch(kube, "n1", {"metadata": {"$deleteFromPrimitiveList/finalizers": ["test/hold"]}})
    assert kube.control.node("n1") is None
    assert watched(kube, f"&resourceVersion={before}") == [("MODIFIED", "n1"), ("DELETED", "n1")]


def test_a_node_made_again_is_another(kube: LocalKube) -> None:
    uid = ask(kube, "GET", f"{NODES}/n1").json()["metadata"]["uid"]
    kube.control.put_node("n1", "10.5.1.0/24")
    assert ask(kube, "GET", f"{NODES}/n1").json()["metadata"]["uid"] == uid
    kube.control.delete_node("n1")
    kube.control.put_node("n1", "10.5.1.0/24")
    assert ask(kube, "GET", f"{NODES}/n1").json()["metadata"]["uid"] != uid


def test_a_test_may_set_pod_cidrs_as_no_controller_would(kube: LocalKube) -> None:
    kube.control.set_pod_cidrs("n1", "10.5.1.0/24", "fd00::/64", "nonsense")
    assert ask(kube, "GET", f"{NODES}/n1").json()["spec"]["podCIDRs"][2] == "nonsense"
    kube.control.set_pod_cidrs("n1")
    assert "podCIDR" not in ask(kube, "GET", f"{NODES}/n1").json()["spec"]


def test_events_about_nodes_belong_into_the_default_namespace(kube: LocalKube) -> None:
    event = {"metadata": {"generateName": "n1."}, "involvedObject": {"kind": "Node", "name": "n1"}}
    made = ask(kube, "POST", EVENTS, json.dumps(event), JSON)
    assert (made.status, made.json()["kind"]) == (201, "Event")
    assert [each["involvedObject"]["name"] for each in kube.control.events()] == ["n1"]
    elsewhere = EVENTS.replace("default", "kube-flannel")
    assert ask(kube, "POST", elsewhere, json.dumps(event), JSON).status == 422


def test_a_pod_tells_its_node(kube: LocalKube) -> None:
    kube.control.put_pod("kube-flannel", "kube-flannel-ds-x", "n1")
    pod = ask(
        kube, "GET", "/api/v1/namespaces/kube-flannel/pods/kube-flannel-ds-x", token=FLANNEL_TOKEN
    ).json()
    assert (pod["kind"], pod["spec"]["nodeName"]) == ("Pod", "n1")


# ---- who may do what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", NODES, 200),
        ("GET", f"{NODES}/n1", 200),
        ("GET", f"{NODES}?watch=1&timeoutSeconds=0.05", 200),
        ("PATCH", f"{NODES}/n1/status", 200),
        ("PATCH", f"{NODES}/n1", 403),
        ("DELETE", f"{NODES}/n1", 403),
        ("GET", "/api/v1/namespaces/a/pods/b", 404),
        ("GET", "/api/v1/namespaces/a/pods", 403),
        ("POST", EVENTS, 403),
        ("GET", "/version", 200),
        ("GET", "/readyz", 200),
        ("GET", "/api", 200),
        ("GET", "/nowhere", 403),
    ],
)
def test_flannels_role_is_upstreams(kube: LocalKube, method: str, target: str, status: int) -> None:
    reply = ask(kube, method, target, "{}" if method in ("PATCH", "POST") else "", STRATEGIC, FLANNEL_TOKEN)
    assert reply.status == status


def test_a_role_can_be_given_more(kube: LocalKube) -> None:
    kube.control.put_token("more", extra=[("create", "events")])
    assert ask(kube, "POST", EVENTS, "{}", JSON, token="more").status == 201


def test_the_refusal_tells_the_namespace(kube: LocalKube) -> None:
    reply = ask(kube, "GET", "/api/v1/namespaces/a/pods/b", token=NOBODY)
    assert reply.json()["message"] == (
        'pods "b" is forbidden: User "nobody" cannot get resource "pods" in API group "" in the namespace "a"'
    )


def test_tokens_expire_and_can_be_revoked_under_an_open_watch(kube: LocalKube) -> None:
    kube.control.put_token("short", seconds=0)
    assert ask(kube, "GET", NODES, token="short").status == 401
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", f"{NODES}?watch=true", token=FLANNEL_TOKEN))
        wait_for(kube.control.watches, what="the watch to begin")
        kube.control.revoke_token(FLANNEL_TOKEN)
        assert ask(kube, "GET", NODES, token=FLANNEL_TOKEN).status == 401
        kube.control.annotate("n1", {"a": "1"})
        kube.control.disturb_watches(Fault(then="end"))
        assert parse_reply(read_all(sock)).events()[-1]["type"] == "MODIFIED"


def test_requests_are_noted_without_their_tokens(kube: LocalKube) -> None:
    patch(kube, "n1", {"metadata": {"annotations": {"a": "1"}}}, token=FLANNEL_TOKEN)
    ask(kube, "GET", f"{NODES}?limit=1", token="wrong")
    patched, listed = kube.control.requests()
    assert (patched["verb"], patched["resource"], patched["name"]) == ("patch", "nodes/status", "n1")
    assert patched["user"] == "system:serviceaccount:kube-flannel:flannel"
    assert (listed["verb"], listed["query"], listed["status"]) == ("list", {"limit": "1"}, 401)
    assert kube.control.patches("n1") == [{"metadata": {"annotations": {"a": "1"}}}]
    assert kube.control.requests("list") == [listed]
    assert FLANNEL_TOKEN not in json.dumps([patched, listed])


# ---- TLS and credentials -----------------------------------------------------------------------


def test_tls_is_served_with_the_authoritys_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, "127.0.0.1")
    with running_kube(tls=tmp_path) as kube:
        assert kube.url.startswith("https://")
        assert ask(kube, "GET", NODES, ca=tmp_path / "ca.crt").status == 200
        with connected(kube) as plain:
            plain.sendall(request_bytes("GET", NODES))
            assert b"200" not in read_all(plain)[:20]


def test_a_service_account_is_rotated_as_a_whole(tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    authority.write_text("certificate")
    folder = tmp_path / "account"
    write_service_account(folder, "first", authority)
    before = (folder / "..data").readlink()
    write_service_account(folder, "second", authority)
    assert (folder / "token").read_text() == "second"
    assert (folder / "ca.crt").read_text() == "certificate"
    assert (folder / before / "token").read_text() == "first"


def test_a_kubeconfig_names_server_and_token(tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "config", "https://198.18.0.254:6443", "secret", Path("/ca.crt"))
    text = (tmp_path / "config").read_text()
    for part in ("server: https://198.18.0.254:6443", "token: secret", "certificate-authority: /ca.crt"):
        assert part in text


# ---- restarts ----------------------------------------------------------------------------------


def test_objects_tokens_and_versions_outlive_the_process_and_history_does_not(tmp_path: Path) -> None:
    with running_kube(journal=tmp_path / "journal") as kube:
        kube.control.put_token("kept")
        kube.control.put_node("n1", "10.5.1.0/24")
        kube.control.put_node("n2")
        kube.control.delete_node("n2")
        before = kube.control.version()
        uid = ask(kube, "GET", f"{NODES}/n1").json()["metadata"]["uid"]
    with running_kube(journal=tmp_path / "journal") as kube:
        assert kube.control.names() == ["n1"]
        node = ask(kube, "GET", f"{NODES}/n1", token="kept").json()
        assert (node["metadata"]["uid"], node["spec"]["podCIDR"]) == (uid, "10.5.1.0/24")
        assert kube.control.version() >= before
        stale = ask(kube, "GET", f"{NODES}?watch=true&resourceVersion={before - 1}")
        assert stale.events()[0]["object"]["code"] == 410


# ---- crowds ------------------------------------------------------------------------------------


def test_nodes_of_a_crowd_are_as_large_as_real_ones(kube: LocalKube) -> None:
    kube.control.put_crowd(50, "10.6.0.0/16", "198.18.1.1")
    (size,) = {len(ask(kube, "GET", f"{NODES}/crowd-{number}").body) // 1000 for number in (10, 50)}
    assert 16 <= size <= 18


def test_members_of_a_crowd_differ_and_are_the_same_each_time() -> None:
    first = crowd(300, "10.6.0.0/15", "198.18.1.1")
    assert first == crowd(300, "10.6.0.0/15", "198.18.1.1")
    for part in (
        [node["metadata"]["name"] for node in first],
        [node["metadata"]["annotations"]["flannel.alpha.coreos.com/backend-data"] for node in first],
        [node["spec"]["podCIDR"] for node in first],
    ):
        assert len(set(part)) == 300
    with pytest.raises(ValueError, match="larger network"):
        crowd(300, "10.6.0.0/16", "198.18.1.1")


def test_a_heartbeat_changes_nothing_that_matters() -> None:
    (node,) = crowd(1, "10.6.0.0/16", "198.18.1.1")
    beaten = beat(json.loads(json.dumps(node)))
    assert beaten != node
    assert beaten["spec"] == node["spec"]
    matters = ("backend-data", "backend-type", "public-ip", "kube-subnet-manager")
    for name in (f"flannel.alpha.coreos.com/{part}" for part in matters):
        assert beaten["metadata"]["annotations"][name] == node["metadata"]["annotations"][name]


def test_heartbeats_come_until_they_are_stopped(kube: LocalKube) -> None:
    before = kube.control.version()
    kube.control.start_heartbeats(1000)
    wait_for(lambda: kube.control.version() > before + 10, what="heartbeats")
    kube.control.stop_heartbeats()
    events = watched(kube, f"&resourceVersion={before}")
    assert [name for _, name in events[:5]] == ["n1", "n2", "n3", "n4", "n5"]
    assert {kind for kind, _ in events} == {"MODIFIED"}
