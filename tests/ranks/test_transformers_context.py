"""Models of transformers whose positions ranks divide: the numbers of one process on every rank, for packed rows.

Tolerances are those of ``layouts.py``: losses of 20 steps agree within 1e-5 (relative), gradients of the first step
within 1e-5 of their largest element, weights within a hundredth of the distance that training moves them. Documents of
a packed row cross the borders between ranks. Full attention and sliding windows, fused and plain attention functions,
learned, rotary and no positions, experts, recomputed blocks and noise are among the models; four ranks share two
key/value heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.divided_decoders import CONTEXT_MODELS
from ranks.layouts import EXPERTS_SEED, check_layouts, save_one_device
from ranks.processes import check_killed_run, transformers_runs

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

EXPERTS = ["mixtral", "qwen3_moe"]
OTHERS = [f"transformers {name}" for name in (*sorted(CONTEXT_MODELS - {"qwen3", *EXPERTS}), "noise")]
WITHOUT_PLAN = {"transformers gpt2", "transformers phi3"}
"""Models that transformers has no plan of tensor parallelism for (5.23)."""
TWO = f"1,1,1,1,2:{'+'.join(('transformers qwen3', *OTHERS))}"
PLANNED = f"1,1,2,1,2:{'+'.join(('transformers qwen3', *(name for name in OTHERS if name not in WITHOUT_PLAN)))}"


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        ([TWO], 2),
        (
            [
                "1,1,1,1,4:transformers qwen3",
                "2,1,1,1,2:transformers qwen3+transformers noise",
                "1,2,1,1,2:transformers qwen3+transformers gemma3_text",
            ],
            4,
        ),
        ([PLANNED], 4),
    ],
    ids=["alone", "four, with replicas, and with FSDP2", "with tensor parallelism"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, "transformers qwen3"), layouts, count, tmp_path)


def test_mixtures_of_experts_route_the_positions_of_a_rank(tmp_path: Path) -> None:
    layout = "1,1,1,1,2:" + "+".join(f"transformers {name}" for name in EXPERTS)
    check_layouts(save_one_device(tmp_path, "transformers mixtral"), [layout], 2, tmp_path, seed=EXPERTS_SEED)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Repeating every bit on the same layout, and reading the same rows on others."""
    check_killed_run(transformers_runs(tmp_path, "gemma3_text"), "context_parallel", tmp_path / "hold")


def test_another_architecture_is_refused_before_step_1(tmp_path: Path) -> None:
    _, errors = transformers_runs(tmp_path, "mamba").train(
        "refused", ["parallel.context_parallel_size=2", "--nproc", "2"], code=2
    )
    assert "Context parallelism does not support the mamba model" in errors
