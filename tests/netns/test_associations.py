"""The kernel's SAs: which there are, and which notifications count."""

from __future__ import annotations

from contextlib import closing

import pytest

from flanneld.network.xfrm_table import Associations
from tests.lab import Lab

pytestmark = pytest.mark.needs_kernel("esp")

ID = ("src", "192.0.2.1", "dst", "192.0.2.2", "proto", "esp", "spi", "0x101")
KEY = ("mode", "tunnel", "aead", "rfc4106(gcm(aes))", "0x" + "01" * 20, "128")


def test_a_flush_is_noticed_and_the_end_of_one_sa_is_not(lab: Lab) -> None:
    """charon itself ends single ones all the time, and never flushes."""
    (node,) = lab.add_nodes()
    with node.namespace.entered(), closing(Associations()) as kernel:
        assert kernel.spis() == frozenset()
        node.run("ip", "xfrm", "state", "add", *ID, *KEY)
        assert kernel.spis() == {"00000101"}
        node.run("ip", "xfrm", "state", "delete", *ID)
        assert not kernel.were_flushed()
        node.run("ip", "xfrm", "state", "add", *ID, *KEY)
        node.run("ip", "xfrm", "state", "flush")
        assert kernel.were_flushed()
        assert not kernel.were_flushed()
        assert kernel.spis() == frozenset()
