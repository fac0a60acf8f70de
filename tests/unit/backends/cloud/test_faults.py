"""Refusals and failures of a cloud: named with a remedy, asked less often, and over by themselves."""

from __future__ import annotations

import json
import threading
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from flanneld.backends.cloud.contract import CloudTableEntry, ErrorKind
from flanneld.backends.cloud.record import Record, Recorded, routes_in
from tests.unit.backends.cloud.bench import SUBNET, THEIRS, Bench

if TYPE_CHECKING:  # moto takes two seconds to load
    from tests.lab.clouds.aws import AwsService

#: The right that each cloud wants for making a route, by its own name.
RIGHTS = {
    "aws-vpc": "ec2:CreateRoute",
    "gce": "compute.routes.create",
    "ali-vpc": "vpc:CreateRouteEntry",
    "tencent-vpc": "vpc:CreateRoutes",
}


def test_a_missing_right_is_named_by_the_clouds_own_word(cloud: Bench) -> None:
    cloud.cloud.deny("create")
    node = cloud.node()
    assert node.audit() == ([], [])
    complaint = node.complaint()
    assert f"denies {RIGHTS[cloud.cloud.kind]}" in complaint
    assert f"allow {RIGHTS[cloud.cloud.kind]}" in complaint
    cloud.cloud.heal()
    cloud.wait()
    assert len(node.audit()[0]) == 1


def test_a_refused_change_is_not_tried_again_at_once(cloud: Bench) -> None:
    cloud.cloud.fail("create", ErrorKind.DENIED, times=100)
    node = cloud.node()
    for _ in range(5):
        node.audit()
    assert cloud.cloud.made("create") == 1
    assert "denies" in node.complaint()


def test_a_full_table_is_told_with_its_quota(cloud: Bench) -> None:
    cloud.cloud.limit = 0
    node = cloud.node()
    assert node.audit() == ([], [])
    assert "is full" in node.complaint()
    assert "raise" in node.complaint()
    cloud.cloud.limit = 50
    cloud.wait()
    assert len(node.audit()[0]) == 1


