"""Experts of transformers models divided over two and four ranks: the numbers of one process on every rank.

Tolerances are those of ``layouts.py``. The models have stacked experts with and without biases, a shared expert, and
documents as rows of their own (gpt-oss), of which the ranks have different numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.layouts import EXPERTS_SEED, check_layouts, save_one_device
from ranks.test_transformers_tensor_parallel import assert_same_run, check_continuation, runs_of

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

EXPERTS = ["parallel.expert_parallel_size=2", "--nproc", "2"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_every_rank_computes_what_one_process_computes(name: str, count: int, tmp_path: Path) -> None:
    """20 steps on every rank; parameters and optimizer state move to divided experts and back without a change."""
    case = f"transformers {name}"
    alone = save_one_device(tmp_path, case)
    check_layouts(alone, [f"{count},1,1,1,1,0,2:{case}"], count, tmp_path, EXPERTS_SEED)


def test_runs_of_two_processes_equal_one(tmp_path: Path) -> None:
    """Pretrained weights; the run continues on one process, and divided again."""
    runs = runs_of(tmp_path, "mixtral")
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", EXPERTS)
    assert_same_run(pair, alone)
    check_continuation(runs, pair, "expert_parallel")


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("llama", 2, "Expert parallelism does not support the llama model"),
        ("mixtral", 3, "4 experts of the mixtral model are not divisible by expert_parallel_size = 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_step_1(name: str, size: int, what: str, tmp_path: Path) -> None:
    runs = runs_of(tmp_path, name)
    sizes = [f"parallel.expert_parallel_size={size}", "--nproc", str(size), "train.global_batch_sequences=6"]
    _, errors = runs.train("refused", sizes, code=2)
    assert what in errors
