"""A broken framework ends the child process that imports it, and is a finding of this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vorox import backends
from vorox.backends import installation_probe
from vorox.backends.installation_probe import probe_installation


@pytest.mark.torch
def test_a_broken_framework_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = probe_installation("torch")
    assert probe.is_installed
    assert not probe.report
    assert probe.problem.endswith("ImportError: libcudart.so.13: cannot open shared object file")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import os; os.abort()", "the import ended with SIGABRT"),
        ("raise SystemExit(3)", "the import failed: exit code 3"),
        ("import time; time.sleep(60)", "the import did not end within 1 s"),
    ],
)
def test_how_a_child_can_end(program: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation_probe, "TIMEOUT_SECONDS", 1.0)
    assert probe_installation("torch", [sys.executable, "-S", "-c", program]).problem == problem


def test_a_missing_framework_is_installed_by_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_is_installed", lambda package: False)
    probe = probe_installation("jax")
    assert not probe.is_installed
    assert "pip install" in probe.install
    assert "flax" in probe.problem


@pytest.mark.torch
@pytest.mark.slow
def test_torch_reports_its_devices() -> None:
    report = probe_installation("torch").report
    assert report["devices"]
    assert all(not device["problem"] for device in report["devices"])


@pytest.mark.jax
@pytest.mark.slow
def test_jax_reports_its_devices() -> None:
    report = probe_installation("jax").report
    assert report["devices"]
    assert all(not device["problem"] for device in report["devices"])
