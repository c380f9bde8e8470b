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
from ranks.processes import Runs, entries, fingerprint, killed_and_resumed, lines, losses

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.slow]

EXPERTS = ["mixtral", "qwen3_moe"]
OTHERS = [f"transformers {name}" for name in (*sorted(CONTEXT_MODELS - {"qwen3", *EXPERTS}), "noise")]
TWO = [f"1,1,1,1,2:{'+'.join(('transformers qwen3', *part))}" for part in (OTHERS[:6], OTHERS[6:])]
"""The models of the table in two layouts: their names are file names. The state of the first one moves."""


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        (TWO, 2),
        (
            [
                "1,1,1,1,4:transformers qwen3",
                "2,1,1,1,2:transformers qwen3+transformers noise",
                "1,2,1,1,2:transformers qwen3+transformers gemma3_text",
            ],
            4,
        ),
    ],
    ids=["alone", "four, with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, "transformers qwen3"), layouts, count, tmp_path)


def test_mixtures_of_experts_route_the_positions_of_a_rank(tmp_path: Path) -> None:
    layout = "1,1,1,1,2:" + "+".join(f"transformers {name}" for name in EXPERTS)
    check_layouts(save_one_device(tmp_path, "transformers mixtral"), [layout], 2, tmp_path, seed=EXPERTS_SEED)


def runs_of(folder: Path, name: str) -> Runs:
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(folder / "model", name, vocab_size=301)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["train.global_batch_sequences=8", "train.micro_batch_sequences=2", "data.document_mask=true"]
    return Runs(folder, [*settings, "schedule.name=constant"])


POSITIONS = ["parallel.context_parallel_size=2", "--nproc", "2"]


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Two ranks that are killed and start again repeat every bit; one process and FSDP2 read the same rows."""
    runs = runs_of(tmp_path, "gemma3_text")
    alone, _ = runs.train("alone", ["train.num_steps=16"])
    pair, _ = runs.train("pair", POSITIONS)
    assert losses(pair) == pytest.approx(losses(alone)[:12], rel=1e-5)
    run = killed_and_resumed(runs, POSITIONS, tmp_path / "hold")
    assert any("num_devices = 2, context_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for layout, steps in (("fsdp", 14), ("context_parallel", 16)):
        sizes = {"fsdp": 1, "context_parallel": 1, layout: 2}
        changed = [f"parallel.{name}_size={size}" for name, size in sizes.items()]
        runs.vorox(["train", "--resume", str(run), *changed, f"train.num_steps={steps}", "--nproc", "2"])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


def test_another_architecture_is_refused_before_step_1(tmp_path: Path) -> None:
    _, errors = runs_of(tmp_path, "mamba").train("refused", POSITIONS, code=2)
    assert "Context parallelism does not support the mamba model" in errors
