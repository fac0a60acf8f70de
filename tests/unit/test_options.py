from __future__ import annotations

import json
from ipaddress import ip_address

import pytest
from msgspec import structs

from flanneld.errors import Fatal
from flanneld.options import (
    FLAGS,
    HelpWanted,
    Options,
    UsageError,
    VersionWanted,
    read,
    unknown_variables,
    usage,
)

#: Go flanneld's defaults, as its usage text has them. Ours are etcd-api, etcd-transport,
#: iface-wait and secret-dir.
DEFAULTS = {
    "etcd-endpoints": "http://127.0.0.1:4001,http://127.0.0.1:2379",
    "etcd-prefix": "/coreos.com/network",
    "etcd-keyfile": "",
    "etcd-certfile": "",
    "etcd-cafile": "",
    "etcd-username": "",
    "etcd-password": "",
    "etcd-api": "auto",
    "etcd-transport": "auto",
    "listen": "",
    "remote": "",
    "remote-keyfile": "",
    "remote-certfile": "",
    "remote-cafile": "",
    "store": "",
    "network": "",
    "serve-only": False,
    "require-token": False,
    "token": "",
    "token-file": "",
    "networks": "",
    "watch-networks": False,
    "max-networks": 64,
    "allow-extension": True,
    "subnet-dir": "/run/flannel/networks",
    "iface": (),
    "iface-regex": (),
    "iface-can-reach": "",
    "iface-wait": 0,
    "subnet-file": "/run/flannel/subnet.env",
    "public-ip": "",
    "public-ipv6": "",
    "subnet-lease-renew-margin": 60,
    "cleanup": False,
    "all": False,
    "migrate-etcd-v2-to-v3": False,
    "dry-run": False,
    "plan": False,
    "removal-guard": True,
    "peer-probes": 0,
    "follow-path-mtu": False,
    "answer-port": 0,
    "disable-tx-checksum-offload": False,
    "wireguard-port": 0,
    "public-name": "",
    "ip-masq": False,
    "ip-masq-fully-random-disable": False,
    "kube-subnet-mgr": False,
    "kube-api-url": "",
    "kube-annotation-prefix": "flannel.alpha.coreos.com",
    "kubeconfig-file": "",
    "net-config-path": "/etc/kube-flannel/net-conf.json",
    "cni-conf": "",
    "cni-template": "/etc/kube-flannel/cni-conf.json",
    "cni-bin": "/opt/cni/bin",
    "state-dir": "/var/lib/flannel",
    "secret-dir": "/run/flannel",
    "guard-tunnel": False,
    "healthz-ip": "0.0.0.0",
    "healthz-port": 0,
    "iptables-resync": 5,
    "iptables-forward-rules": True,
    "iptables-rules": "own-chains",
    "iptables-flavour": "auto",
    "ip-blackhole-route": False,
    "route-protocol-spread": "auto",
    "set-node-network-unavailable": True,
    "keep-forwarding": False,
    "v": 0,
    "vmodule": "",
    "logging-format": "text",
    "log_backtrace_at": "",
}


def test_flags_and_defaults_are_go_flannelds() -> None:
    assert {flag.name: flag.default for flag in FLAGS} == DEFAULTS


def test_each_field_is_named_as_its_flag() -> None:
    names = [flag.name.replace("-", "_") for flag in FLAGS]
    assert [f.name for f in structs.fields(Options)] == [*names, "given"]


def test_an_api_of_etcd_that_does_not_exist_is_refused() -> None:
    assert read([], {"FLANNELD_ETCD_API": "v3"}).etcd_api == "v3"
    with pytest.raises(Fatal, match="one of: auto, v2, v3"):
        read(["-etcd-api=v4"], {})


def test_nothing_given_leaves_the_defaults() -> None:
    assert read([], {}) == Options()
    assert Options().etcd_endpoints == ("http://127.0.0.1:4001", "http://127.0.0.1:2379")


