"""Being let in to etcd: endpoints, TLS and credentials, and what is said when they are wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import ssl
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from flanneld.errors import Fatal, Retryable
from flanneld.model import LeaseAttrs
from flanneld.subnet.etcd.api_choice import open_client, open_etcd
from flanneld.subnet.etcd.keys import KeyChanges, KeyClient, NoSuchApi, Position
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, server_failed
from tests.etcd_clients import transport_of
from tests.lab.etcd_v3 import V3Keys
from tests.local_etcd import NEWER, LocalEtcd, Relay, free_port, make_certificates, running_etcd, server

PASSWORD = "hünter/2 secret"


@pytest.fixture(params=["v2", "v3", "v3 over gRPC"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def client(api: str, *endpoints: str, **options: str) -> KeyClient:
    return client_of(api, EtcdOptions(endpoints, **options))


def client_of(api: str, options: EtcdOptions) -> KeyClient:
    transport = "grpc" if "gRPC" in api else "json"
    return open_client(
        api[:2], transport_of(Servers(replace(options, transport=transport)), EtcdTimeouts(read=20.0))
    )


def changes(asker: KeyClient, key: str, after: Position) -> KeyChanges:
    """What has happened to a key, by a watch."""
    watcher = asker.watcher(key, recursive=False, contact=lambda: None)
    try:
        return watcher.read(after)
    finally:
        watcher.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def tls_etcd(certificates: Path) -> Iterator[LocalEtcd]:
    with running_etcd(tls=certificates) as etcd:
        yield etcd


# ---- TLS and credentials -------------------------------------------------------------------------


def files(folder: Path, name: str, ca: str = "ca") -> dict[str, str]:
    paths = {"certfile": f"{name}.crt", "keyfile": f"{name}.key", "cafile": f"{ca}.crt"}
    return {option: str(folder / file) for option, file in paths.items()}


def test_a_client_certificate_opens_the_door(api: str, tls_etcd: LocalEtcd, certificates: Path) -> None:
    asker = client(api, tls_etcd.url, **files(certificates, "client"))
    made = asker.create("/tls", "1", None)
    tls_etcd.keys(api[:2]).put("/tls", "2")
    (changed,) = changes(asker, "/tls", made.at).replies
    assert changed.node
    assert changed.node.value == "2"
    asker.remove("/tls", changed.node.modified)


def test_tls_failures_are_explained(
    api: str, tls_etcd: LocalEtcd, etcd: LocalEtcd, certificates: Path
) -> None:
    foreign = files(certificates, "client", ca="other")
    with pytest.raises(Retryable, match=r"certificate verify failed.*-etcd-cafile"):
        client(api, tls_etcd.url, **foreign).fetch("/key")
    with pytest.raises(Retryable, match=r"broke the TLS connection.*-etcd-certfile"):
        client(api, tls_etcd.url, **files(certificates, "other")).fetch("/key")
    with pytest.raises(Retryable, match=r"HTTP 400|broke"):
        client(api, tls_etcd.url.replace("https", "http")).fetch("/key")
    with pytest.raises(Retryable, match="https"):
        client(api, etcd.url.replace("http", "https"), **files(certificates, "client")).fetch("/key")


@pytest.mark.parametrize(("code", "words"), [(10, "certificate has expired"), (9, "not yet valid")])
def test_certificate_out_of_its_time_is_named(certificates: Path, code: int, words: str) -> None:
    """The clock of this host may be the cause, so it is named first."""
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.reason, error.verify_message, error.verify_code = "CERTIFICATE_VERIFY_FAILED", words, code
    (told,) = Servers(EtcdOptions(("https://127.0.0.1:1",), cafile=str(certificates / "ca.crt"))).in_turn()
    failure = server_failed(error, 1.0, told)
    assert failure.problem == f"certificate verify failed: {words}"
    assert "date -u" in failure.remedy


def test_tls_files_that_cannot_be_used_are_named(certificates: Path, tmp_path: Path) -> None:
    good = files(certificates, "client")
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", good["keyfile"], "-out", str(locked)]
    subprocess.run(encrypt, check=True, capture_output=True)
    wrong = {
        "no such file": good | {"cafile": str(tmp_path / "missing")},
        "garbage": good | {"cafile": str(garbage)},
        "garbage ": good | {"certfile": str(garbage)},
        "directory": good | {"keyfile": str(tmp_path)},
        "other.key": good | {"keyfile": str(certificates / "other.key")},
        "encrypted": good | {"keyfile": str(locked)},
        "set both": good | {"keyfile": ""},
    }
    for sentence, options in wrong.items():
        with pytest.raises(Fatal) as caught:
            Servers(EtcdOptions(("https://127.0.0.1:1",), **options))
        assert sentence.strip() in str(caught.value).lower()
        assert caught.value.remedy


@pytest.fixture(scope="module")
def guarded_etcd() -> Iterator[LocalEtcd]:
    """An etcd that lets in root and the user flännel only, in both APIs."""
    root = {"user": "root", "password": PASSWORD}
    with running_etcd("--bcrypt-cost=4") as etcd:
        rights = {"kv": {"read": ["/*"], "write": ["/open/*"]}}
        etcd.ask("PUT", "/v2/auth/users/root", json.dumps(root))
        etcd.ask("PUT", "/v2/auth/roles/net", json.dumps({"role": "net", "permissions": rights}))
        user = {"user": "flännel", "password": PASSWORD, "roles": ["net"]}
        etcd.ask("PUT", "/v2/auth/users/fl%C3%A4nnel", json.dumps(user))
        etcd.ask("PUT", "/v2/auth/enable", "{}")
        etcd.ask("DELETE", "/v2/auth/roles/guest", "{}", user=f"root:{PASSWORD}")
        V3Keys(etcd.post).require_login("flännel", PASSWORD, "/open", writable="")
        yield etcd


def test_a_user_with_a_password_is_let_in(api: str, guarded_etcd: LocalEtcd) -> None:
    asker = client(api, guarded_etcd.url, username="flännel", password=PASSWORD)
    made = asker.create("/open/door", "1", None)
    assert made.node
    second = asker.replace("/open/door", "2", None, made.node.modified)
    assert changes(asker, "/open/door", made.at).replies
    with pytest.raises(Retryable, match="refuses access"):
        asker.create("/closed", "1", None)
    with_url = guarded_etcd.url.replace("//", f"//fl%C3%A4nnel:{quote(PASSWORD, safe='')}@")
    assert client(api, with_url).fetch("/open/door").node
    asker.remove("/open/door", second.at.index)


def test_roles_of_the_guide_separate_nodes_from_operators(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "security.md").read_text()
    commands = re.findall(r"^    (etcdctl .*)$", guide, re.MULTILINE)
    assert len(commands) == 11
    for name in ("root", "node", "operator"):
        (tmp_path / f"{name}.password").write_text(f"hünter-{name}\n")
    root, network = "/coreos.com/network", '{"Network":"10.5.0.0/16"}'
    with running_etcd("--bcrypt-cost=4") as etcd:
        tools = {"PATH": f"{Path(NEWER).parent}:{os.environ['PATH']}", "ETCDCTL_ENDPOINTS": etcd.url}
        for command in commands:
            subprocess.run(["bash", "-c", command], cwd=tmp_path, env=tools, check=True, timeout=60)
        operator = client("v3", etcd.url, username="operator", password="hünter-operator")
        operator.create(f"{root}/config", network, None)
        with pytest.raises(Retryable, match="refuses access"):
            operator.create(f"{root}/subnets/10.5.1.0-24", "{}", None)
        node = open_etcd(EtcdOptions((etcd.url,), username="flannel", password="hünter-node"), "v3")
        with closing(node):
            attrs = LeaseAttrs(IPv4Address("192.0.2.1"), backend_type="host-gw")
            lease = node.acquire(node.network_config(), attrs, (None, None))
            assert node.renew(lease).key == lease.key
        as_node = client("v3", etcd.url, username="flannel", password="hünter-node")
        with pytest.raises(Retryable, match="refuses access"):
            as_node.create(f"{root}/blue/config", network, None)
        with pytest.raises(Retryable, match="refuses access"):
            as_node.remove(f"{root}/config", 1)


def test_without_a_user_there_is_no_way_in(api: str, guarded_etcd: LocalEtcd) -> None:
    with pytest.raises(Retryable, match=r"refuses access.*-etcd-username"):
        client(api, guarded_etcd.url).fetch("/open/door")


def test_a_password_shows_nowhere(
    api: str, guarded_etcd: LocalEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = quote(PASSWORD, safe="")
    url = guarded_etcd.url.replace("//", f"//eve:{quoted}@")
    shown = []
    wrong = [
        EtcdOptions((url,)),
        EtcdOptions((guarded_etcd.url,), username="eve", password=PASSWORD),
        EtcdOptions((f"http://eve:{quoted}@127.0.0.1:{free_port()}",)),
        EtcdOptions((f"http://eve:{quoted}@127.0.0.1:99999",)),
        EtcdOptions((f"http://eve:{quoted}@host", "https://other")),
    ]
    for options in wrong:
        with pytest.raises((Retryable, Fatal)) as caught:
            client_of(api, options).fetch("/key")
        shown.append(str(caught.value))
    options = EtcdOptions((url,), username="eve", password=PASSWORD)
    shown += [repr(options), Servers(options).name, *(repr(each) for each in Servers(options).in_turn())]
    assert "refuses access" in shown[0]
    told = "\n".join([*shown, caplog.text])
    for secret in (PASSWORD, quoted, b64encode(f"eve:{PASSWORD}".encode()).decode()):
        assert secret not in told


# ---- endpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "sentence"),
    [
        ((), "empty"),
        (("",), "element 1"),
        (("http://a", "ftp://b"), "element 2"),
        (("127.0.0.1:2379", "https://b"), "mixes"),
        (("http://a", "https://b"), "mixes"),
        (("ftp://a",), "element 1"),
        (("http://[::1",), "element 1"),
    ],
)
def test_endpoints_that_cannot_be_used_are_fatal(endpoints: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(Fatal, match=sentence):
        Servers(EtcdOptions(endpoints))


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_an_endpoint_may_lie_below_a_path(api: str, etcd: LocalEtcd) -> None:
    relay = Relay(etcd.url)
    with server(relay) as url, pytest.raises(NoSuchApi, match=f"{api} API"):
        client(api, f"{url}/below/").fetch("/key")
    assert relay.asked({"v2": "GET /below/v2/keys/key?", "v3": "POST /below/v3/kv/range"}[api])


@pytest.mark.parametrize(
    ("endpoints", "has_certificate", "names"),
    [
        (("10.0.0.1:2379",), False, {"http://10.0.0.1:2379"}),
        (("10.0.0.1:2379", "[::1]:2379"), True, {"https://10.0.0.1:2379", "https://[::1]:2379"}),
        (("HTTP://a:1", "b:1"), True, {"http://a:1", "http://b:1"}),
        (("https://a:1", "b:1"), False, {"https://a:1", "https://b:1"}),
    ],
)
def test_an_endpoint_without_a_scheme_is_reached_as_by_go(
    certificates: Path, endpoints: tuple[str, ...], has_certificate: bool, names: set[str]
) -> None:
    options = files(certificates, "client") if has_certificate else {}
    servers = Servers(EtcdOptions(endpoints, **options))
    assert {each.name for each in servers.in_turn()} == names
    assert (servers.tls is not None) == all(name.startswith("https") for name in names)


def test_an_authority_alone_gives_an_endpoint_without_a_scheme_no_tls(certificates: Path) -> None:
    options = {"cafile": str(certificates / "ca.crt")}
    assert Servers(EtcdOptions(("10.0.0.1:2379",), **options)).tls is None


def test_an_endpoint_without_a_scheme_answers(api: str, etcd: LocalEtcd) -> None:
    asker = client(api, etcd.url.removeprefix("http://"))
    made = asker.create("/plain", "1", None)
    asker.remove("/plain", made.at.index)


def test_failure_in_one_api_leaves_the_other_its_server() -> None:
    v3 = Servers(EtcdOptions(("http://a:1", "http://b:1")), shuffle=lambda _: None)
    v2 = v3.apart()
    v2.skip(v2.current)
    assert (v3.current.name, v2.current.name) == ("http://a:1", "http://b:1")


def test_servers_are_shuffled_and_keep_their_names() -> None:
    given = tuple(f"http://10.0.0.{number}:2379" for number in range(20))
    orders = {tuple(each.name for each in Servers(EtcdOptions(given)).in_turn()) for _ in range(5)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(given)}
