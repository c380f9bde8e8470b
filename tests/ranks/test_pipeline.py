"""Pipeline parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Tolerances are those of ``layouts.py``. Three layers of five are on one rank and two on the other in the interleaved and
the zero-bubble schedule. Tied and untied embeddings, documents with masks and positions, activation statistics with
checkpointing, embedding noise and Muon are among the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.divided_decoders import state_case
from ranks.layouts import check_layouts, save_one_device
from ranks.processes import Runs, entries, fingerprint, killed_and_resumed, lines, losses
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        (["1,1,1,2", "1,2,1"], 2), (["2,1,1,2", "1,2,1,2"], 4), (["1,1,2,2", "1,1,2,2,1,1"], 4),
        (["2,1,2,2", "1,2,2,2"], 8), (["2,2,1,2:single rows"], 8),
    ],
    ids=[
        "alone, then FSDP2", "with replicas, and with FSDP2", "with tensor and sequence parallelism",
        "tensor parallelism with replicas, and with FSDP2", "replicas with FSDP2",
    ],
)  # fmt: skip
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through a pipeline, FSDP2 and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path, state_case(layouts[0])), layouts, count, tmp_path)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Two stages that are killed and start again repeat every bit; other layouts read the same rows."""
    runs = Runs(tmp_path, [*MODEL, "schedule.name=constant"])  # another train.num_steps changes no learning rate
    alone, _ = runs.train("alone", ["train.num_steps=18"])
    stages = ["parallel.pipeline_parallel_size=2", "--nproc", "2"]
    pair, _ = runs.train("pair", stages)
    assert losses(pair) == pytest.approx(losses(alone)[:12], rel=1e-5)
    run = killed_and_resumed(runs, stages, tmp_path / "hold")
    assert any("num_devices = 2, pipeline_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for fsdp, size, steps in ((1, 1, 14), (2, 2, 16), (2, 1, 18)):
        sizes = [f"parallel.fsdp_size={fsdp}", f"parallel.pipeline_parallel_size={size}"]
        runs.vorox(["train", "--resume", str(run), *sizes, f"train.num_steps={steps}", "--nproc", str(fsdp * size)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
