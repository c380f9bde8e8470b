"""Tensor and sequence parallelism with PyTorch: on every rank the numbers of one process, for rows of a fresh seed.

The native decoder is divided by its own plan, models of transformers by theirs; tolerances are those of ``layouts.py``.
The vocabularies (61, 265, 301) divide unequally; embeddings are tied and untied.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ranks.layouts import check_layouts, layout_cases
from ranks.processes import (
    PATIENCE_SECONDS,
    Runs,
    assert_same_numbers,
    check_continuation,
    entries,
    lines,
    losses,
    pretrained_runs,
    second_process,
)
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TENSOR = ["parallel.tensor_parallel_size=2", "--nproc", "2"]
LAYOUTS = {
    "alone": ["1,1,2"],
    "sequence parallel": ["1,1,2,1,1,1"],
    "with replicas, and with FSDP2": ["2,1,2", "1,2,2", "1,2,2,1,1,1"],
}
TRANSFORMERS_LAYOUTS = {
    "transformers, alone": ["1,1,2:transformers qwen3+transformers llama"],
    "Gemma 3, alone": ["1,1,2:transformers gemma3_text"],
    "transformers, with replicas, and with FSDP2": ["2,1,2:transformers qwen3", "1,2,2:transformers qwen3"],
    "Gemma 3, with replicas, and with FSDP2": ["2,1,2:transformers gemma3_text", "1,2,2:transformers gemma3_text"],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "pad_token_id": 3, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False},
    "gemma3_text": {"tie_word_embeddings": True},
    "olmo2": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("layouts", layout_cases(LAYOUTS, TRANSFORMERS_LAYOUTS))
def test_every_rank_computes_what_one_process_computes(layouts: list[str], tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(layouts, tmp_path)


@pytest.mark.hf
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_equal_one(name: str, tmp_path: Path) -> None:
    runs = pretrained_runs(tmp_path, name, **MODELS[name])
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", TENSOR)
    assert_same_numbers(pair, alone)
    if name != "qwen3":
        return
    mixed, _ = runs.train("mixed", ["parallel.tensor_parallel_size=2", "parallel.fsdp_size=2", "--nproc", "4"])
    assert_same_numbers(mixed, alone)
    check_continuation(runs, pair, "tensor_parallel")


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Two ranks that are killed, then one, then two again: the rows and losses of one uninterrupted process."""
    runs = Runs(tmp_path, [*MODEL, "schedule.name=constant"])  # another train.num_steps changes no learning rate
    alone, _ = runs.train("alone", [])
    process = runs.start("killed", TENSOR, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run = runs.find("killed")
    assert any("num_devices = 2, tensor_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    for size, steps in ((1, 10), (2, 12)):
        sizes = [f"parallel.tensor_parallel_size={size}", f"train.num_steps={steps}", "--nproc", str(size)]
        runs.vorox(["train", "--resume", str(run), *sizes])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.hf
def test_a_model_without_a_plan_is_refused_before_step_1(tmp_path: Path) -> None:
    _, errors = pretrained_runs(tmp_path, "gpt2").train("refused", TENSOR, code=2)
    assert "GPT2LMHeadModel has no tensor-parallel plan" in errors
