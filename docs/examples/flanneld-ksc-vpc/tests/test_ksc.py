"""The backend against a server that checks each signature with botocore's own implementation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from flanneld_ksc_vpc.backend import Ksc, build, connect

from flanneld.backends.cloud.contract import CloudError, CloudTableEntry, ErrorKind
from flanneld.backends.contract import HostServices
from flanneld.compat.json import Fields
from flanneld.errors import Fatal
from flanneld.runtime.sockets.http_client import HttpClient

OURS, SUBNET = IPv4Address("198.18.0.1"), IPv4Network("10.5.1.0/24")
KEY, SECRET = "lab-key", "lab-secret"


class Vpc:
    """A VPC on a port of this host, and the metadata service. ``routes`` is its table."""

    def __init__(self) -> None:
        self.routes: dict[str, dict[str, str]] = {}
        self.code = ""

    def answer(self, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if self.code:
            return 400, {"Error": {"Code": self.code, "Message": "no"}}
        if query["Action"] == "CreateRoute":
            number = f"route-{len(self.routes)}"
            self.routes[number] = {"RouteId": number, **query}
        elif query["Action"] == "DeleteRoute":
            self.routes.pop(query["RouteId"])
        else:
            start = int(query.get("NextToken", "0"))
            page: dict[str, Any] = {"RouteSet": list(self.routes.values())[start : start + 1]}
            return 200, page | ({"NextToken": str(start + 1)} if start + 1 < len(self.routes) else {})
        return 200, {"Return": True}

    def is_signed(self, url: str, date: str, authorization: str) -> bool:
        signed = AWSRequest("GET", url, headers={"X-Amz-Date": date})
        signer = SigV4Auth(Credentials(KEY, SECRET), "vpc", "cn-lab")
        signed.context["timestamp"] = date
        text = signer.string_to_sign(signed, signer.canonical_request(signed))
        return authorization.endswith(f"Signature={signer.signature(text, signed)}")


@pytest.fixture
def vpc(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Vpc, Ksc]]:
    monkeypatch.setenv("KSYUN_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("KSYUN_SECRET_ACCESS_KEY", SECRET)
    made = Vpc()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/instance-id"):
                return self._say(200, "i-ours")
            headers = self.headers
            url = f"http://{headers['Host']}{self.path}"
            if not made.is_signed(url, headers["X-Amz-Date"], headers["Authorization"]):
                return self._say(403, json.dumps({"Error": {"Code": "SignatureDoesNotMatch"}}))
            status, found = made.answer(dict(parse_qsl(urlsplit(self.path).query)))
            return self._say(status, json.dumps(found))

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_message: object) -> None:
            """Keep the tests' output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        options = {"Region": "cn-lab", "VpcID": "vpc-1", "Endpoint": url, "MetadataEndpoint": url}
        yield made, connect(Fields(options), HostServices(http=HttpClient(threading.Event()).ask))
        server.shutdown()


def test_a_route_is_made_found_on_a_later_page_and_removed(vpc: tuple[Vpc, Ksc]) -> None:
    made, cloud = vpc
    place = cloud.place(OURS)
    for destination in ("10.5.8.0/24", str(SUBNET)):
        entry = CloudTableEntry("vpc-1", IPv4Network(destination), place.hop)
        for call in cloud.put_calls(place, entry, None):
            cloud.ask(call)
    assert [(str(each.destination), each.hop) for each in cloud.entries(place)] == [
        ("10.5.8.0/24", "i-ours"),
        ("10.5.1.0/24", "i-ours"),
    ]
    for call in cloud.drop_calls(cloud.entries(place)[0]):
        cloud.ask(call)
    assert [route["DestinationCidrBlock"] for route in made.routes.values()] == [str(SUBNET)]


def test_another_secret_is_refused_with_the_remedy(
    vpc: tuple[Vpc, Ksc], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSYUN_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CloudError, match="correct KSYUN_ACCESS_KEY_ID") as refused:
        vpc[1].entries(vpc[1].place(OURS))
    assert refused.value.trouble is ErrorKind.CREDENTIALS


def test_a_missing_right_is_named(vpc: tuple[Vpc, Ksc]) -> None:
    made, cloud = vpc
    made.code = "AccessDenied"
    with pytest.raises(CloudError, match="denies vpc:DescribeRoutes"):
        cloud.entries(cloud.place(OURS))


def test_a_config_without_a_vpc_is_refused() -> None:
    with pytest.raises(Fatal, match="VpcID"):
        connect(Fields({"Region": "cn-lab"}), HostServices())


def test_the_backend_is_offered_by_the_package() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert 'ksc-vpc = "flanneld_ksc_vpc.backend:build"' in text
    assert build.kind == "ksc-vpc"
