"""The Helm chart: the manifest's objects, and what each value changes in them."""

from __future__ import annotations

import json
from base64 import b64encode
from ipaddress import IPv4Address
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from flanneld import __version__, config, options
from flanneld.backends import registry
from flanneld.backends.contract import Backend, Host
from flanneld.errors import Fatal
from flanneld.model import Uplink
from tests.kubernetes_objects import (
    CHART,
    Object,
    arguments,
    daemon,
    files_of,
    init_containers,
    manifest,
    pod,
    render,
    volumes,
)

ALL_THERE_IS: Object = {
    "global": {"imagePullSecrets": [{"name": "a-secret"}]},
    "podCidrv6": "fc00::/48",
    "flannel": {"nodeSelector": {"a": "b"}, "backend": "udp", "backendPort": 9000},
    "netpol": {"enabled": True},
}
AS_LITTLE_AS_POSSIBLE: Object = {
    "flannel": {
        "tolerations": [],
        "resources": None,
        "healthz": {"port": 0},
        "answerPort": 0,
        "skipCNIConfigInstallation": True,
    },
}
VARIANTS = pytest.mark.parametrize(
    "values", [{}, ALL_THERE_IS, AS_LITTLE_AS_POSSIBLE], ids=["default", "all", "little"]
)


def flannel(**values: Any) -> dict[str, Object]:
    """The objects with these values below ``flannel``."""
    return render({"flannel": values})


@VARIANTS
def test_kubernetes_knows_every_field(values: Object) -> None:
    for each in render(values).values():
        kubernetes_validate.validate(each, "1.37", strict=True)


@VARIANTS
def test_every_place_in_a_container_is_one_of_the_pods_volumes(values: Object) -> None:
    objects = render(values)
    containers = [*pod(objects)["initContainers"], *pod(objects)["containers"]]
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} <= set(volumes(objects))


@VARIANTS
def test_the_arguments_are_flags_of_flanneld(values: Object) -> None:
    flags = {each.partition("=")[0].removeprefix("--") for each in arguments(render(values))}
    assert {"ip-masq", "kube-subnet-mgr"} <= flags
    assert flags <= {flag.name for flag in options.FLAGS}


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    findings = helm_python.lint(str(CHART))
    assert findings["errors"] == []
    assert [each["error"] for each in findings["messages"]] == ["icon is recommended"]


def test_it_is_the_chart_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_it_makes_the_objects_of_the_manifest() -> None:
    """But for the namespace, which is Helm's to make, and the layout of the ConfigMap's files."""
    ours, charts = manifest(), render({})
    del ours["Namespace"]
    assert files_of(charts) == files_of(ours)
    assert arguments(charts) == arguments(ours)
    for objects in (ours, charts):
        del objects["ConfigMap"]["data"], daemon(objects)["command"], daemon(objects)["args"]
    assert charts == ours


def test_it_goes_into_the_namespace_of_the_release() -> None:
    objects = render({}, namespace="elsewhere")
    names = {kind: each["metadata"].get("namespace") for kind, each in objects.items()}
    assert names == {
        "ServiceAccount": "elsewhere",
        "ConfigMap": "elsewhere",
        "DaemonSet": "elsewhere",
        "ClusterRole": None,
        "ClusterRoleBinding": None,
        "Role": "default",
        "RoleBinding": "default",
    }
    assert objects["ClusterRoleBinding"]["subjects"][0]["namespace"] == "elsewhere"


