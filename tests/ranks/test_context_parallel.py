"""Context parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Tolerances are those of ``layouts.py``. Documents of a packed row cross the borders between ranks. Sliding
windows, learned and rotary positions, QK-norms, dropout, noise, activation statistics, checkpointing and Muon are among
the cases; four ranks share one key/value head. With ring attention, three heads are on two and on four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.layouts import check_layouts, save_one_device
from ranks.processes import Runs, entries, fingerprint, killed_and_resumed, lines, losses
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layouts", "count"),
    [
        (["1,1,1,1,2", "1,2,1"], 2),
        (["1,1,1,1,4", "2,1,1,1,2", "1,2,1,1,2"], 4),
        (["1,1,1,1,2,0,1,1"], 2),
        (["1,1,1,1,4,0,1,1", "2,1,1,1,2,0,1,1", "1,2,1,1,2,0,1,1"], 4),
        (["1,1,2,1,2", "1,1,2,1,2,1", "1,1,2,1,2,0,1,1"], 4),
        (["1,1,1,2,2", "1,1,1,2,2,0,1,1"], 4),
        (["1,1,2,2,2", "1,2,2,1,2", "1,2,1,2,2"], 8),
    ],
    ids=[
        "alone, then FSDP2",
        "four, with replicas, and with FSDP2",
        "ring",
        "ring of four, with replicas, and with FSDP2",
        "with tensor and sequence parallelism",
        "in the stages of a pipeline",
        "with tensor parallelism in a pipeline, and both with FSDP2",
    ],
)
def test_every_rank_computes_what_one_process_computes(layouts: list[str], count: int, tmp_path: Path) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    check_layouts(save_one_device(tmp_path), layouts, count, tmp_path)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Two ranks that are killed and start again repeat every bit; other layouts read the same rows."""
    settings = [*MODEL, "data.document_mask=true", "schedule.name=constant"]  # train.num_steps changes no learning rate
    runs = Runs(tmp_path, settings)
    alone, _ = runs.train("alone", ["train.num_steps=18"])
    positions = ["parallel.context_parallel_size=2", "--nproc", "2"]
    pair, _ = runs.train("pair", positions)
    assert losses(pair) == pytest.approx(losses(alone)[:12], rel=1e-5)
    found, expected = ({line["step"]: line["loss"] for line in lines(run, "evaluations")} for run in (pair, alone))
    shared = found.keys() & expected.keys()
    assert shared
    assert [found[step] for step in shared] == pytest.approx([expected[step] for step in shared], rel=1e-5)
    run = killed_and_resumed(runs, positions, tmp_path / "hold")
    assert any("num_devices = 2, context_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for fsdp, size, kind, steps in ((1, 1, "ulysses", 14), (2, 2, "ring", 16), (2, 1, "ulysses", 18)):
        sizes = [f"parallel.fsdp_size={fsdp}", f"parallel.context_parallel_size={size}"]
        sizes.append(f"parallel.context_parallel_kind={kind}")
        runs.vorox(["train", "--resume", str(run), *sizes, f"train.num_steps={steps}", "--nproc", str(fsdp * size)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