def test_values_get_their_types() -> None:
    options = read(
        ["-iface=eth0", "-iface", "10.0.0.1", "--iface-regex=^10\\.", "-public-ip=192.0.2.1", "-v=0x10"],
        {"FLANNELD_PUBLIC_IPV6": "2001:db8::1", "FLANNELD_IFACE_CAN_REACH": "192.0.2.9"},
    )
    assert options.iface == ("eth0", "10.0.0.1")
    assert options.iface_regex == ("^10\\.",)
    assert options.public_ip == ip_address("192.0.2.1")
    assert options.public_ipv6 == ip_address("2001:db8::1")
    assert options.iface_can_reach == ip_address("192.0.2.9")
    assert options.v == 16


def test_the_command_line_comes_before_the_environment() -> None:
    environ = {"FLANNELD_ETCD_PREFIX": "/environment", "FLANNELD_ETCD_USERNAME": "environment"}
    options = read(["-etcd-prefix=/line"], environ)
    assert (options.etcd_prefix, options.etcd_username) == ("/line", "environment")


def test_the_command_line_replaces_a_repeatable_flag_from_the_environment() -> None:
    assert read(["-iface=a"], {"FLANNELD_IFACE": "b"}).iface == ("a",)


def test_the_environment_gives_a_repeatable_flag_one_element() -> None:
    assert read([], {"FLANNELD_IFACE": "a,b"}).iface == ("a,b",)


def test_an_empty_variable_is_ignored() -> None:
    assert read([], {"FLANNELD_ETCD_PREFIX": "", "FLANNELD_V": ""}) == Options()


def test_a_variable_overruled_by_the_command_line_is_not_even_read() -> None:
    assert read(["-v=2"], {"FLANNELD_V": "nonsense"}).v == 2


def test_underscores_in_a_flags_name_stay_in_its_variable() -> None:
    assert read([], {"FLANNELD_LOG_BACKTRACE_AT": "main.py:3"}).log_backtrace_at == "main.py:3"


def test_a_bad_flag_comes_with_the_usage_text() -> None:
    with pytest.raises(UsageError) as caught:
        read(["-nonsense"], {}, program="/opt/bin/flanneld")
    assert str(caught.value) == caught.value.reason == "flag provided but not defined: -nonsense"
    assert caught.value.usage == usage("/opt/bin/flanneld")


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match="FLANNELD_HEALTHZ_PORT"):
        read([], {"FLANNELD_HEALTHZ_PORT": "http"})


def test_the_usage_text_begins_with_the_program_and_names_every_flag() -> None:
    first, *lines = usage("/opt/bin/flanneld").splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  -")]
    assert "/opt/bin/flanneld" in first
    assert named == sorted(f"-{name}" for name in (*DEFAULTS, "version"))


@pytest.mark.parametrize("word", ["-h", "-help", "--help"])
def test_help_is_wanted_before_the_environment_is_read(word: str) -> None:
    with pytest.raises(HelpWanted) as caught:
        read([word], {"FLANNELD_V": "nonsense"})
    assert caught.value.usage == usage("flanneld")


def test_the_version_is_wanted_before_the_environment_is_read() -> None:
    with pytest.raises(VersionWanted):
        read(["-version"], {"FLANNELD_V": "nonsense"})


def test_a_mistake_after_version_is_still_a_mistake() -> None:
    with pytest.raises(UsageError):
        read(["-version", "-nonsense"], {})


@pytest.mark.parametrize("text", ["true", "nonsense"])
def test_the_environment_cannot_ask_for_the_version(text: str) -> None:
    assert read(["-version=false"], {"FLANNELD_VERSION": text}) == Options()


