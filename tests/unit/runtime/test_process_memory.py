"""Memory that the C library keeps for itself."""

from __future__ import annotations

from pathlib import Path

from flanneld.runtime.process import trim_memory


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_unused_memory_goes_back_to_the_kernel() -> None:
    # Larger than what Python's own allocator takes, and too small for a mapping of its own.
    blocks = [bytes(2000) for _ in range(20_000)]
    top = blocks[-1]
    del blocks
    before = resident()
    trim_memory()
    assert before - resident() > 20 << 20
    assert len(top) == 2000
