"""Models of transformers in the stages of a pipeline: the numbers of one process on every rank, for random packed rows.

Tolerances are those of ``layouts.py``: losses of 20 steps agree within 1e-5 (relative), gradients of the first step
within 1e-5 of their largest element, weights within a hundredth of the distance that training moves them. A checkpoint
is whole: another layout continues with it, element by element. Embeddings are tied and untied, blocks are recomputed or
not; three models have five layers in four stages, interleaved (layers of two kinds) or with a zero-bubble schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.divided_decoders import PIPELINE_MODELS
from ranks.layouts import check_layouts, save_one_device
from ranks.processes import check_killed_run, transformers_runs

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

ALL = "+".join(f"transformers {name}" for name in ("qwen3", *sorted(PIPELINE_MODELS - {"qwen3"})))


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        ([f"1,1,1,2:{ALL}"], 2),
        (["2,1,1,2:transformers qwen3", "1,2,1,2:transformers qwen3+transformers gemma3_text"], 4),
        (["1,1,2,2:transformers qwen3+transformers gemma3_text+transformers llama"], 4),
        (["2,1,2,2:transformers qwen3", "1,2,2,2:transformers qwen3+transformers llama"], 8),
    ],
    ids=[
        "alone",
        "with replicas, and with FSDP2",
        "with tensor parallelism",
        "tensor parallelism with replicas, and with FSDP2",
    ],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, "transformers qwen3"), layouts, count, tmp_path)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Repeating every bit on the same layout, and reading the same rows on others."""
    check_killed_run(transformers_runs(tmp_path, "llama"), "pipeline_parallel", tmp_path / "hold")


def test_another_architecture_is_refused_before_step_1(tmp_path: Path) -> None:
    stages = ["parallel.pipeline_parallel_size=2", "--nproc", "2"]
    _, errors = transformers_runs(tmp_path, "mamba").train("refused", stages, code=2)
    assert "A pipeline does not support the mamba model" in errors
