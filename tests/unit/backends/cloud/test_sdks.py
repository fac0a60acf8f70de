"""How each client calls its SDK, and what the SDK's failures mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from aliyunsdkcore.acs_exception.exceptions import ClientException, ServerException
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from google.auth.exceptions import RefreshError, TransportError
from msgspec import Struct
from tencentcloud.common.exception import TencentCloudSDKException

from flanneld.backends.cloud.ali import Ali
from flanneld.backends.cloud.aws import Aws
from flanneld.backends.cloud.contract import ApiCall, CloudError, ErrorKind
from flanneld.backends.cloud.gce import Gce
from flanneld.backends.cloud.tencent import Tencent
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest
from tests.calls import at_once


def over(kind: type[Any], sdk: Any, **options: Any) -> Any:
    """Return a cloud's client over a stand-in for what its SDK connects."""

    class Connected(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            return sdk

    def http(_: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, {}, b"zone-1")

    return Connected(Fields(options, "Backend"), HostServices(call=at_once, http=http))


class Sdk:
    """Stands for the clients of AWS, Alibaba and Tencent: gives one answer, or fails."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def _call(self, *asked: Any, **parameters: Any) -> Any:
        self.asked.append(asked[0] if len(asked) == 1 else asked or parameters)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    describe_route_tables = do_action_with_exception = call_json = _call


def test_answers_of_the_sdks_are_taken_as_they_are() -> None:
    call = ApiCall("DescribeRouteTables", {"VpcId": "vpc-1"})
    found: dict[str, Any] = {"RouteTables": []}
    aws, tencent, ali = Sdk(found), Sdk({"Response": found}), Sdk(json.dumps(found))
    assert over(Aws, aws).ask(call) == found
    assert aws.asked == [{"VpcId": "vpc-1"}]
    assert over(Tencent, tencent).ask(call) == found
    assert tencent.asked == [("DescribeRouteTables", {"VpcId": "vpc-1"})]
    assert over(Ali, ali).ask(call) == found
    (request,) = ali.asked
    assert request.get_query_params()["VpcId"] == "vpc-1"


@pytest.mark.parametrize(
    ("action", "options", "server"),
    [
        ("DescribeVSwitchAttributes", {}, ("vpc..aliyuncs.com", "https", "2016-04-28")),
        ("DescribeInstances", {}, ("ecs..aliyuncs.com", "https", "2014-05-26")),
        ("DescribeInstances", {"InstanceEndpoint": "http://ecs:8"}, ("ecs:8", "http", "2014-05-26")),
        ("CreateRouteEntry", {"Endpoint": "http://vpc:8"}, ("vpc:8", "http", "2016-04-28")),
    ],
)
def test_ali_has_an_api_for_instances_and_one_for_all_else(
    action: str, options: Mapping[str, str], server: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECS_ENDPOINT", raising=False)
    sdk = Sdk("{}")
    over(Ali, sdk, **options).ask(ApiCall(action))
    (request,) = sdk.asked
    assert (request.get_domain(), request.get_protocol_type(), request.get_version()) == server
    assert request.get_action_name() == action


def refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "DescribeRouteTables")


@pytest.mark.parametrize(
    ("kind", "failure", "trouble", "words"),
    [
        (Aws, refusal("UnauthorizedOperation"), ErrorKind.DENIED, "denies ec2:DescribeRouteTables"),
        (Aws, refusal("Riddle"), ErrorKind.OTHER, "AWS answers DescribeRouteTables with Riddle"),
        (Aws, ClientError({}, "x"), ErrorKind.OTHER, "AWS answers DescribeRouteTables with no code"),
        (Aws, NoCredentialsError(), ErrorKind.CREDENTIALS, "not accept the credentials for Describe"),
        (
            Aws, EndpointConnectionError(endpoint_url="x"), ErrorKind.OTHER,
            "does not answer DescribeRouteTables: EndpointConnectionError",
        ),
        (Ali, ServerException("Forbidden.RAM", "m"), ErrorKind.DENIED, "denies vpc:DescribeRouteTables"),
        (Ali, ServerException("Riddle", "m"), ErrorKind.OTHER, "answers DescribeRouteTables with Riddle"),
        (Ali, ClientException("SDK.InvalidCredential", "m"), ErrorKind.CREDENTIALS, "not accept the cred"),
        (Ali, ClientException("SDK.HttpError", "m"), ErrorKind.OTHER, "does not answer DescribeRouteTables"),
        (Tencent, TencentCloudSDKException("AuthFailure.X", "m"), ErrorKind.CREDENTIALS, "not accept the"),
        (Tencent, TencentCloudSDKException("Riddle", "m"), ErrorKind.OTHER, "answers DescribeRouteTables w"),
        (
            Tencent, TencentCloudSDKException("ClientNetworkError", "m"), ErrorKind.OTHER,
            "does not answer DescribeRouteTables: ClientNetworkError",
        ),
        (
            Tencent, TencentCloudSDKException("ServerNetworkError", "m"), ErrorKind.OTHER,
            "does not answer DescribeRouteTables: ServerNetworkError",
        ),
    ],
)  # fmt: skip
def test_failures_of_the_sdks_are_refusals_or_silence(
    kind: type[Any], failure: Exception, trouble: ErrorKind, words: str
) -> None:
    with pytest.raises(CloudError, match=words) as failed:
        over(kind, Sdk(failure)).ask(ApiCall("DescribeRouteTables"))
    assert failed.value.trouble is trouble


# ---- Google Cloud ----------------------------------------------------------------------------------


class Reply(Struct):
    status_code: int
    text: str


class Session:
    """A session that gives replies in their order, and keeps the requests."""

    def __init__(self, *replies: Reply | Exception | Mapping[str, Any]) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []

    def request(self, method: str, url: str, timeout: float, max_allowed_time: float, **body: Any) -> Reply:
        assert timeout == max_allowed_time
        self.asked.append((method, url.removeprefix("http://gce/v1/projects/"), body))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Reply(200, json.dumps(reply)) if isinstance(reply, Mapping) else reply


def gce(session: Session) -> Any:
    return over(Gce, session, Endpoint="http://gce/v1/")


INSERT = ApiCall("compute.routes.insert", {"name": "r"}, "compute.routes.create")
BEGUN = {"kind": "compute#operation", "name": "op-1", "status": "RUNNING"}
DONE = {**BEGUN, "status": "DONE"}


def test_gce_has_its_parameters_in_path_query_or_body() -> None:
    session = Session({"a": 1}, {"items": []}, DONE, DONE)
    cloud = gce(session)
    assert cloud.ask(ApiCall("compute.instances.get", {"zone": "z", "instance": "i"})) == {"a": 1}
    assert cloud.ask(ApiCall("compute.routes.list", {"filter": "f"})) == {"items": []}
    assert cloud.ask(INSERT) == DONE
    cloud.ask(ApiCall("compute.routes.delete", {"route": "r"}))
    assert session.asked == [
        ("GET", "/zones/z/instances/i", {"params": {}}),
        ("GET", "/global/routes", {"params": {"filter": "f"}}),
        ("POST", "/global/routes", {"json": {"name": "r"}}),
        ("DELETE", "/global/routes/r", {"params": {}}),
    ]


def test_gce_waits_until_a_change_was_made() -> None:
    session = Session(BEGUN, DONE)
    assert gce(session).ask(INSERT) == DONE
    assert session.asked[1] == ("POST", "/global/operations/op-1/wait", {"json": {}})


@pytest.mark.parametrize(
    ("replies", "trouble", "words"),
    [
        ([BEGUN, BEGUN], ErrorKind.BUSY, "the operation op-1 of compute.routes.insert has not ended within"),
        ([{**DONE, "error": {"errors": [{"code": "QUOTA_EXCEEDED"}]}}], ErrorKind.FULL, "is full"),
        ([BEGUN, {**DONE, "error": {"errors": [{}]}}], ErrorKind.OTHER, "with no code"),
        ([Reply(403, '{"error": {"errors": [{"reason": "forbidden"}]}}')], ErrorKind.DENIED, "routes.create"),
        ([Reply(429, "busy")], ErrorKind.THROTTLED, r"throttles compute.routes.insert \(429\)"),
        ([Reply(401, '{"error": {"errors": []}}')], ErrorKind.CREDENTIALS, r"\(401\)"),
        ([Reply(500, "[]")], ErrorKind.OTHER, "answers compute.routes.insert with 500"),
        ([RefreshError()], ErrorKind.CREDENTIALS, r"\(RefreshError\)"),
        ([TransportError()], ErrorKind.OTHER, "does not answer compute.routes.insert: TransportError"),
    ],
)
def test_refusals_of_gce_are_understood(replies: list[Any], trouble: ErrorKind, words: str) -> None:
    with pytest.raises(CloudError, match=words) as failed:
        gce(Session(*replies)).ask(INSERT)
    assert failed.value.trouble is trouble
