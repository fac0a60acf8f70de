"""Taking less of a library: what is not used is not loaded, and what is used works."""

from __future__ import annotations

import subprocess
import sys


def loaded_after(program: str) -> set[str]:
    """The modules that a fresh interpreter has after a program."""
    show = "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program + show], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_etcd_client_does_not_load_the_resolver_of_srv_records() -> None:
    loaded = loaded_after("import flanneld.subnet.etcd_v2_client")
    assert "etcd.client" in loaded
    assert "dns.message" not in loaded


def test_a_deferred_module_is_loaded_by_its_first_use() -> None:
    defer = "from flanneld.imports import lazily; lazily('email.mime.text'); import email.mime.text; "
    assert "email.mime.nonmultipart" not in loaded_after(defer)
    assert "email.mime.nonmultipart" in loaded_after(defer + "email.mime.text.MIMEText('x')")


def test_the_daemon_starts_without_pyroute2_and_http_server() -> None:
    loaded = loaded_after("import flanneld.main")
    assert not {"pyroute2", "http.server", "dotenv", "asyncio", "argparse"} & loaded


def test_making_a_device_takes_no_event_loop() -> None:
    program = "from flanneld.network import devices as d; d._message('set', [('IFLA_MTU', 1450)], 7, True)"
    loaded = loaded_after(program)
    assert "pyroute2.netlink.rtnl.ifinfmsg" in loaded
    assert not {"asyncio", "ctypes"} & loaded


def test_etcd_without_grpc_does_not_load_its_library() -> None:
    loaded = loaded_after("import flanneld.subnet.etcd_v3_client")
    assert "flanneld.subnet.etcd_v3_carrier" in loaded
    assert not {"grpc", "flanneld.subnet.etcd_v3_grpc"} & loaded


def test_neither_a_backend_of_ours_nor_http_looks_through_installed_packages() -> None:
    program = "import flanneld.subnet.etcd_v3_client; from flanneld.backends import load; load('vxlan')"
    loaded = loaded_after(program)
    assert {"flanneld.backends.vxlan", "urllib3.connectionpool"} <= loaded
    assert not {"importlib.metadata", "zipfile"} & loaded


def test_a_packet_pump_loads_little_so_that_it_is_there_soon() -> None:
    loaded = loaded_after("import flanneld.network.pump.__main__")
    assert "flanneld.network.pump.native" in loaded
    assert not {"pyroute2", "urllib3", "subprocess", "json", "argparse"} & loaded
