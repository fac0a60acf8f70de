"""Calls of a cloud's API and of its metadata service: pages, pauses, and failures in the operator's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.cloud.calls import (
    CallBackoff,
    Metadata,
    MetadataSession,
    SdkCloud,
    absence_is_fine,
    batches,
    by_offset,
    by_token,
    understood,
)
from flanneld.backends.cloud.contract import ApiCall, CloudError, CloudTableEntry, CloudTerms, ErrorKind
from flanneld.backends.cloud.record import Record, Recorded, routes_in
from flanneld.backends.contract import HostServices
from flanneld.errors import Fatal, Retryable
from flanneld.runtime import files
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest
from tests.calls import at_once
from tests.clock import Clock

CALL = ApiCall("List", {"Filter": "x"})


# ---- pages and batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "asked"),
    [
        (["", "never"], [None]),
        ([None, "never"], [None]),
        (["a", "b", ""], [None, "a", "b"]),
        (["a", "a", "never"], [None, "a"]),
        ([7, ""], [None, "7"]),
    ],
    ids=["one page", "null", "three pages", "a page that repeats itself", "a number"],
)
def test_pages_are_asked_for_by_the_token_of_the_page_before(
    tokens: list[str | int | None], asked: list[str | None]
) -> None:
    calls: list[Mapping[str, Any]] = []

    def ask(call: ApiCall) -> Mapping[str, Any]:
        calls.append(call.parameters)
        return {"next": tokens[len(calls) - 1], "page": len(calls)}

    assert [each["page"] for each in by_token(ask, CALL, "next", "token")] == [*range(1, len(asked) + 1)]
    assert [each.get("token") for each in calls] == asked
    assert all(each["Filter"] == "x" for each in calls)


@pytest.mark.parametrize(("number", "offsets"), [(0, [0]), (99, [0]), (100, [0, 100]), (101, [0, 100])])
def test_items_are_asked_for_a_hundred_at_a_time(number: int, offsets: list[int]) -> None:
    asked: list[int] = []

    def ask(call: ApiCall) -> Mapping[str, Any]:
        assert (call.parameters["Filter"], call.parameters["Limit"]) == ("x", "100")
        asked.append(int(call.parameters["Offset"]))
        some = [*range(number)][asked[-1] : asked[-1] + 100]
        return {"items": some} if some else {}

    assert list(by_offset(ask, CALL, "items")) == [*range(number)]
    assert asked == offsets


def test_lists_without_an_end_are_given_up() -> None:
    pages = by_token(lambda call: {"next": call.parameters.get("token", "") + "x"}, CALL, "next", "token")
    assert sum(1 for _ in pages) == 1000
    assert sum(1 for _ in by_offset(lambda _: {"items": [0] * 100}, CALL, "items")) == 100_000


@pytest.mark.parametrize(("number", "sizes"), [(0, []), (1, [1]), (100, [100]), (201, [100, 100, 1])])
def test_a_call_names_a_hundred_objects_at_most(number: int, sizes: list[int]) -> None:
    parts = [*batches(range(number))]
    assert [len(each) for each in parts] == sizes
    assert [each for part in parts for each in part] == [*range(number)]


# ---- pauses ----------------------------------------------------------------------------------------


def test_a_refusal_is_repeated_during_its_pause_which_grows(daemon_clock: Clock) -> None:
    """The first one is from 2 s to 4 s."""
    backoff = CallBackoff()
    backoff.check()
    for pause in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 150.0, 150.0):
        backoff.refused(CloudError(ErrorKind.DENIED, "no", "allow it"))
        daemon_clock.time += pause - 0.1
        with pytest.raises(Retryable, match="no; allow it"):
            backoff.check()
        daemon_clock.time += pause + 0.1
        backoff.check()
    backoff.succeeded()
    backoff.refused(CloudError(ErrorKind.DENIED, "no"))
    daemon_clock.time += 4.0
    backoff.check()


def test_after_a_success_nothing_is_held_back(daemon_clock: Clock) -> None:
    del daemon_clock
    backoff = CallBackoff()
    backoff.refused(CloudError(ErrorKind.DENIED, "no"))
    backoff.succeeded()
    backoff.check()


# ---- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [KeyError("x"), TypeError(), ValueError(), AttributeError()])
def test_an_answer_of_no_known_shape_is_told_as_such(failure: Exception) -> None:
    with (
        pytest.raises(CloudError, match=rf"no known shape \({type(failure).__name__}\)") as failed,
        understood(),
    ):
        raise failure
    assert failed.value.trouble is ErrorKind.OTHER
    assert "proxy" in failed.value.remedy


def test_only_the_absence_of_what_is_removed_is_fine() -> None:
    with absence_is_fine():
        raise CloudError(ErrorKind.ABSENT, "no such route")
    with pytest.raises(CloudError, match="denied"), absence_is_fine():
        raise CloudError(ErrorKind.DENIED, "denied")


TERMS = CloudTerms(
    cloud="Pond",
    codes={kind.value: kind for kind in ErrorKind if kind is not ErrorKind.OTHER},
    credentials="wade in",
    quota="dig deeper",
    permission="pond:{}",
    table_option="Reed",
)


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("throttled", ErrorKind.THROTTLED, "Pond throttles List (throttled); it is asked less often now"),
        ("throttled.User", ErrorKind.THROTTLED, "Pond throttles List (throttled.User); it is asked less"),
        ("throttledUser", ErrorKind.OTHER, "Pond answers List with throttledUser; look the code up in its"),
        ("denied", ErrorKind.DENIED, "Pond denies pond:List (denied); allow pond:List to the role or key"),
        ("credentials", ErrorKind.CREDENTIALS, "not accept the credentials for List (credentials); wade in"),
        ("full", ErrorKind.FULL, "the route table of Pond is full (full); dig deeper"),
        ("no table", ErrorKind.NO_TABLE, "Pond knows no such route table (no table); correct Backend.Reed;"),
        ("busy", ErrorKind.BUSY, "Pond is still busy with an earlier change (busy); it is tried again"),
        ("absent", ErrorKind.ABSENT, "Pond answers List with absent; look the code up"),
        ("other", ErrorKind.OTHER, "Pond answers List with other; look the code up"),
    ],
)
def test_error_codes_are_told_in_words(code: str, kind: ErrorKind, text: str) -> None:
    failure = TERMS.error(CALL, code)
    assert failure.trouble is kind
    assert text in str(failure)


def test_the_right_that_is_denied_may_differ_from_the_action() -> None:
    failure = TERMS.error(ApiCall("List", permission="pond.look"), "denied")
    assert str(failure).startswith("Pond denies pond.look (denied); allow pond.look to")


class Pond(SdkCloud):
    """A cloud whose calls do what ``act`` does."""

    words, limit = TERMS, 1.0

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(HostServices(call=at_once))
        self.act = act
        self.connections = 0

    def _connect(self) -> str:
        self.connections += 1
        return "the client"

    def _call(self, sdk: str, call: ApiCall) -> Any:
        assert (sdk, call) == ("the client", CALL)
        return self.act()


def pond(act: Callable[[], Any]) -> Any:
    return Pond(act)  # type: ignore[abstract]


def raising(failure: Exception) -> Callable[[], Any]:
    def act() -> Any:
        raise failure

    return act


def test_client_is_made_once_and_again_after_refused_credentials() -> None:
    cloud = pond(lambda: {"a": 1})
    assert [cloud.ask(CALL), cloud.ask(CALL)] == [{"a": 1}] * 2
    assert cloud.connections == 1
    for kind, connections in ((ErrorKind.DENIED, 1), (ErrorKind.CREDENTIALS, 2)):
        cloud.act = raising(CloudError(kind, "refused"))
        with pytest.raises(CloudError, match="refused"):
            cloud.ask(CALL)
        cloud.act = dict
        cloud.ask(CALL)
        assert cloud.connections == connections


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (raising(Retryable("it took too long")), "Pond does not answer List: it took too long"),
        (raising(ZeroDivisionError()), "Pond does not answer List: ZeroDivisionError"),
        (lambda: ["no", "object"], "Pond does not answer List: its answer is no JSON object"),
    ],
    ids=["late", "an accident of the SDK", "no object"],
)
def test_call_without_an_answer_is_told_by_its_cause(act: Callable[[], Any], problem: str) -> None:
    with pytest.raises(CloudError) as failed:
        pond(act).ask(CALL)
    assert (failed.value.trouble, failed.value.problem) == (ErrorKind.OTHER, problem)
    assert "HTTPS_PROXY" in failed.value.remedy


def test_cloud_whose_sdk_is_missing_ends_the_daemon() -> None:
    with pytest.raises(Fatal, match="not installed"):
        pond(raising(Fatal("not installed"))).ask(CALL)


# ---- the metadata service --------------------------------------------------------------------------

TOKEN = MetadataSession("token", "x-lifetime", "x-token")


class Service:
    """A metadata service with a token, and the requests to it."""

    def __init__(self, values: Mapping[str, str], *, token_status: int = 200) -> None:
        self.values = values
        self.token_status = token_status
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        assert request.harmless  # a dry run asks, too
        path = request.url.removeprefix("http://pond/")
        self.asked.append((request.method, path, request.headers))
        if path == "token":
            return HttpAnswer(self.token_status, {}, b" secret\n")
        value = self.values.get(path)
        return HttpAnswer(404 if value is None else 200, {}, (value or "").encode())


@pytest.mark.parametrize(
    ("token_status", "headers"),
    [(200, {"a": "b", "x-token": "secret"}), (404, {"a": "b"})],
    ids=["with sessions", "without"],
)
def test_values_are_read_in_one_session_if_there_are_sessions(
    token_status: int, headers: Mapping[str, str]
) -> None:
    service = Service({"one": "1\n", "an%20other": " 2"}, token_status=token_status)
    metadata = Metadata(service, "http://pond/", headers={"a": "b"}, token=TOKEN)
    assert metadata.read("one", "an other") == ["1", "2"]
    assert service.asked == [
        ("PUT", "token", {"x-lifetime": "21600"}),
        ("GET", "one", headers),
        ("GET", "an%20other", headers),
    ]


def test_one_value_is_read_without_a_session_of_a_service_that_has_none() -> None:
    service = Service({"one": "1"})
    assert Metadata(service, "http://pond").get("one") == "1"
    assert service.asked == [("GET", "one", {})]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("none", "the metadata service answers with 404 at http://pond/none"),
        ("empty", "the metadata service answers with nothing at http://pond/empty"),
    ],
)
def test_value_that_is_missing_is_named(path: str, problem: str) -> None:
    with pytest.raises(CloudError) as failed:
        Metadata(Service({"one": "1", "empty": " "}), "http://pond").read("one", path)
    assert failed.value.problem == problem
    assert failed.value.remedy == "see whether it is enabled for this instance"


def test_service_that_does_not_answer_is_told() -> None:
    def http(_: HttpRequest) -> HttpAnswer:
        raise Retryable("timed out")

    with pytest.raises(CloudError, match="metadata service does not answer: timed out; run flanneld on an"):
        Metadata(http, "http://pond").get("one")


# ---- the record ------------------------------------------------------------------------------------

ENTRY = CloudTableEntry("rtb-1", IPv4Network("10.5.7.0/24"), "eni-1")
OTHER = CloudTableEntry("rtb-1", IPv4Network("10.5.8.0/24"), "eni-1")


def test_record_keeps_a_route_of_each_destination(tmp_path: Path) -> None:
    path = tmp_path / "run" / "flanneld.cloud"
    record = Record(path, "pond", {"Reed": 1})
    moved = CloudTableEntry("rtb-1", ENTRY.destination, "eni-2")
    for each in (ENTRY, OTHER, moved):
        record.add(each, "192.0.2.1")
    assert record.has(ENTRY)
    assert Record(path).read() == Recorded("pond", {"Reed": 1}, "192.0.2.1", (OTHER, moved))
    record.add(moved, "192.0.2.2")
    assert Record(path).read().address == "192.0.2.2"
    record.remove(ENTRY)
    assert not record.has(ENTRY)
    assert Record(path).read().routes == (OTHER,)
    assert Record(path, "pond").has(OTHER)
    assert not Record(path, "lake").has(OTHER)


def test_record_that_cannot_be_read_or_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "flanneld.cloud"
    path.mkdir()
    record = Record(path, "pond")
    for each in (ENTRY, OTHER):
        record.add(each, "192.0.2.1")
    assert record.has(ENTRY)
    unread, unwritten = caplog.messages
    assert unread == f"Cannot read {path}: Is a directory"
    assert unwritten.startswith(f"Cannot write {path}: Is a directory; make its directory writable, or -cl")
    ((what, act),) = routes_in(Record(path))
    assert (what, act()) == (f"what {path} names: Is a directory", False)


def test_record_that_makes_no_sense_is_empty_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Record(tmp_path / "flanneld.cloud")
    record.path.write_text("{")
    assert (record.read(), record.read()) == (Recorded(), Recorded())
    assert caplog.messages == [f"Ignoring {record.path}: its content is malformed"]


def test_record_of_what_is_no_cloud_stays_for_the_operator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "flanneld.cloud"
    files.replace(path, files.encode(Recorded("vxlan", {}, "192.0.2.1", (ENTRY,))).encode(), 0o600)
    found = dict(routes_in(Record(path)))
    assert [*found] == ["cloud route 10.5.7.0/24 via eni-1 in rtb-1", str(path)]
    assert [act() for act in found.values()] == [False, False]
    assert caplog.messages == ["the record names vxlan, which is no cloud; remove the file by hand"]
    assert path.exists()
