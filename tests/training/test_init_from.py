"""Runs that begin with the weights of other runs: across engines, with the optimizer's state, from transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiny_runs import configuration
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.json_lines import read_history
from vorox.core.schema import RunConfig
from vorox.run import train
from vorox.training.export.checkpoint import export

BOTH = [pytest.mark.torch, pytest.mark.jax]


def config_of(tmp_path: Path, backend: str, *overrides: str) -> RunConfig:
    threads = "1" if backend == "torch" else "null"
    return configuration(tmp_path, [f"backend={backend}", f"runtime.num_threads={threads}", *overrides])


def losses(run: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in read_history(run / "evaluations.jsonl").items()}


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_of_one_engine_goes_on_in_the_other(first: str, second: str, tmp_path: Path) -> None:
    """Weights and AdamW's state cross over: 12 steps and 6 more elsewhere are 18 of one engine, to rounding."""
    rate = ("schedule.name=constant", "schedule.warmup_steps=0", "data.shuffle=false")
    begun = train(config_of(tmp_path, first, *rate, "run.name=begun")).run_directory
    other = config_of(
        tmp_path, second, *rate, "run.name=other", f"train.from_weights={begun}", "train.from_optimizer=true",
        "train.num_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0",
    )  # fmt: skip
    end = train(other)
    assert losses(end.run_directory)[1] == pytest.approx(losses(begun)[12], rel=1e-5)
    same = config_of(tmp_path, first, "run.name=same", f"train.from_weights={begun}", "train.from_optimizer=true",
                     *rate, "train.num_steps=6")  # fmt: skip
    here, there = train(same), train(
        config_of(tmp_path, second, "run.name=there", f"train.from_weights={begun}", "train.from_optimizer=true",
                  *rate, "train.num_steps=6")
    )  # fmt: skip
    assert losses(there.run_directory)[6] == pytest.approx(losses(here.run_directory)[6], rel=1e-5)


@pytest.mark.torch
def test_the_run_is_recorded_resumed_and_replayed(tmp_path: Path) -> None:
    from vorox.core.ranks.distributed_context import DistributedContext
    from vorox.records.log import RunLog
    from vorox.run import make_workload
    from vorox.training.replay import replay

    begun = train(config_of(tmp_path, "torch", "run.name=begun")).run_directory
    config = config_of(tmp_path, "torch", "run.name=next", f"train.from_weights={begun.name}", "optimizer.lr=0.003")
    run = train(config).run_directory
    assert f"Loaded initial weights from {begun}" in (run / "log.txt").read_text()
    first = read_history(run / "evaluations.jsonl")
    assert first[6]["loss"] < 4.0
    report = replay(run, lambda one: make_workload(one, DistributedContext(), RunLog(None), None, build=False))
    assert report.is_exact
    assert report.num_steps == 12


@pytest.mark.torch
@pytest.mark.hf
def test_from_a_directory_of_transformers(tmp_path: Path) -> None:
    begun = train(config_of(tmp_path, "torch", "run.name=begun")).run_directory
    exported = tmp_path / "exported"
    export(begun, exported, dtype="fp32")
    config = config_of(
        tmp_path, "torch", f"train.from_weights={exported}", "train.num_steps=1", "optimizer.lr=1e-12",
        "optimizer.weight_decay=0", "run.name=next",
    )  # fmt: skip
    assert losses(train(config).run_directory)[1] == pytest.approx(losses(begun)[12], rel=1e-5)
    with pytest.raises(ConfigError, match="no optimizer state"):
        train(config_of(tmp_path, "torch", f"train.from_weights={exported}", "train.from_optimizer=true"))


@pytest.mark.torch
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    begun, muon = train(config_of(tmp_path, "torch", "run.name=begun")).run_directory, ["optimizer.name=muon"]
    with pytest.raises(ConfigError, match="No weights at 'nowhere'"):
        train(config_of(tmp_path, "torch", "train.from_weights=nowhere"))
    with pytest.raises(ConfigError, match=r"num_layers = 1 \(here 2\)"):
        train(config_of(tmp_path, "torch", f"train.from_weights={begun}", "model.num_layers=2"))
    with pytest.raises(ConfigError, match="another tokenizer") as caught:  # of no more tokens than the weights have
        train(config_of(tmp_path, "torch", f"train.from_weights={begun}", "tokenizer.kind=char",
                        "model.vocab_size=257"))  # fmt: skip
    assert caught.value.where == "tokenizer"
    with pytest.raises(CheckpointError, match="The optimizer state holds exp_avg, exp_avg_sq and updates"):
        train(config_of(tmp_path, "torch", f"train.from_weights={begun}", "train.from_optimizer=true", *muon))
    with pytest.raises(ConfigError, match=r"it needs train\.from_weights"):
        config_of(tmp_path, "torch", "train.from_optimizer=true")
    checkpoint = begun / "checkpoints" / "step-00000012" / "model.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        train(config_of(tmp_path, "torch", f"train.from_weights={checkpoint.parent}"))
    assert np.isfinite(list(losses(begun).values())).all()
