"""What a store or an operator might say, tampered with or far too large."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld import config, options
from flanneld.backends.vxlan import vtep_mac
from flanneld.compat import json as gojson
from flanneld.errors import FlannelError, Refused, Retryable
from flanneld.subnet import codec
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.keys import KeyReply, Position
from flanneld.subnet.etcd.leases import LeaseReader
from flanneld.subnet.etcd.transport import Answer
from flanneld.subnet.etcd.v2_messages import read
from flanneld.subnet.failover import ServerFailed
from tests.unit.mutations import JSON, tampered_json

PATH = "/coreos.com/network/subnets"
ATTRS = {"PublicIP": "192.168.0.2", "BackendType": "vxlan", "BackendData": {"VtepMAC": "02:00:00:00:00:01"}}
CONFIG = {
    "Network": "10.5.0.0/16",
    "SubnetLen": 24,
    "SubnetMin": "10.5.10.0",
    "SubnetMax": "10.5.90.0",
    "EnableIPv6": True,
    "IPv6Network": "fc00:5::/48",
    "IPv6SubnetLen": 64,
    "Backend": {"Type": "vxlan", "VNI": 1, "Port": 8472, "DirectRouting": False},
}
AT = Position(7, "9")


# ---- what is written by hand or by other nodes ----------------------------------------------------


@given(tampered_json([CONFIG]))
def test_a_tampered_config_is_one_or_refused(value: Any) -> None:
    with suppress(config.ConfigError):
        config.parse(json.dumps(value))


@given(tampered_json([ATTRS]))
def test_tampered_attributes_are_some_or_refused(value: Any) -> None:
    with suppress(Refused):
        codec.parse_attrs(json.dumps(value))


@given(tampered_json([ATTRS["BackendData"]]) | JSON)
def test_a_mac_is_found_in_backend_data_or_refused(value: Any) -> None:
    with suppress(Refused):
        assert len(vtep_mac(value)) == 17


@given(
    st.lists(
        st.sampled_from([f"-{flag.name}" for flag in options.FLAGS])
        | st.tuples(st.sampled_from([flag.name for flag in options.FLAGS]), st.text(max_size=9)).map(
            "--{0[0]}={0[1]}".format
        )
        | st.sampled_from(
            ["-", "--", "0", "10.5.0.1", "http://[", "http://a:99999", "(", "-v=-1", "[::1]:x"]
        ),
        max_size=5,
    ),
    st.dictionaries(
        st.sampled_from([f"FLANNELD_{flag.name.upper().replace('-', '_')}" for flag in options.FLAGS]),
        st.text(max_size=9) | st.sampled_from(["http://[", "http://a:99999", "1" * 5000, "(", "true"]),
        max_size=3,
    ),
)
def test_any_command_line_and_environment_are_options_or_refused(
    argv: list[str], environ: dict[str, str]
) -> None:
    with suppress(FlannelError, options.HelpWanted, options.VersionWanted):
        assert isinstance(options.read(argv, environ), options.Options)


# ---- etcd ----------------------------------------------------------------------------------------

NODE = {
    "key": f"{PATH}/10.5.3.0-24",
    "value": json.dumps(ATTRS),
    "modifiedIndex": 6,
    "createdIndex": 6,
    "expiration": "2030-01-01T00:00:00Z",
    "ttl": 86400,
}
V2: list[dict[str, Any]] = [
    {"action": "set", "node": NODE, "prevNode": NODE},
    {"action": "expire", "node": {"key": NODE["key"], "modifiedIndex": 7}, "prevNode": NODE},
    {"action": "get", "node": {"key": PATH, "dir": True, "nodes": [NODE, NODE], "modifiedIndex": 3}},
    {"errorCode": 401, "message": "The event in requested index is outdated", "index": 2007},
]


def text64(text: str) -> str:
    return b64encode(text.encode()).decode()


HEADER = {"cluster_id": "9", "member_id": "1", "revision": "8", "raft_term": "2"}
KEY_VALUE = {
    "key": text64(f"{PATH}/10.5.3.0-24"),
    "value": text64(json.dumps(ATTRS)),
    "mod_revision": "8",
    "lease": "77",
}
V3 = [
    {"result": {"header": HEADER, "events": [{"kv": KEY_VALUE}, {"type": "DELETE", "kv": KEY_VALUE}]}},
    {"result": {"header": HEADER, "created": True}},
    {"result": {"header": HEADER, "canceled": True, "compact_revision": "5"}},
    {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}},
]


@given(tampered_json(V2), st.sampled_from([200, 201, 400, 404, 500]))
def test_a_tampered_answer_of_v2_is_news_or_refused(body: Any, status: int) -> None:
    answer = Answer("http://a:1", status, AT, "application/json", body=json.dumps(body).encode())
    reader = LeaseReader(PATH)
    with suppress(Retryable, ServerFailed):
        reply = read(answer)
        for node in reply.children:
            if key := reader.lease_key(node):
                reader.lease(node, key)
        reader.news((reply,))


@given(tampered_json(V3))
def test_a_tampered_word_of_a_watch_of_v3_is_news_or_refused(body: Any) -> None:
    reader = LeaseReader(PATH)
    with suppress(Retryable, ServerFailed):
        result = v3_messages.stream_object(json.dumps(body).encode(), "http://a:1")
        told, at = v3_messages.changes(result, Position(5, "9"), Position(6, "9"))
        for action, found in told:
            reader.news((KeyReply(action, found.node(86400.0), (), at),))


@pytest.mark.parametrize("seconds", [2**63, -(2**63), 10**400], ids=["large", "negative", "huge"])
def test_a_time_to_live_beyond_64_bits_is_not_etcds(seconds: int) -> None:
    body = json.dumps(V2[0] | {"node": NODE | {"ttl": seconds}}).encode()
    with pytest.raises(ServerFailed):
        read(Answer("http://a:1", 200, AT, "application/json", body=body))
    with pytest.raises(ServerFailed):
        v3_messages.understood({"TTL": seconds})


# ---- far too large -------------------------------------------------------------------------------

#: Seconds of this thread's own time. Each takes a tenth of it at most.
BOUND = 2.0
HUGE: dict[str, tuple[Callable[[Any], object], Any]] = {
    "a config with an endless network": (config.parse, json.dumps({"Network": "1" * 10**6})),
    "a config with an endless key": (config.parse, json.dumps({**CONFIG, "x" * 10**6: 0})),
    "a config with many keys": (
        config.parse,
        json.dumps(CONFIG | {f"Networks{number}": 0 for number in range(50_000)}),
    ),
    "a deep config": (config.parse, '{"a":' * 200_000),
    "a deep list": (config.parse, "[" * 10**6),
    "a long number": (gojson.parse, "1" * 10**6),
    "a large number": (gojson.parse, "1e" + "1" * 10**6),
    "many halves of characters": (gojson.parse, '"' + r"\ud800" * 200_000 + '"'),
    "a lease with much data": (codec.parse_attrs, json.dumps(ATTRS | {"BackendData": [[]] * 300_000})),
    "an endless key": (codec.parse_key, "1" * 10**6),
    "an endless MAC": (codec.parse_mac, "0" * 10**6),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_input_is_parsed_quickly(name: str) -> None:
    deal_with, given_value = HUGE[name]
    begin = time.thread_time()
    with suppress(FlannelError, gojson.GoJsonError):
        deal_with(given_value)
    assert time.thread_time() - begin < BOUND


def test_first_of_many_unknown_keys_are_named() -> None:
    assert len(config.parse(HUGE["a config with many keys"][1]).warnings) == 10
