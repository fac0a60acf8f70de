"""Taking less of a library: what is not used is not loaded, and what is used works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.local_etcd import LocalEtcd


def loaded_after(program: str) -> set[str]:
    """The modules that a fresh interpreter has after a program."""
    show = "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program + show], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_etcd_client_does_not_load_the_resolver_of_srv_records() -> None:
    loaded = loaded_after("import flanneld.subnet.etcd.v2")
    assert "etcd.client" in loaded
    assert "dns.message" not in loaded


def test_the_store_in_etcd_v3_loads_neither_python_etcd_nor_grpc(etcd: LocalEtcd) -> None:
    etcd.keys("v3").put("/loaded/config", '{"Network": "10.3.0.0/16"}')
    loaded = loaded_after(
        "from flanneld.subnet.etcd.api_choice import open_etcd;"
        "from flanneld.subnet.etcd.transport import EtcdOptions;"
        f"open_etcd(EtcdOptions(({etcd.url!r},), '/loaded')).network_config()"
    )
    assert "flanneld.subnet.etcd.v3" in loaded
    assert not {"etcd", "etcd.client", "grpc", "flanneld.subnet.etcd.grpc"} & loaded


def test_the_store_in_kubernetes_loads_neither_models_nor_what_only_a_kubeconfig_needs() -> None:
    loaded = loaded_after("import flanneld.subnet.kube.store")
    assert "kubernetes.client.rest" in loaded
    assert not {"kubernetes.client.models", "kubernetes.client.api", "pydantic", "yaml", "etcd"} & loaded


def test_the_other_stores_load_nothing_of_kubernetes() -> None:
    assert not {"kubernetes", "flanneld.subnet.kube.store"} & loaded_after("import flanneld.main")


def test_deferred_module_is_loaded_by_its_first_use() -> None:
    defer = "from flanneld.runtime.imports import defer; defer('email.mime.text'); import email.mime.text; "
    assert "email.mime.nonmultipart" not in loaded_after(defer)
    assert "email.mime.nonmultipart" in loaded_after(defer + "email.mime.text.MIMEText('x')")


def test_packages_that_we_defer_are_whole_for_other_code_in_the_process() -> None:
    programs = {
        "from flanneld.network.rtnetlink import devices as d; d._message('set', (), 7, True)": (
            "from pyroute2 import IPRoute, NDB; import pyroute2; pyroute2.netlink.rtnl.ifinfmsg.ifinfmsg"
        ),
        "import flanneld.subnet.kube.store": (
            "from kubernetes.config import load_kube_config; import kubernetes; kubernetes.watch.Watch"
        ),
        "import flanneld.subnet.etcd.v2": (
            "import urllib3, dns; urllib3.http2.inject_into_urllib3; dns.resolver.Resolver"
        ),
    }
    for ours, theirs in programs.items():
        loaded_after(f"{ours}\n{theirs}\nimport importlib, sys; importlib.invalidate_caches()")


def test_threads_that_use_a_deferred_module_at_once_all_see_it_whole(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(0.2)\nready = True\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from flanneld.runtime.imports import defer; defer('slow_to_load'); import slow_to_load\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    assert all(pool.map(lambda _: slow_to_load.ready, range(8)))\n"
    )
    assert "slow_to_load" in loaded_after(program)


def test_deferred_module_whose_load_failed_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "fails_once.py").write_text(
        "import sys\n"
        "if not hasattr(sys, 'tried'):\n"
        "    sys.tried = True\n"
        "    raise MemoryError\n"
        "ready = True\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from contextlib import suppress\n"
        "from flanneld.runtime.imports import defer; defer('fails_once'); import fails_once\n"
        "with suppress(MemoryError): fails_once.ready\n"
        "assert fails_once.ready\n"
    )
    assert "fails_once" in loaded_after(program)


def test_deferred_package_that_is_not_installed_is_missing() -> None:
    program = "from flanneld.runtime.imports import defer; defer('flanneld.nothing', 'part')\n"
    program += "try:\n  import flanneld.nothing\nexcept ModuleNotFoundError: import email.mime.text"
    assert "email.mime.text" in loaded_after(program)


def test_the_daemon_starts_without_pyroute2_and_http_server() -> None:
    loaded = loaded_after("import flanneld.main")
    assert not {"pyroute2", "http.server", "dotenv", "asyncio", "argparse"} & loaded


def test_making_a_device_takes_no_event_loop() -> None:
    program = "from flanneld.network.rtnetlink import devices as d\n"
    program += "d._message('set', [('IFLA_MTU', 1450)], 7, True)"
    loaded = loaded_after(program)
    assert "pyroute2.netlink.rtnl.ifinfmsg" in loaded
    assert not {"asyncio", "ctypes"} & loaded


def test_etcd_without_grpc_does_not_load_its_library() -> None:
    loaded = loaded_after("import flanneld.subnet.etcd.v3")
    assert "flanneld.subnet.etcd.carriers" in loaded
    assert not {"grpc", "flanneld.subnet.etcd.grpc"} & loaded


def test_only_requests_of_backends_and_the_clients_of_two_stores_need_urllib3() -> None:
    others = ("fleet", "subnet.etcd.v3", "subnet.remote.store", "backends.cloud.aws")
    loaded = loaded_after("".join(f"import flanneld.{each}\n" for each in others))
    assert "flanneld.backends.cloud.record" in loaded
    assert not {"urllib3", "requests", "etcd"} & loaded


def test_the_daemon_takes_typing_as_it_is() -> None:
    program = "from flanneld import __main__ as start\nstart._load(is_limited=False)"
    loaded = loaded_after(program)
    assert "flanneld.main" in loaded
    assert not {"typing_extensions", "inspect", "ast"} & loaded
    assert "typing_extensions" in loaded_after(f"{program}\nimport typing_extensions")


def test_etcd_without_tls_needs_neither_openssl_nor_urllib3() -> None:
    loaded = loaded_after("import flanneld.main, flanneld.subnet.etcd.v2")
    assert "etcd.client" in loaded
    assert not {"_ssl", "_hashlib", "urllib3.connectionpool"} & loaded


def test_neither_a_backend_of_ours_nor_http_looks_through_installed_packages() -> None:
    program = "import flanneld.runtime.sockets.http_client\n"
    program += "from flanneld.backends.registry import load\nload('vxlan')"
    loaded = loaded_after(program)
    assert {"flanneld.backends.vxlan", "urllib3.connectionpool"} <= loaded
    assert not {"importlib.metadata", "zipfile"} & loaded


def test_a_packet_pump_loads_little_so_that_it_is_there_soon() -> None:
    loaded = loaded_after("from flanneld.backends.udp.proxy import __main__, native, plane")
    assert not {"pyroute2", "urllib3", "subprocess", "json", "argparse"} & loaded