@pytest.mark.parametrize("minutes", [1, 1439])
def test_a_margin_shorter_than_a_lease_is_taken(minutes: int) -> None:
    assert read([f"-subnet-lease-renew-margin={minutes}"], {}).subnet_lease_renew_margin == minutes


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("subnet-lease-renew-margin", "0"),
        ("subnet-lease-renew-margin", "1440"),
        ("healthz-port", "65536"),
        ("iface-wait", "-1"),
        ("public-ip", "eth0"),
        ("public-ip", "2001:db8::1"),
        ("public-ip", "192.0.2.1/24"),
        ("public-ipv6", "192.0.2.1"),
        ("public-ipv6", "fe80::1%eth0"),
        ("iface-can-reach", "example.org"),
        ("iface-regex", "eth["),
        ("iface-regex", "a{99999999999999999999}"),
        ("iface-regex", "eth(?=0)"),
        ("etcd-endpoints", ","),
        ("etcd-endpoints", " , "),
        ("etcd-endpoints", "http://10.0.0.1:2379 http://10.0.0.2:2379"),
        ("etcd-endpoints", "10.0.0.1"),
        ("etcd-endpoints", "ftp://10.0.0.1:2379"),
        ("etcd-endpoints", "http://"),
        ("etcd-endpoints", "http://10.0.0.1:port"),
        ("etcd-endpoints", "http://10.0.0.1:70000"),
        ("etcd-endpoints", "http://[::1:2379"),
        ("etcd-endpoints", "http://10.0.0.1:2379\n"),
    ],
)
def test_a_value_out_of_bounds_is_fatal_and_its_source_named(flag: str, text: str) -> None:
    variable = "FLANNELD_" + flag.upper().replace("-", "_")
    with pytest.raises(Fatal, match=rf"^-{flag}: |^-{flag} is ") as caught:
        read([f"-{flag}={text}"], {})
    assert caught.value.remedy
    with pytest.raises(Fatal, match=rf"^{variable}"):
        read([], {variable: text})


def test_an_explicitly_empty_list_of_endpoints_is_fatal() -> None:
    with pytest.raises(Fatal, match=r'^-etcd-endpoints: ""'):
        read(["-etcd-endpoints="], {})


def test_the_endpoint_that_is_wrong_is_named() -> None:
    with pytest.raises(Fatal, match=r'"10\.0\.0\.2"'):
        read(["-etcd-endpoints=http://10.0.0.1:2379,10.0.0.2"], {})


@pytest.mark.parametrize("endpoint", ["http://[::1]:2379", "HTTPS://etcd.example.org", "http://u:p@h:1/"])
def test_any_http_url_is_an_endpoint(endpoint: str) -> None:
    assert read([f"-etcd-endpoints={endpoint}"], {}).etcd_endpoints == (endpoint,)


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("10.0.0.1:2379", ("10.0.0.1:2379",)),
        ("[::1]:2379,etcd:2379", ("[::1]:2379", "etcd:2379")),
        ("http://a:1, http://b:1 ", ("http://a:1", "http://b:1")),
        ("http://a:1,", ("http://a:1",)),
        (",http://a:1, ,http://b:1", ("http://a:1", "http://b:1")),
    ],
)
def test_endpoints_that_run_under_go_run_here(text: str, urls: tuple[str, ...]) -> None:
    assert read([f"-etcd-endpoints={text}"], {}).etcd_endpoints == urls
    assert read([], {"FLANNELD_ETCD_ENDPOINTS": text}).etcd_endpoints == urls


def test_patterns_are_gos_and_stay_as_they_were_written() -> None:
    pattern = r"^eth[[:digit:]]+\z"
    options = read([f"-iface-regex={pattern}"], {})
    assert options.iface_regex == (pattern,)
    assert options.described() == f"iface-regex={pattern}"


def test_an_empty_address_is_no_address() -> None:
    assert repr(read(["-public-ip=", "-public-ipv6="], {})) == repr(Options())


def test_only_what_differs_from_the_defaults_is_described() -> None:
    assert Options().described() == ""
    argv = [
        "-iface=eth0",
        "-iface=my if",
        "-iface-regex=^e",
        "-iptables-forward-rules=false",
        "-v=2",
        "-public-ip=192.0.2.1",
        "-etcd-prefix=/coreos.com/network",
        "-etcd-username=",
        "-etcd-endpoints=http://a:1,http://b:2",
        "-subnet-file=",
    ]
    assert read(argv, {}).described() == (
        'etcd-endpoints=http://a:1,http://b:2 iface=eth0 iface="my if" iface-regex=^e subnet-file=""'
        " public-ip=192.0.2.1 iptables-forward-rules=false v=2"
    )


@pytest.mark.parametrize("name", ["PSK", "psk", "AccessKeySecret"])
def test_no_secret_in_a_network_config_is_ever_shown(name: str) -> None:
    config = json.dumps({"Network": "10.5.0.0/16", "Backend": {name: 'top "s3cret', "Type": "x"}})
    text = read([f"-network={config}", "-store=/leases.db", "-listen=192.0.2.1:1"], {}).described()
    assert "s3cret" not in text
    assert "***" in text
    assert "10.5.0.0/16" in text


