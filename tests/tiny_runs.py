"""Whole runs in a fraction of a second: real text, tokenizer, cache, plan and loader under the numpy engine."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vorox.run
from numpy_engine import NumpyEngine
from training_device import DEVICE
from vorox.core.config import load_config
from vorox.core.files.json_lines import read_lines
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.experiments.tracking import read_metrics
from vorox.models.decoder.spec import DecoderSpec
from vorox.records.replay_chain import read_chain
from vorox.runtime.heartbeat import Heartbeat
from vorox.runtime.throughput import Throughput
from vorox.training.loop import observer, session

TEXT = "the step of a run is a pure function of its plan so what was lost can be computed again and again"
WORDS = sorted({*TEXT.split()})


def write_text(directory: Path, *, documents: int = 60, seed: int = 0) -> Path:
    """A folder of small texts, as jsonl, always the same."""
    chooser = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    lines = ['{"text": "' + " ".join(chooser.choices(WORDS, k=chooser.randint(5, 60))) + '"}' for _ in range(documents)]
    (directory / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def configuration(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run of 12 steps with a save every 4 and a validation every 6, everything below ``directory``."""
    if not (directory / "text").exists():
        write_text(directory / "text")
    settings = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {
            "sources": [{"name": "text", "format": "jsonl", "paths": [str(directory / "text")]}],
            "sequence_length_tokens": 16,
            "cache": {"directory": str(directory / "cache"), "chunk_rows": 16, "unit_bytes": 2000},
            "validation": {"held_out_fraction": 0.1},
        },
        "tokenizer": {"kind": "byte"},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 3},
        "train": {"num_steps": 12, "global_batch_sequences": 4, "micro_batch_sequences": 2},
        "checkpoint": {"every_steps": 4},
        "eval": {"every_steps": 6, "num_sequences": 5},
        "log": {"every_steps": 2},
        "runtime": {"device": DEVICE, "num_threads": 1},
        "run": {"directory": str(directory / "runs"), "name": "tiny"},
    }
    file = directory / "tiny.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return load_config(file, overrides)


class NumpyBackend:
    """Stands in for a backend's module."""

    def connect(self, config: RunConfig) -> DistributedContext:
        return DistributedContext()

    def create(self, config: RunConfig, spec: DecoderSpec, dist: DistributedContext) -> NumpyEngine:
        return NumpyEngine(spec.vocab_size, seed=config.run.seed, width=4)


def use_numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vorox.run.backends, "load", lambda name: NumpyBackend())


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do something in the middle of a step (from 1), once."""
    original, done = NumpyEngine.train_step, []

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        if batch.step + 1 == step and not done:
            done.append(step)
            action()
        return original(self, batch, **kwargs)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)


def before_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    """Call ``action`` with the step, from 1, at its start."""
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **arguments: Any) -> Any:
        action(batch.step + 1)
        return original(self, batch, **arguments)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)


def scale_steps(monkeypatch: pytest.MonkeyPatch, factors: Mapping[int, float]) -> None:
    """Multiply loss and gradients of the numpy engine at these steps."""
    step, gradients, now = NumpyEngine.train_step, NumpyEngine._gradients, [0]

    def train_step(engine: NumpyEngine, batch: Any, **kwargs: Any) -> Any:
        now[0] = batch.step + 1
        return step(engine, batch, **kwargs)

    def scaled(engine: NumpyEngine, *arguments: Any) -> Any:
        loss, found = gradients(engine, *arguments)
        factor = factors.get(now[0], 1)
        return factor * loss, {name: np.float32(factor) * array for name, array in found.items()}

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    monkeypatch.setattr(NumpyEngine, "_gradients", scaled)


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Measure the phases and the speed of runs by another clock, in seconds."""
    monkeypatch.setattr(session, "Heartbeat", functools.partial(Heartbeat, clock=clock))
    monkeypatch.setattr(observer, "Throughput", functools.partial(Throughput, clock=clock))


def run(config: RunConfig, **arguments: Any) -> vorox.run.Outcome:
    return vorox.run.train(config, argv=["test"], **arguments)


class Killed(BaseException):
    """Ends a run in the middle, as far as that is possible without ending the process."""


def result(outcome: vorox.run.Outcome) -> dict[str, Any]:
    directory = outcome.run_directory
    return {
        "progress": {k: v for k, v in outcome.progress.to_json().items() if k != "cursor"},
        "position": outcome.progress.cursor.position,
        "fingerprint": outcome.fingerprint,
        "eval_losses": outcome.eval_losses,
        "chain": [entry.chain for entry in read_chain(directory).values()],
        "losses": {step: values["loss"] for step, values in read_metrics(directory).items()},
        "steps": list(step_directories(directory))[-1],
    }


def kill() -> None:
    raise Killed


def events(directory: Path, kind: str) -> list[str]:
    return [event["message"] for event in read_lines(directory / "events.jsonl") if event["kind"] == kind]


def whole_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: type[Any], overrides: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of a run, and of its twin that is killed in step 7 and resumed from its checkpoint of step 4."""
    whole = result(run(configuration(folder / "whole", overrides)))
    original = engine.train_step

    def killed(self: Any, batch: Any, **arguments: Any) -> Any:
        if batch.step == 6:
            kill()
        return original(self, batch, **arguments)

    config = configuration(folder / "killed", overrides)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "train_step", killed)
        with pytest.raises(Killed):
            run(config)
    outcome = run(config)
    assert outcome.start_step == 4
    return whole, result(outcome)


def forget_steps(run_directory: Path) -> None:
    """Remove every record of the steps that a run has executed; its plan and caches stay."""
    for name in ("attempts.bin", "chain.jsonl"):
        (run_directory / name).unlink(missing_ok=True)
    shutil.rmtree(run_directory / "checkpoints", ignore_errors=True)
    record = json.loads((run_directory / "run.json").read_text(encoding="utf-8"))
    for attempt in record["attempts"]:
        attempt["notes"].pop("steps", None)
    (run_directory / "run.json").write_text(json.dumps(record), encoding="utf-8")
