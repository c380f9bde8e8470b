"""A run may go on with the other engine: the same rows, one replay chain, the losses of one engine.

The oracle is the run that keeps its engine. Losses agree to 1e-5 (relative).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import configuration, run
from vorox.records.replay_chain import ChainEntry, number, read_chain
from vorox.records.run_context import recorded_config

pytestmark = [pytest.mark.torch, pytest.mark.jax]
SETTINGS = [
    "backend=torch", "runtime.num_threads=null", "model.hidden_size=32", "model.num_heads=4", "schedule.name=constant",
    "log.matmul_peak=false",
]  # fmt: skip


def entries(directory: Path) -> list[ChainEntry]:
    return list(read_chain(directory).values())


def test_from_torch_to_jax_and_back(tmp_path: Path) -> None:
    alone = run(configuration(tmp_path, [*SETTINGS, "run.name=alone"])).run_directory
    directory = run(configuration(tmp_path, [*SETTINGS, "train.num_steps=4"])).run_directory
    for backend, steps in (("jax", 8), ("torch", 12)):
        changed = {"backend": backend, "train.num_steps": steps}
        config = recorded_config(directory, [f"{key}={value}" for key, value in changed.items()])
        run(config, resume_from=directory, named_keys=list(changed))
    assert [entry.batch for entry in entries(directory)] == [entry.batch for entry in entries(alone)]
    losses, oracle = ([number(entry.loss) for entry in entries(path)] for path in (directory, alone))
    assert losses == pytest.approx(oracle, rel=1e-5)
    assert {path.name for path in (directory / "checkpoints").iterdir()} >= {"step-00000008", "step-00000012"}
