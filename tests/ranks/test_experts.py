"""Runs of a mixture of experts on several processes are the run of one process.

The oracle is the same command with one process, as in ``test_torch_ranks.py``, whose tolerances apply, or that of
``layouts.py``. The models of transformers have stacked experts with and without biases, a shared expert, and documents
as rows of their own (gpt-oss), of which the ranks have different numbers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ranks.layouts import EXPERTS_SEED, check_layouts
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
from ranks.test_torch_ranks import MODEL, assert_same_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXPERTS = [
    *MODEL, "model.num_experts=4", "model.intermediate_size=24", "loss.load_balancing_weight=0.1",
    "loss.router_z_loss_weight=0.01",
]  # fmt: skip
PLACEMENTS = {
    "replicas": (2, ["parallel.data_parallel_size=2"]),
    "FSDP2, three ranks, shards of unequal size": (3, ["parallel.fsdp_size=3", "train.activation_checkpointing=block"]),
    "divided experts": (2, ["parallel.expert_parallel_size=2", "train.activation_checkpointing=block"]),
    "divided experts of two replicas": (4, ["parallel.expert_parallel_size=2"]),
}

TRANSFORMERS_MODELS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("experts"), EXPERTS)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.train("alone", [])[0]


STEPS = """
import torch.distributed as dist


def halves(micro_batch):
    micro_batch.forward_backward(weight=0.5)
    micro_batch.forward_backward(weight=0.5)


def uneven(micro_batch):
    for _ in range(2 if micro_batch.step == 2 and dist.get_rank() == 1 else 1):
        micro_batch.forward_backward()
"""


@pytest.mark.parametrize("layout", ["expert_parallel", "fsdp"])
def test_passes_of_a_function_that_ranks_run_unequally_often_end_the_run(layout: str, runs: Runs, alone: Path) -> None:
    """A pass has collectives: ranks that run equally many are one process, all others end before they hang."""
    file = runs.directory / "steps.py"
    file.write_text(STEPS)
    settings = [f"parallel.{layout}_size=2", "--nproc", "2"]
    run, _ = runs.train(f"halves-{layout}", [*settings, f"train.forward_backward={file}:halves"])
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    _, errors = runs.train(f"uneven-{layout}", [*settings, f"train.forward_backward={file}:uneven"], code=2)
    assert "Ranks call micro_batch.forward_backward a different number of times in step 3" in errors


def router_metrics(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record["values"].items() if key.startswith("router/")}
        for record in lines(run, "metrics")
        if "loss" in record.get("values", {})
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_ranks_are_one(placement: str, runs: Runs, alone: Path) -> None:
    size, settings = PLACEMENTS[placement]
    run = runs.train(placement.replace(",", "").replace(" ", "-"), [*settings, "--nproc", str(size)])[0]
    assert_same_run(run, alone)
    expected = router_metrics(alone)
    assert all(len(values) == 5 for values in expected)
    for here, there in zip(router_metrics(run), expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "name", ["native", *(pytest.param(name, marks=pytest.mark.hf) for name in TRANSFORMERS_MODELS)]
)
def test_divided_experts_compute_what_one_process_computes(name: str, count: int, tmp_path: Path) -> None:
    """20 steps on every rank; parameters and optimizer state move to divided experts and back without a change."""
    layout = f"{count},1,1,1,1,0,2" + ("" if name == "native" else f":transformers {name}")
    check_layouts([layout], tmp_path, EXPERTS_SEED)


@pytest.mark.hf
def test_runs_of_two_processes_equal_one(tmp_path: Path) -> None:
    """Pretrained weights; the run continues on one process, and divided again."""
    runs = pretrained_runs(tmp_path, "mixtral")
    alone, _ = runs.train("alone", [])
    pair, _ = runs.train("pair", ["parallel.expert_parallel_size=2", "--nproc", "2"])
    assert_same_numbers(pair, alone)
    check_continuation(runs, pair, "expert_parallel")


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("llama", 2, "Expert parallelism does not support the llama model"),
        ("mixtral", 3, "4 experts of the mixtral model are not divisible by expert_parallel_size = 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_step_1(name: str, size: int, what: str, tmp_path: Path) -> None:
    runs = pretrained_runs(tmp_path, name)
    sizes = [f"parallel.expert_parallel_size={size}", "--nproc", str(size), "train.global_batch_sequences=6"]
    _, errors = runs.train("refused", sizes, code=2)
    assert what in errors


def test_muon_and_bf16_with_divided_experts(runs: Runs) -> None:
    """Muon orthogonalises the experts of a rank; in bf16, losses agree within its precision."""
    settings = ["optimizer.name=muon", "optimizer.muon_lr=5e-3", "precision.dtype=bf16"]
    alone = runs.train("muon-alone", settings)[0]
    run = runs.train("muon-divided", [*settings, "parallel.expert_parallel_size=2", "--nproc", "2"])[0]
    assert losses(run) == pytest.approx(losses(alone), rel=5e-3)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Divided experts that are killed, then one process, then divided again: the rows and losses of one process."""
    runs = Runs(tmp_path, [*EXPERTS, "schedule.name=constant"])  # another train.num_steps changes no learning rate
    alone, _ = runs.train("alone", [])
    divided = "parallel.expert_parallel_size=2"
    process = runs.start("killed", [divided, "--nproc", "2"], tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run = runs.find("killed")
    for size, steps in ((1, 10), (2, 12)):
        sizes = [f"parallel.expert_parallel_size={size}", f"train.num_steps={steps}", "--nproc", str(size)]
        runs.vorox(["train", "--resume", str(run), *sizes])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
