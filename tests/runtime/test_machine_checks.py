"""Every check of the machine finds a fault that is injected, and names a remedy."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from vorox.runtime import machine_checks
from vorox.runtime.machine_checks import Finding


def problem(finding: Finding) -> str:
    """The text of a finding that is not ok; it has a remedy."""
    assert finding.status != "ok", finding
    assert finding.remedy
    return finding.text


def test_this_machine_passes(tmp_path: Path) -> None:
    findings = [
        machine_checks.check_python(),
        machine_checks.check_clock(),
        machine_checks.check_allocator({}),
        machine_checks.check_processor({}),
        *machine_checks.check_triton_cache({"TRITON_CACHE_DIR": str(tmp_path / "new")}),
        *machine_checks.check_disk("disk", tmp_path / "new" / "folder", "run.directory"),
    ]
    assert {finding.status for finding in findings} <= {"ok", "warn"}
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_limits_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MiB of" in problem(machine_checks.check_memory(available_bytes=1 << 28))
    assert "64 MiB" in problem(machine_checks.check_shared_memory(tmp_path, total_bytes=64 << 20))
    assert machine_checks.check_shared_memory(tmp_path / "absent").status == "ok"
    monkeypatch.setattr(machine_checks, "usable_cores", lambda: 4)
    assert "OMP_NUM_THREADS=2" in problem(machine_checks.check_processor({"OMP_NUM_THREADS": "2"}))
    assert machine_checks.check_processor({"OMP_NUM_THREADS": "4"}).status == "ok"
    assert "before the installation" in problem(machine_checks.check_clock(now=0.0))


def test_a_full_slow_or_refused_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(offset_seconds: float = 0.0) -> list[Finding]:
        return list(machine_checks.check_disk("disk of runs", tmp_path, "run.directory", offset_seconds))

    monkeypatch.setattr(machine_checks, "MIN_FREE_BYTES", 0)
    monkeypatch.setattr(machine_checks, "MIN_BYTES_PER_SECOND", 0.0)
    assert [finding.status for finding in found()] == ["ok"]
    _, clock = found(offset_seconds=60.0)
    assert "60 s behind" in problem(clock)
    monkeypatch.setattr(machine_checks, "MIN_BYTES_PER_SECOND", 1e15)
    assert "local disk" in found()[0].remedy
    monkeypatch.setattr(machine_checks, "MIN_FREE_BYTES", 1 << 62)
    assert "free some space" in found()[0].remedy

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine_checks.tempfile, "TemporaryFile", refuse)
    (finding,) = found()
    assert finding.status == "fail"
    assert "Permission denied" in problem(finding)


def test_the_compiler_compiles_or_says_why_not(tmp_path: Path) -> None:
    assert "/nowhere/c++ was not found" in problem(machine_checks.check_compiler({"CXX": "/nowhere/c++"}))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "Python.h: No such file" in problem(machine_checks.check_compiler({"CXX": str(broken)}))
    working = tmp_path / "working"
    working.write_text("#!/bin/sh\nexit 0\n")
    working.chmod(0o755)
    assert machine_checks.check_compiler({"CXX": str(working)}).status == "ok"


def test_triton_and_allocator_settings(tmp_path: Path) -> None:
    long_path = str(tmp_path / ("a" * 120))
    windows = {"TRITON_CACHE_DIR": long_path, "TRITON_INTERPRET": "1"}
    path, interpreter = machine_checks.check_triton_cache(windows, "win32")
    assert "too long" in problem(path)
    assert "in Python" in problem(interpreter)
    assert [one.status for one in machine_checks.check_triton_cache({"TRITON_CACHE_DIR": long_path}, "linux")] == ["ok"]
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "Windows" in problem(machine_checks.check_allocator(segments, "win32"))
    assert machine_checks.check_allocator(segments, "linux").status == "ok"
    if sys.platform != "win32" and os.getuid():
        assert "cannot be written" in problem(next(machine_checks.check_triton_cache({"TRITON_CACHE_DIR": "/proc/x"})))


def test_a_network_without_an_answer() -> None:
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        finding = machine_checks.check_network("127.0.0.1", closed.getsockname()[1])
    assert "does not answer" in problem(finding)
