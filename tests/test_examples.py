"""The examples run on a run of each engine and show what they are about."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tiny_runs import configuration
from vorox.run import train

EXAMPLES = Path(__file__).parents[1] / "examples"
ENGINES = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ENGINES)
def test_examples(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = "1" if backend == "torch" else "null"
    config = configuration(tmp_path, [f"backend={backend}", f"runtime.num_threads={threads}", "train.num_steps=40"])
    run = train(config).run_directory
    noise = example("noise_at_a_tap").main([str(run), "--point", "after_mlp", "--strength", "2"])
    assert list(noise) == ["nowhere", "layer 0"]
    assert noise["layer 0"] > noise["nowhere"] + 0.01
    heads = example("ablate_a_head").main([str(run)])
    assert list(heads) == ["whole", "without head 0", "without head 1"]
    assert heads["whole"] == pytest.approx(noise["nowhere"], rel=1e-6)
    assert len({round(loss, 6) for loss in heads.values()}) == 3
    assert "validation loss" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.torch
@pytest.mark.hf
def test_the_demo_proves_what_the_readme_says(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, str(EXAMPLES / "demo.py"), str(tmp_path / "demo")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    said, shown = (
        [re.sub(r"of step \d+", "of step N", line) for line in re.findall(r"^  \d\. .*$", text, re.MULTILINE)]
        for text in (found.stdout, readme)
    )  # Python's library, which it trains on, decides when the document is read
    assert said == shown
