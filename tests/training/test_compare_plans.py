"""Ranks compare their plans, and the rows that they compute for the first batch, before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tiny_runs
from rank_threads import together
from vorox.core.errors import ConfigError
from vorox.data.order.plan import DataPlan
from vorox.training.checkpoints.store import read_state
from vorox.training.loop.startup import TrainingSetup, compare_plans


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of four steps with different seeds."""
    found: list[Path] = []
    directory = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        tiny_runs.use_numpy_engine(patch)
        for seed in (1, 2):
            config = tiny_runs.configuration(directory, [f"run.seed={seed}", "train.num_steps=4"])
            found.append(tiny_runs.run(config).run_directory)
    return found


def compare(plans: list[Any], states: list[Any]) -> list[Any]:
    def program(dist: Any) -> None:
        workload = SimpleNamespace(distributed=dist)
        setup = SimpleNamespace(workload=workload, plan=plans[dist.rank], state=states[dist.rank])
        compare_plans(cast(TrainingSetup, setup))

    return together(len(plans), program)[0]


def test_equal_plans_pass(runs: list[Path]) -> None:
    plans = [DataPlan.open(runs[0] / "plan.jsonl") for _ in range(3)]
    state = read_state(runs[0] / "checkpoints/step-00000004")
    start = replace(state.progress.cursor, position=0, step=0)
    begin = replace(state, progress=replace(state.progress, step=0, cursor=start))
    assert compare(plans, [begin] * 3) == [None] * 3
    assert compare(plans, [state] * 3) == [None] * 3, "also at the end of the plan"


def test_another_plan_is_named(runs: list[Path]) -> None:
    plans = [DataPlan.open(run / "plan.jsonl") for run in (runs[0], runs[1])]
    state = read_state(runs[0] / "checkpoints/step-00000004")
    for error in compare(plans, [state] * 2):
        assert isinstance(error, ConfigError)
        assert error.what.startswith(f"Rank 1 differs from rank 0: plan is {plans[1].digest}, on rank 0 ")


def test_another_step_is_named(runs: list[Path]) -> None:
    plans = [DataPlan.open(runs[0] / "plan.jsonl") for _ in range(2)]
    state = read_state(runs[0] / "checkpoints/step-00000004")
    other = replace(state, progress=replace(state.progress, step=3))
    for error in compare(plans, [state, other]):
        assert "Rank 1 differs from rank 0: step is 3, on rank 0 4" in str(error)


def test_a_rank_that_computes_another_order_is_named(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its libraries shuffled in another way: one row of the batch is another one."""
    plans = [DataPlan.open(runs[0] / "plan.jsonl") for _ in range(2)]
    state = read_state(runs[0] / "checkpoints/step-00000004")
    begin = replace(state, progress=replace(state.progress, cursor=replace(state.progress.cursor, position=0)))
    locate = plans[1].locate

    def wrong(positions: Any) -> Any:
        found = locate(positions)
        found.row[-1] += 1
        return found

    monkeypatch.setattr(plans[1], "locate", wrong)
    for error in compare(plans, [begin] * 2):
        assert "Rank 1 differs from rank 0: first batch is " in str(error)
