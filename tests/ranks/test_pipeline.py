"""Pipeline parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Both kinds of model are in one table; tolerances are those of ``layouts.py``. Three layers of five are on one rank and
two on the other in the interleaved and the zero-bubble schedule. Tied and untied embeddings, documents with masks and
positions, layers of two kinds, activation statistics with checkpointing, embedding noise and Muon are among the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.divided_decoders import PIPELINE_MODELS
from ranks.layouts import check_layouts, layout_cases
from ranks.processes import Runs, check_killed_run, transformers_runs
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ALL = "+".join(f"transformers {name}" for name in ("qwen3", *sorted(PIPELINE_MODELS - {"qwen3"})))
LAYOUTS = {
    "alone, then FSDP2": ["1,1,1,2", "1,2,1"],
    "with replicas, and with FSDP2": ["2,1,1,2", "1,2,1,2"],
    "with tensor and sequence parallelism": ["1,1,2,2", "1,1,2,2,1,1"],
    "tensor parallelism with replicas, and with FSDP2": ["2,1,2,2", "1,2,2,2"],
    "replicas with FSDP2": ["2,2,1,2:single rows"],
}
TRANSFORMERS_LAYOUTS = {
    "transformers, alone": [f"1,1,1,2:{ALL}"],
    "transformers, with replicas, and with FSDP2": [
        "2,1,1,2:transformers qwen3", "1,2,1,2:transformers qwen3+transformers gemma3_text",
    ],
    "transformers, with tensor parallelism": [
        "1,1,2,2:transformers qwen3+transformers gemma3_text+transformers llama",
    ],
    "transformers, tensor parallelism with replicas, and with FSDP2": [
        "2,1,2,2:transformers qwen3", "1,2,2,2:transformers qwen3+transformers llama",
    ],
}  # fmt: skip


@pytest.mark.parametrize("layouts", layout_cases(LAYOUTS, TRANSFORMERS_LAYOUTS))
def test_every_rank_computes_what_one_process_computes(layouts: list[str], tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(layouts, tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("native", [(1, 1), (2, 2), (2, 1)], id="native"),
        pytest.param("llama", [(2, 1), (1, 2)], id="transformers", marks=pytest.mark.hf),
    ],
)
def test_a_killed_run_continues_on_other_layouts(name: str, sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Two stages that are killed and start again repeat every bit; other layouts read the same rows."""
    native = [*MODEL, "schedule.name=constant"]  # another train.num_steps changes no learning rate
    runs = Runs(tmp_path, native) if name == "native" else transformers_runs(tmp_path, name)
    others = [{"fsdp_size": fsdp, "pipeline_parallel_size": size} for fsdp, size in sizes]
    check_killed_run(runs, "pipeline_parallel", tmp_path / "hold", others)


@pytest.mark.hf
def test_another_architecture_is_refused_before_step_1(tmp_path: Path) -> None:
    stages = ["parallel.pipeline_parallel_size=2", "--nproc", "2"]
    _, errors = transformers_runs(tmp_path, "mamba").train("refused", stages, code=2)
    assert "A pipeline does not support the mamba model" in errors
