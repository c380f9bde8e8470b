"""Runs of a mixture of experts on several processes are the run of one process.

The oracle is the same command with one process, as in ``test_torch_ranks.py``, whose tolerances apply.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.processes import Runs, lines
from ranks.test_torch_ranks import MODEL, assert_same_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXPERTS = [
    *MODEL, "model.num_experts=4", "model.intermediate_size=24", "loss.load_balancing_weight=0.1",
    "loss.router_z_loss_weight=0.01",
]  # fmt: skip
PLACEMENTS = {
    "replicas": (2, ["parallel.data_parallel_size=2"]),
    "FSDP2, three ranks, shards of unequal size": (3, ["parallel.fsdp_size=3", "train.activation_checkpointing=block"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("experts"), EXPERTS)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.train("alone", [])[0]


def router_metrics(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record["values"].items() if key.startswith("router/")}
        for record in lines(run, "metrics")
        if "loss" in record.get("values", {})
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_ranks_are_one(placement: str, runs: Runs, alone: Path) -> None:
    size, settings = PLACEMENTS[placement]
    run = runs.train(placement.split(",")[0].replace(" ", "-"), [*settings, "--nproc", str(size)])[0]
    assert_same_run(run, alone)
    expected = router_metrics(alone)
    assert all(len(values) == 5 for values in expected)
    for here, there in zip(router_metrics(run), expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4)