def test_servers_are_shown_as_they_are_given() -> None:
    options = read(["-remote=192.0.2.20:8888,[2001:db8::1]:8888"], {})
    assert "RemoteServer" not in options.described()
    assert "192.0.2.20:8888" in options.described()
    assert "[2001:db8::1]:8888" in options.described()


def test_no_password_is_ever_shown() -> None:
    endpoints = "http://root:s3cr3t@a:1,http://b:2,https://root:s3c@r3t@c"
    api = "-kube-api-url=admin:s3cr3t@10.0.0.1:8080"
    options = read([f"-etcd-endpoints={endpoints}", "-etcd-password", "s3cr3t", api], {})
    for text in (options.described(), repr(options), str(structs.replace(options, v=1)), f"{options}"):
        assert "s3c" not in text
        assert "etcd-endpoints=http://***@a:1,http://b:2,https://***@c" in text
        assert "etcd-password=***" in text
        assert "kube-api-url=***@10.0.0.1:8080" in text


@pytest.mark.parametrize("url", ["http://root:s3,cr3t@a:1", "http://root:s3/cr3t@a:1", "root:s3cr3t@a:1"])
def test_a_bad_endpoint_with_a_password_is_named_by_its_place(url: str) -> None:
    with pytest.raises(Fatal, match="element 2") as caught:
        read([f"-etcd-endpoints=http://b:1,{url}"], {})
    assert "s3" not in str(caught.value)


@pytest.mark.parametrize("what", ["-cleanup", "-migrate-etcd-v2-to-v3"])
def test_a_dry_run_is_one_of_either_command(what: str) -> None:
    assert read([what, "-dry-run"], {}).dry_run


@pytest.mark.parametrize(("word", "seconds"), [("0", 1), ("-5", 1), ("1", 1), ("7", 7)])
def test_resync_below_a_second_is_a_second(word: str, seconds: int) -> None:
    assert read([f"-iptables-resync={word}"], {}).iptables_resync == seconds


def test_two_commands_at_once_are_refused() -> None:
    with pytest.raises(Fatal, match="give one of them"):
        read(["-cleanup", "-migrate-etcd-v2-to-v3"], {})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-token=x"], "-token is for -remote"),
        (["-token-file=/x"], "-token-file is for -remote"),
        (["-remote=192.0.2.1:8888", "-token=x", "-token-file=/x"], "are two tokens"),
        (["-store=/x", "-kube-subnet-mgr"], "-store and -kube-subnet-mgr name two stores"),
        (["-store=/x", "-remote=192.0.2.1:8888"], "-store and -remote name two stores"),
        (["-network=n"], "-network is for the network in -store"),
        (["-serve-only"], "-serve-only is for -listen with -store"),
        (["-store=/x", "-require-token"], "-require-token is for -listen with -store"),
    ],
)
def test_options_of_which_one_needs_or_excludes_another_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(Fatal, match=problem):
        read(words, {})


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("-iptables-rules=mine", "give one of: own-chains, v0.12"),
        ("-iptables-flavour=new", "give one of: auto, legacy, nft"),
        ("-dry-run", "give one of them too"),
        ("-all", "give -cleanup too"),
        ("-peer-probes=-1", "give 0 to 600"),
        ("-peer-probes=601", "give 0 to 600"),
        ("-answer-port=65536", "give 1 to 65535"),
        ("-wireguard-port=65536", "give 1 to 65535"),
        ("-wireguard-port=-1", "give 1 to 65535"),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_what_does(word: str, remedy: str) -> None:
    with pytest.raises(Fatal, match=remedy):
        read([word], {})


@pytest.mark.parametrize(
    ("argv", "environ", "guard"),
    [
        (["-removal-brake=false"], {}, False),
        ([], {"FLANNELD_REMOVAL_BRAKE": "false"}, False),
        (["-removal-guard"], {"FLANNELD_REMOVAL_BRAKE": "false"}, True),
        (["-removal-brake=false", "-removal-guard"], {}, True),
    ],
)
def test_former_name_of_a_flag_is_accepted(argv: list[str], environ: dict[str, str], guard: bool) -> None:
    assert read(argv, environ).removal_guard is guard
    assert unknown_variables(environ) == []
    assert "removal-brake" not in usage("flanneld")
