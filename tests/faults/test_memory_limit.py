"""A process that reaches a real limit of its address space in a step: exit code 3, and nothing saved is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import configuration
from vorox.core.run_layout import step_directories
from vorox.records.run_lookup import run_directories

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS"),
]
LIMITED = """
import resource, sys, psutil
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.cli import main
original = TorchEngine.train_step

def train_step(engine, batch, **named):
    limit = psutil.Process().memory_info().vms + (4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return original(engine, batch, **named)

TorchEngine.train_step = train_step
sys.exit(main(sys.argv[1:]))
"""
"""4 MiB for a first step that takes about 60."""
LARGE = ["model.hidden_size=128", "data.sequence_length_tokens=128", "train.global_batch_sequences=32",
         "train.micro_batch_sequences=32", "eval.every_steps=null"]  # fmt: skip


def train(directory: Path, program: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=250, env=environment
    )


def test_a_step_that_takes_more_memory_than_the_process_may_have(tmp_path: Path) -> None:
    configuration(tmp_path)
    first = train(tmp_path, ["-m", "vorox"], "tiny.yaml", *LARGE, "train.num_steps=4")
    assert first.returncode == 0, first.stderr
    (directory,) = run_directories(tmp_path / "runs")
    saved = {path: path.read_bytes() for path in step_directories(directory)[4].iterdir()}

    longer = ["--resume", directory.name, "train.num_steps=6"]
    failed = train(tmp_path, ["-c", LIMITED], *longer)
    assert failed.returncode == 3, failed.stderr
    assert "Out of memory while training" in failed.stderr
    assert "this process may have a lower limit" in failed.stderr, "the machine has more than it takes"
    for setting in ("train.micro_batch_sequences", "data.sequence_length_tokens"):
        assert setting in failed.stderr
    assert "step-00000004" in failed.stderr, "what is safe"
    assert {path: path.read_bytes() for path in step_directories(directory)[4].iterdir()} == saved

    resumed = train(tmp_path, ["-m", "vorox"], *longer)
    assert resumed.returncode == 0, resumed.stderr
    assert 6 in step_directories(directory)
