"""Which engines there are, and what is said where one cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox import backends
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.run import train


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """All packages seem installed but these."""
    monkeypatch.setattr(backends, "_is_installed", lambda package: package not in packages)


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"Unknown backend 'tensorflow'; available: torch, jax"):
        backends.load("tensorflow")


@pytest.mark.parametrize(
    ("name", "missing", "named"),
    [("torch", ["torch"], "torch"), ("jax", ["flax"], "flax"), ("jax", ["jax", "optax"], "jax and optax")],
)
def test_what_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: list[str], named: str
) -> None:
    without(monkeypatch, *missing)
    with pytest.raises(ConfigError, match=f"needs {named}, which is not installed") as caught:
        backends.load(name)
    assert caught.value.hint == install_command(name)


@pytest.mark.torch
def test_the_torch_engine_loads_without_what_takes_a_second() -> None:
    """Sharded tensors, the compiler and transformers are imported by the runs that need them."""
    slow = ["torch.distributed.tensor", "torch._dynamo", "transformers", "deepspeed"]
    code = f"import sys; from vorox import backends; backends.load('torch'); print(set({slow}) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "set()\n"


def test_a_broken_installation_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'sympy'", name="sympy")

    without(monkeypatch)
    monkeypatch.setattr(backends.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        backends.load("torch")


def test_a_run_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer and no cache for a run that cannot begin, and no run directory."""
    without(monkeypatch, "torch")
    with pytest.raises(ConfigError, match="needs torch"):
        train(configuration(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"text", "tiny.yaml"}


@pytest.mark.parametrize(
    ("start", "stall", "patience"), [(300.0, None, 300.0), (300.0, 40.0, 60.0), (30.0, 40.0, 30.0), (300.0, 1.0, 10.0)]
)
def test_the_watchdog_reports_before_a_rank_gives_up_another(
    tmp_path: Path, start: float, stall: float | None, patience: float
) -> None:
    settings = [f"parallel.start_timeout_seconds={start}", f"runtime.stall_timeout_seconds={stall or 'null'}"]
    assert backends._patience_seconds(configuration(tmp_path, settings)) == patience
