"""Models of transformers divided by their own plan over two and four ranks: the numbers of one process on every rank.

Losses agree within 1e-5 (relative) for 20 steps. A checkpoint is whole: another layout continues with it, element by
element. The vocabularies (301, 61) divide unequally; embeddings are tied and untied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.divided_decoders import cases_of
from ranks.layouts import check_layouts, save_one_device
from ranks.processes import Runs, entries, lines, losses, stored_arrays

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

TENSOR = ["parallel.tensor_parallel_size=2", "--nproc", "2"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "pad_token_id": 3, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False},
    "gemma3_text": {"tie_word_embeddings": True},
    "olmo2": {"tie_word_embeddings": False},
}


def runs_of(folder: Path, name: str) -> Runs:
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(folder / "model", name, vocab_size=301, **MODELS.get(name, {}))
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["train.global_batch_sequences=8", "train.micro_batch_sequences=2", "data.document_mask=true"]
    settings += ["train.num_steps=20"]
    return Runs(folder, [*settings, "schedule.name=constant", "log.parameter_norms=true"])


def assert_same_run(run: Path, alone: Path) -> None:
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    norms = [
        [line["values"]["grad_norm"] for line in lines(path, "metrics") if "grad_norm" in line.get("values", {})]
        for path in (run, alone)
    ]
    assert norms[0]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000020") for path in (run, alone))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        (["1,1,2:transformers qwen3+transformers llama"], 2),
        (["1,1,2:transformers gemma3_text"], 2),
        (["2,1,2:transformers qwen3", "1,2,2:transformers qwen3"], 4),
        (["2,1,2:transformers gemma3_text", "1,2,2:transformers gemma3_text"], 4),
    ],
    ids=["alone", "Gemma 3 alone", "with replicas, and with FSDP2", "Gemma 3 with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, cases_of(layouts[0])[0]), layouts, count, tmp_path)


def check_continuation(runs: Runs, run: Path, kind: str) -> None:
    """Continue a run that two ranks divide on one process, and divided again: the rows and losses of one process."""
    for size, steps in ((1, 22), (2, 24)):
        words = [f"parallel.{kind}_size={size}", f"train.num_steps={steps}", "--nproc", str(size)]
        runs.vorox(["train", "--resume", str(run), *words])
    longer, _ = runs.train("longer", ["train.num_steps=24"])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(longer)]
    assert losses(run) == pytest.approx(losses(longer), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_equal_one(name: str, tmp_path: Path) -> None:
    runs = runs_of(tmp_path, name)
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", TENSOR)
    assert_same_run(pair, alone)
    if name != "qwen3":
        return
    mixed, _ = runs.train("mixed", ["parallel.tensor_parallel_size=2", "parallel.fsdp_size=2", "--nproc", "4"])
    assert_same_run(mixed, alone)
    check_continuation(runs, pair, "tensor_parallel")


def test_a_model_without_a_plan_is_refused_before_step_1(tmp_path: Path) -> None:
    _, errors = runs_of(tmp_path, "gpt2").train("refused", TENSOR, code=2)
    assert "GPT2LMHeadModel has no tensor-parallel plan" in errors