PSK = b64encode(bytes(range(32))).decode()
BACKENDS = pytest.mark.parametrize(
    ("values", "backend"),
    [
        ({}, {"Type": "vxlan"}),
        (
            {"vni": 7, "backendPort": 4789, "mtu": 1400},
            {"Type": "vxlan", "VNI": 7, "Port": 4789, "MTU": 1400},
        ),
        ({"GBP": True, "directRouting": True}, {"Type": "vxlan", "GBP": True, "DirectRouting": True}),
        ({"macPrefix": "0E-2A"}, {"Type": "vxlan", "MacPrefix": "0E-2A"}),
        (
            {"also": {"Type": "wireguard", "ListenPort": 1}},
            {"Type": "vxlan", "Also": {"Type": "wireguard", "ListenPort": 1}},
        ),
        ({"backend": "host-gw", "vni": 7, "mtu": 1400}, {"Type": "host-gw"}),
        ({"backend": "udp", "backendPort": 9000, "vni": 7}, {"Type": "udp", "Port": 9000}),
        (
            {"backend": "ipsec", "psk": "x" * 96, "udpEncap": True, "espProposal": "aes256-sha256", "mtu": 9},
            {"Type": "ipsec", "PSK": "x" * 96, "UDPEncap": True, "ESPProposal": "aes256-sha256"},
        ),
        (
            {"backend": "wireguard", "backendPort": 1, "backendPortv6": 2, "psk": PSK, "mtu": 1400}
            | {"tunnelMode": "auto", "keepaliveInterval": 25, "vni": 7},
            {"Type": "wireguard", "ListenPort": 1, "ListenPortV6": 2, "PSK": PSK, "MTU": 1400}
            | {"Mode": "auto", "PersistentKeepaliveInterval": 25},
        ),
    ],
)


@BACKENDS
def test_a_backend_is_given_the_values_that_it_knows(values: Object, backend: Object) -> None:
    assert files_of(flannel(**values))["net-conf.json"]["Backend"] == backend


def daemons_backend(**values: Any) -> Backend:
    """Make the backend as the daemon does from the network config in the objects."""
    found = config.parse(flannel(**values)["ConfigMap"]["data"]["net-conf.json"])
    assert found.warnings == ()
    address = IPv4Address("192.0.2.1")
    uplink = Uplink("eth0", 2, 1500, address, address)
    return registry.factory_for(found)(found, Host(uplink, None, lambda _: None, lambda _: None, bytes))


@BACKENDS
def test_the_daemon_accepts_the_values_of_a_backend(values: Object, backend: Object) -> None:
    made = daemons_backend(**values)
    assert made.mtu < 1500 or backend["Type"] == "host-gw"


def test_the_daemon_refuses_a_value_that_is_none_of_its_backend() -> None:
    for values in ({"backend": "wireguard", "psk": "x"}, {"backend": "ipsec", "psk": "x"}):
        with pytest.raises(Fatal, match=r"(?i)psk"):
            daemons_backend(**values)


@pytest.mark.parametrize(
    ("values", "backend"),
    [
        (
            {"vni": "7", "mtu": "1400", "directRouting": "true", "GBP": "false"},
            {"Type": "vxlan", "VNI": 7, "MTU": 1400, "DirectRouting": True, "GBP": False},
        ),
        ({"vni": 16777215, "backendPort": 4789.0}, {"Type": "vxlan", "VNI": 16777215, "Port": 4789}),
        ({"backend": "wireguard", "psk": 7}, {"Type": "wireguard", "PSK": "7"}),
        ({"backend": "wireguard", "psk": "7"}, {"Type": "wireguard", "PSK": "7"}),
    ],
)
def test_a_value_may_be_text_where_upstreams_chart_takes_it(values: Object, backend: Object) -> None:
    """As from ``--set-string``, and from what calls Helm with nothing but strings."""
    found = files_of(flannel(**values))["net-conf.json"]["Backend"]
    assert json.dumps(found, sort_keys=True) == json.dumps(backend, sort_keys=True)  # 7, not 7.0


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"podCidr": "10.1.0.0/16"}, {"Network": "10.1.0.0/16"}),
        (
            {"podCidrv6": "fc00::/48"},
            {"Network": "10.244.0.0/16", "EnableIPv6": True, "IPv6Network": "fc00::/48"},
        ),
        (
            {"podCidr": "", "podCidrv6": "fc00::/48"},
            {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fc00::/48"},
        ),
    ],
)
def test_a_family_is_on_if_it_has_a_network(values: Object, keys: Object) -> None:
    found = files_of(render(values))["net-conf.json"]
    assert found == keys | {"EnableNFTables": False, "Backend": {"Type": "vxlan"}}


