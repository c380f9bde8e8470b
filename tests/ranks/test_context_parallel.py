"""Context parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Both kinds of model are in one table; tolerances are those of ``layouts.py``. Documents of a packed row cross the
borders between ranks. Full attention and sliding windows, fused and plain attention functions, learned, rotary and no
positions, QK-norms, dropout, noise, experts, activation statistics, checkpointing and Muon are among the cases; four
ranks share one or two key/value heads. With ring attention, three heads are on two and on four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.divided_decoders import CONTEXT_MODELS
from ranks.layouts import EXPERTS_SEED, check_layouts, layout_cases
from ranks.processes import Runs, check_killed_run, transformers_runs
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXPERTS = ["mixtral", "qwen3_moe"]
OTHERS = [f"transformers {name}" for name in (*sorted(CONTEXT_MODELS - {"qwen3", *EXPERTS}), "noise")]
WITHOUT_PLAN = {"transformers gpt2", "transformers phi3"}
"""Models that transformers has no plan of tensor parallelism for (5.23)."""
ALL = "+".join(("transformers qwen3", *OTHERS))
PLANNED = "+".join(("transformers qwen3", *(name for name in OTHERS if name not in WITHOUT_PLAN)))
LAYOUTS = {
    "alone, then FSDP2": ["1,1,1,1,2", "1,2,1"],
    "four, with replicas, and with FSDP2": ["1,1,1,1,4", "2,1,1,1,2", "1,2,1,1,2"],
    "ring": ["1,1,1,1,2,0,1,1"],
    "ring of four, with replicas, and with FSDP2": ["1,1,1,1,4,0,1,1", "2,1,1,1,2,0,1,1", "1,2,1,1,2,0,1,1"],
    "with tensor and sequence parallelism": ["1,1,2,1,2", "1,1,2,1,2,1", "1,1,2,1,2,0,1,1"],
    "in the stages of a pipeline": ["1,1,1,2,2", "1,1,1,2,2,0,1,1"],
    "with tensor parallelism in a pipeline, and both with FSDP2": ["1,1,2,2,2", "1,2,2,1,2", "1,2,1,2,2"],
}
TRANSFORMERS_LAYOUTS = {
    "transformers, alone": [f"1,1,1,1,2:{ALL}"],
    "transformers, four, with replicas, and with FSDP2": [
        "1,1,1,1,4:transformers qwen3", "2,1,1,1,2:transformers qwen3+transformers noise",
        "1,2,1,1,2:transformers qwen3+transformers gemma3_text",
    ],
    "transformers, with tensor parallelism": [f"1,1,2,1,2:{PLANNED}"],
}  # fmt: skip


@pytest.mark.parametrize("layouts", layout_cases(LAYOUTS, TRANSFORMERS_LAYOUTS))
def test_every_rank_computes_what_one_process_computes(layouts: list[str], tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(layouts, tmp_path)


@pytest.mark.hf
def test_mixtures_of_experts_route_the_positions_of_a_rank(tmp_path: Path) -> None:
    check_layouts(["1,1,1,1,2:" + "+".join(f"transformers {name}" for name in EXPERTS)], tmp_path, EXPERTS_SEED)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("native", [(1, 1, "ulysses"), (2, 2, "ring"), (2, 1, "ulysses")], id="native"),
        pytest.param("gemma3_text", [(2, 1, "ulysses"), (1, 2, "ulysses")], id="transformers", marks=pytest.mark.hf),
    ],
)
def test_a_killed_run_continues_on_other_layouts(
    name: str, layouts: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    """Two ranks that are killed and start again repeat every bit; other layouts read the same rows."""
    native = [*MODEL, "data.document_mask=true", "schedule.name=constant"]  # train.num_steps changes no learning rate
    runs = Runs(tmp_path, native) if name == "native" else transformers_runs(tmp_path, name)
    others = [
        {"fsdp_size": fsdp, "context_parallel_size": size, "context_parallel_kind": kind}
        for fsdp, size, kind in layouts
    ]
    check_killed_run(runs, "context_parallel", tmp_path / "hold", others)


@pytest.mark.hf
def test_another_architecture_is_refused_before_step_1(tmp_path: Path) -> None:
    positions = ["parallel.context_parallel_size=2", "--nproc", "2"]
    _, errors = transformers_runs(tmp_path, "mamba").train("refused", positions, code=2)
    assert "Context parallelism does not support the mamba model" in errors
