"""Memory numbers are those of this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vorox.experiments.metrics import metric
from vorox.runtime.throughput import host_memory

TAKES_MEMORY = """
import json, mmap
from vorox.runtime.throughput import host_memory
before = host_memory()
block = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    block[page] = 1
print(json.dumps([before, host_memory()]))
"""


def test_memory_grows_by_what_is_taken() -> None:
    """In a process where nothing else happens."""
    said = subprocess.run([sys.executable, "-c", TAKES_MEMORY], capture_output=True, text=True, check=True)
    before, after = json.loads(said.stdout)
    assert after["memory/host_bytes"] - before["memory/host_bytes"] == pytest.approx(64 << 20, rel=0.2)
    assert after["memory/host_peak_bytes"] >= after["memory/host_bytes"] * 0.9
    assert after["memory/host_available_bytes"] > 0
    for name in after:
        assert metric(name).unit == "bytes"


def test_resident_memory_is_what_the_kernel_says() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    kernel_bytes = int(lines["VmRSS"].split()[0]) * 1024
    assert host_memory()["memory/host_bytes"] == pytest.approx(kernel_bytes, rel=0.1)