def test_a_throttled_reading_is_repeated_ever_more_rarely(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.fail("list", ErrorKind.THROTTLED, times=1000)
    cloud.wait()
    for _ in range(5):
        node.audit()
    asked = cloud.cloud.made("list")
    assert "throttles" in node.complaint()
    node.audit()
    assert cloud.cloud.made("list") == asked, "it is asked again only after a pause"
    cloud.cloud.heal()
    cloud.wait()
    assert node.audit() == ([], [])
    assert node.state().settled


def test_nothing_is_removed_or_made_while_the_api_is_down(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.is_down = True
    cloud.wait()
    assert node.audit() == ([], [])
    assert "does not answer" in node.complaint()
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    cloud.cloud.is_down = False
    cloud.wait()
    assert node.audit() == ([], [])
    assert node.state().settled


def test_revoked_credentials_are_told_and_new_ones_taken(
    cloud: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.revoke()
    cloud.wait()
    if cloud.cloud.kind == "gce":
        # A service account's token is asked for anew: that heals itself.
        assert node.audit() == ([], [])
        return
    node.audit()
    assert "does not accept the credentials" in node.complaint()
    assert "lab-secret" not in node.complaint()
    if cloud.cloud.kind == "aws-vpc":
        key = cloud.cloud.key  # type: ignore[attr-defined]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key[1])
        cloud.wait()
        node.audit()
        assert node.state().settled


def test_an_answer_of_another_shape_is_a_failure_and_no_empty_table(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.garbage[cloud.cloud.actions["list"]] = b'{"Response": {"nothing": []}, "items": [{}]}'
    cloud.wait()
    assert node.audit() == ([], [])
    assert node.complaint() != ""
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    cloud.cloud.heal()
    cloud.wait()
    assert node.audit() == ([], [])


def test_an_answer_that_comes_too_late_counts_for_nothing(cloud: Bench) -> None:
    node = cloud.node()
    node.audit()
    cloud.cloud.late[cloud.cloud.actions["list"]] = 3.0
    cloud.wait()
    audited = threading.Event()

    def let_time_pass() -> None:
        while not audited.wait(0.1):
            cloud.wait(30.0)

    passing = threading.Thread(target=let_time_pass)
    passing.start()
    try:
        assert node.audit() == ([], [])
    finally:
        audited.set()
        passing.join()
    assert "does not answer" in node.complaint()
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}
    cloud.cloud.heal()
    cloud.wait()
    assert node.audit() == ([], [])
    assert node.state().settled


@pytest.mark.parametrize("kind", ["aws-vpc"])
def test_a_web_identity_is_exchanged_for_keys(cloud: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.lab.clouds.aws import ROLE_ARN, WEB_IDENTITY

    token = cloud.room / "token"
    token.write_text("stolen")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE_ARN)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", cloud.url)
    node = cloud.node()
    assert node.audit() == ([], [])
    assert "credentials" in node.complaint()
    assert "stolen" not in node.complaint()
    token.write_text(WEB_IDENTITY)
    cloud.wait()
    assert len(node.audit()[0]) == 1


@pytest.mark.parametrize("kind", ["aws-vpc", "ali-vpc", "tencent-vpc"])
def test_a_table_that_does_not_exist_is_told_with_the_option(cloud: Bench) -> None:
    node = cloud.node(RouteTableID="rtb-00000000000000000")
    assert node.audit() == ([], [])
    assert "knows no such route table" in node.complaint()
    assert "RouteTableID" in node.complaint()


@pytest.mark.parametrize("kind", ["gce", "ali-vpc"])
def test_an_operation_that_never_ends_is_told(cloud: Bench) -> None:
    cloud.cloud.never_ends = True  # type: ignore[attr-defined]
    node = cloud.node()
    node.audit()
    cloud.wait()
    node.audit()
    cloud.wait()
    node.audit()
    assert "has not " in node.complaint()
    assert "within" in node.complaint()


def test_a_clean_up_removes_our_route_and_no_other(cloud: Bench) -> None:
    cloud.cloud.set_route("10.5.8.0/24", cloud.their_hop)
    cloud.node().audit()
    record = Record(cloud.room / "flanneld.cloud")
    done = {what: act() for what, act in routes_in(record)}
    assert all(done.values())
    assert [what.split()[2] for what in done if what.startswith("cloud route")] == [SUBNET]
    assert cloud.cloud.routes() == {"10.5.8.0/24": cloud.their_hop}
    assert not record.path.exists()


@pytest.mark.parametrize("kind", ["ali-vpc", "tencent-vpc"])
def test_the_record_has_the_options_and_no_access_key(cloud: Bench) -> None:
    key, secret = cast("AwsService", cloud.cloud).key
    cloud.node(AccessKeyID=key, AccessKeySecret=secret).audit()
    recorded = Record(cloud.room / "flanneld.cloud").read()
    assert recorded.options.keys() - {"InstanceEndpoint"} == {"Endpoint", "MetadataEndpoint"}


def test_a_clean_up_leaves_a_route_that_is_anothers_by_now(cloud: Bench) -> None:
    cloud.node().audit()
    cloud.cloud.drop_route(SUBNET)
    cloud.cloud.set_route(SUBNET, cloud.their_hop)
    for _, act in routes_in(Record(cloud.room / "flanneld.cloud")):
        assert act()
    assert cloud.cloud.routes() == {SUBNET: cloud.their_hop}


def test_a_clean_up_that_fails_keeps_the_record(cloud: Bench) -> None:
    cloud.node().audit()
    cloud.cloud.fail("delete", ErrorKind.DENIED, times=10)
    record = Record(cloud.room / "flanneld.cloud")
    assert [act() for _, act in routes_in(record)] == [False, False]
    assert record.path.exists()
    assert cloud.cloud.routes() == {SUBNET: cloud.hop}


def test_a_record_of_the_release_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "flanneld.cloud"
    route = {"table": "rtb-1", "destination": "10.5.7.0/24", "hop": "eni-1", "name": ""}
    file: dict[str, Any] = {"type": "aws-vpc", "options": {"RouteTableID": "rtb-1"}, "address": "192.0.2.1"}
    path.write_text(json.dumps({**file, "routes": [route]}))
    entry = CloudTableEntry("rtb-1", IPv4Network("10.5.7.0/24"), "eni-1")
    assert Record(path).read() == Recorded("aws-vpc", file["options"], "192.0.2.1", (entry,))
    for broken in (None, [7], [{**route, "destination": 7}], [{**route, "destination": "10.5.7.1/24"}]):
        path.write_text(json.dumps({**file, "routes": broken}))
        assert Record(path).read() == Recorded()


@pytest.mark.parametrize("kind", ["tencent-vpc"])
def test_the_next_hop_follows_the_uplinks_address(cloud: Bench) -> None:
    cloud.node().audit()
    cloud.wait()
    node = cloud.node(address=THEIRS)
    cloud.cloud.terminate("198.18.0.1")
    assert len(node.audit()[0]) == 1
    assert cloud.cloud.routes() == {SUBNET: THEIRS}
    assert cloud.cloud.made("replace") == 1


@pytest.mark.parametrize("kind", ["aws-vpc"])
def test_the_source_destination_check_is_switched_off_or_its_right_is_named(cloud: Bench) -> None:
    service = cast("AwsService", cloud.cloud)
    cloud.cloud.deny("forward")
    node = cloud.node()
    node.audit()
    state = next(each for each in node.reconciler.states() if each.name == "cloud-forwarding")
    assert "drops packets of containers" in state.failed[0].reason
    assert "ec2:ModifyNetworkInterfaceAttribute" in state.failed[0].remedy
    assert not state.vital
    cloud.cloud.heal()
    cloud.wait()
    node.audit()
    assert service.forwards("198.18.0.1")


@pytest.mark.parametrize("kind", ["gce"])
def test_an_instance_that_may_not_forward_is_told_what_to_do(cloud: Bench) -> None:
    cloud.cloud.instances["198.18.0.1"].forwards = False  # type: ignore[attr-defined]
    node = cloud.node()
    assert len(node.audit()[0]) == 1
    state = next(each for each in node.reconciler.states() if each.name == "cloud-forwarding")
    assert "--can-ip-forward" in state.failed[0].remedy


@pytest.mark.parametrize("kind", ["aws-vpc"])
def test_each_table_that_the_config_names_has_the_route(cloud: Bench) -> None:
    service = cast("AwsService", cloud.cloud)
    tables = [service.main.id, service.add_table()]
    node = cloud.node(RouteTableID=tables)
    assert len(node.audit()[0]) == 2
    assert [service.routes(table) for table in tables] == [{SUBNET: cloud.hop}] * 2
    cloud.wait()
    service.drop_route(SUBNET)
    assert len(node.audit()[0]) == 1


@pytest.mark.parametrize("kind", ["aws-vpc"])
@pytest.mark.parametrize("source", ["role", "file", "old names"])
def test_credentials_are_found_where_the_sdk_looks(
    cloud: Bench, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    service = cast("AwsService", cloud.cloud)
    key, secret = service.key
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if source == "file":
        file = cloud.room / "credentials"
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    elif source == "old names":
        monkeypatch.setenv("AWS_ACCESS_KEY", key)
        monkeypatch.setenv("AWS_SECRET_KEY", secret)
    assert len(cloud.node().audit()[0]) == 1