def test_nftables_can_be_asked_for() -> None:
    for value in (True, "true"):
        assert files_of(flannel(enableNFTables=value))["net-conf.json"]["EnableNFTables"] is True


def test_the_images_can_come_from_elsewhere() -> None:
    objects = flannel(
        image={"repository": "registry.example/flanneld", "tag": "1"},
        flannel_cni={"image": {"repository": "registry.example/cni", "tag": "2"}},
    )
    assert init_containers(objects)["install-cni-plugin"]["image"] == "registry.example/cni:2"
    assert init_containers(objects)["install-cni"]["image"] == "registry.example/flanneld:1"
    assert daemon(objects)["image"] == "registry.example/flanneld:1"


def test_the_places_of_cni_on_the_hosts_can_be_others() -> None:
    found = volumes(flannel(cniBinDir="/a/bin", cniConfDir="/a/net.d"))
    assert found["cni-plugin"]["hostPath"]["path"] == "/a/bin"
    assert found["cni"]["hostPath"]["path"] == "/a/net.d"


def test_the_cni_configuration_can_be_another_or_be_left_to_others() -> None:
    objects = flannel(cniConf='{"name": "other"}', skipCNIConfigInstallation=True)
    assert files_of(objects)["cni-conf.json"] == {"name": "other"}
    assert set(init_containers(objects)) == {"install-cni-plugin"}
    assert not [each for each in arguments(objects) if "cni" in each]


def test_the_arguments_are_those_given_and_the_ports() -> None:
    args = ["--kube-subnet-mgr", "--iface=eth1"]
    found = daemon(flannel(args=args, healthz={"port": 9099}, answerPort=9100))
    assert found["command"] == ["/opt/bin/flanneld", *args, "--healthz-port=9099"]
    assert "--answer-port=9100" in found["args"]
    assert found["ports"][0]["containerPort"] == 9099


def test_without_a_health_port_nobody_asks_for_health() -> None:
    found = daemon(flannel(healthz={"port": 0}))
    assert not {"ports", "livenessProbe", "readinessProbe"} & set(found)
    assert found["command"] == ["/opt/bin/flanneld", "--ip-masq", "--kube-subnet-mgr"]


def test_answer_port_can_be_switched_off() -> None:
    assert "--answer-port=0" in daemon(flannel(answerPort=0))["args"]


def test_where_and_how_the_pods_run_can_be_chosen() -> None:
    objects = render(
        {
            "global": {"imagePullSecrets": [{"name": "a-secret"}]},
            "flannel": {
                "tolerations": [{"key": "a", "operator": "Exists"}],
                "nodeSelector": {"kubernetes.io/arch": "arm64"},
                "resources": {"limits": {"memory": "200Mi"}, "requests": None},
            },
        }
    )
    assert pod(objects)["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert pod(objects)["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert pod(objects)["imagePullSecrets"] == [{"name": "a-secret"}]
    assert daemon(objects)["resources"] == {"limits": {"memory": "200Mi"}}


def test_udp_gets_the_tun_device() -> None:
    objects = flannel(backend="udp")
    assert {"name": "tun", "mountPath": "/dev/net/tun"} in daemon(objects)["volumeMounts"]
    assert volumes(objects)["tun"]["hostPath"] == {"path": "/dev/net/tun", "type": "CharDevice"}


def test_network_policies_come_with_a_container_and_rights_of_their_own() -> None:
    objects = render({"netpol": {"enabled": True}})
    assert [each["name"] for each in pod(objects)["containers"]] == ["kube-flannel", "kube-network-policies"]
    resources = {name for rule in objects["ClusterRole"]["rules"] for name in rule["resources"]}
    policies = {"networkpolicies", "adminnetworkpolicies", "baselineadminnetworkpolicies"}
    assert policies | {"pods", "nodes", "namespaces"} <= resources
