"""``vorox doctor``: its lines, its JSON and its exit code; and what Windows sets at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vorox.backends.installation_probe import InstallationProbe
from vorox.cli import main
from vorox.cli.checks import doctor
from vorox.core.platform.windows_variables import set_windows_variables
from vorox.runtime import machine_checks

REPORT = {
    "version": "2.13", "built_for": "CPU", "devices": [{"kind": "cpu", "name": "cpu", "problem": ""}],
    "has_triton": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No child processes, a folder of its own, and a network that must not be used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    probe(monkeypatch, InstallationProbe("torch", True, "pip install torch", report=REPORT))

    def no_network() -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(machine_checks, "check_network", no_network)


def probe(monkeypatch: pytest.MonkeyPatch, torch: InstallationProbe) -> None:
    absent = InstallationProbe("jax", False, "pip install jax")
    monkeypatch.setattr(doctor, "probe_installation", lambda name: torch if name == "torch" else absent)


def test_a_machine_that_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    python          3.")
    assert "ok    torch           2.13 (CPU); cpu" in lines
    assert lines[-1].startswith("Ready to train: ")
    assert list(Path().iterdir()) == []


def test_a_broken_framework_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probe(monkeypatch, InstallationProbe("torch", True, "pip install torch", problem="the import ended with SIGSEGV"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  torch           the import ended with SIGSEGV\n" in out
    assert "-> reinstall it: pip install torch --force-reinstall\n" in out
    assert "Not ready to train: " in out
    assert main(["doctor", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is False
    (failed,) = [check for check in value["checks"] if check["status"] == "fail"]
    assert failed["name"] == "torch"


def test_the_network_on_request_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding = machine_checks.Finding("network", "warn", "no answer", "check the proxy")
    monkeypatch.setattr(machine_checks, "check_network", lambda: finding)
    assert main(["doctor", "--network"]) == 0  # a warning is no failure
    assert "warn  network         no answer\n" in capsys.readouterr().out


def test_windows_sets_what_is_not_set(tmp_path: Path) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}
    assert set_windows_variables(environment, tmp_path, "linux") == {}
    assert set_windows_variables(environment, tmp_path, "win32") == {
        "TRITON_CACHE_DIR": str(tmp_path / ".triton_cache")
    }
    assert environment == {
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
        "TRITON_CACHE_DIR": str(tmp_path / ".triton_cache"),
    }
    assert set_windows_variables({}, tmp_path, "win32")["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    newer = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}  # PyTorch would read the older name first
    assert "PYTORCH_CUDA_ALLOC_CONF" not in set_windows_variables(newer, tmp_path, "win32")
