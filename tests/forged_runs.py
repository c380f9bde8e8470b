"""Forged runs: records that agree in every link, manifest and fingerprint, of steps that nobody computed.

A run of 12 steps keeps every state, so it has 12 segments of one step; segment N is step N. A forger who changes what
the engine does gets all records from the run itself. One who splices two runs writes their records anew.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

import tiny_runs
import vorox.run
from numpy_engine import NumpyEngine, NumpyResult
from vorox.core.batch import Batch
from vorox.core.engine import StepValues
from vorox.core.files.atomic import pretty_json
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.records.replay_chain import ChainEntry, ReplayChain, StateChain, number, read_chain, read_states
from vorox.training.checkpoints.store import STATE_NAME

Kind = Literal["data", "weights", "skipped", "spliced"]
KINDS: tuple[Kind, ...] = ("data", "weights", "skipped", "spliced")
EVERY_STATE = [
    "checkpoint.every_steps=1", "checkpoint.keep_last=99", "eval.every_steps=null",
    "data.validation.held_out_fraction=0", "log.every_steps=100", "log.matmul_peak=false",
]  # fmt: skip
NUM_SEGMENTS = 12


def honest_run(directory: Path, seed: int, overrides: Collection[str] = ()) -> Path:
    """A run that keeps all of its states; runs below one directory share their cache."""
    settings = [*EVERY_STATE, f"run.seed={seed}", f"run.name=run-{seed}", *overrides]
    return tiny_runs.run(tiny_runs.configuration(directory, settings)).run_directory


def forged_run(directory: Path, seed: int, kind: Kind, segments: Collection[int]) -> Path:
    """A run in which the segments are forged, and no other; ``weights`` end in a state that does not follow."""
    if kind == "spliced":
        return _spliced(directory, seed, segments)
    chooser = random.Random(seed)

    def forge(original: Callable[..., NumpyResult]) -> Callable[..., NumpyResult]:
        def train_step(engine: NumpyEngine, batch: Batch, **arguments: Any) -> NumpyResult:
            if batch.step + 1 not in segments:
                return original(engine, batch, **arguments)
            if kind == "data":
                return original(engine, _other_rows(batch), **arguments)
            if kind == "skipped":
                loss, norm = 4 + chooser.random(), 0.5 + chooser.random()
                return NumpyResult(StepValues(loss, norm, True, {}, (chooser.random(), chooser.random())))
            found = original(engine, batch, **arguments)
            engine.parameters["output"] *= np.float32(1.01)
            return found

        return train_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyEngine, "train_step", forge(NumpyEngine.train_step))
        return honest_run(directory, seed)


def _other_rows(batch: Batch) -> Batch:
    """A batch of the same shape with other text; its digest stays the one of the claimed rows."""
    return replace(batch, tokens_ABT=(batch.tokens_ABT + 1) % 200, labels_ABT=batch.labels_ABT)


class _OtherWeights(tiny_runs.NumpyBackend):
    """Starts from other initial weights."""

    def create(self, config: RunConfig, spec: DecoderSpec, dist: DistributedContext) -> NumpyEngine:
        return NumpyEngine(spec.vocab_size, seed=config.run.seed + 1, width=4)


def _spliced(directory: Path, seed: int, segments: Collection[int]) -> Path:
    """A run whose states before some segments are those of a twin with other initial weights, or no longer are."""
    run = honest_run(directory, seed)
    kept = directory / f"honest-{seed}"
    shutil.move(run, kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vorox.run.backends, "load", lambda name: _OtherWeights())
        twin = honest_run(directory, seed)
    other = directory / f"twin-{seed}"
    shutil.move(twin, other)
    shutil.copytree(kept, run)
    sources, is_twin = dict[int, Path](), False
    for step in range(1, NUM_SEGMENTS + 1):
        is_twin ^= step in segments
        sources[step] = other if is_twin else kept
    _write_records(run, sources, lambda entry: entry.batch)
    for path in (kept, other):
        shutil.rmtree(path)
    return run


def rewrite(run: Path, batch: Callable[[ChainEntry], str]) -> None:
    """Write all records of a run anew, with other digests of batches."""
    before = run.with_name(f"{run.name}-before")
    shutil.copytree(run, before)
    _write_records(run, dict.fromkeys(range(1, NUM_SEGMENTS + 1), before), batch)
    shutil.rmtree(before)


def _write_records(run: Path, sources: Mapping[int, Path], batch: Callable[[ChainEntry], str]) -> None:
    """Write both chains and all checkpoints of a run from steps of others, each with the links that follow.

    The logged metrics go, because they would contradict the chain.
    """
    layout = RunLayout(run)
    for path in (layout.chain, layout.states, layout.metrics):
        path.unlink()
    shutil.rmtree(layout.checkpoints)
    layout.checkpoints.mkdir()
    start: Any = SimpleNamespace(step=0, chain="")
    chain, states = ReplayChain(run, start), StateChain(run, 0)
    for step, source in sources.items():
        entry = read_chain(source)[step]
        values = StepValues(number(entry.loss), number(entry.grad_norm), True, {}, ())
        chain.record(step, batch(entry), values)
        progress: Any = SimpleNamespace(step=step, chain=chain.head)
        states.record(progress, read_states(source)[step].fingerprint)
        _with_chain(RunLayout(source).checkpoint(step), layout.checkpoint(step), chain.head)
    chain.flush()


def _with_chain(source: Path, target: Path, head: str) -> None:
    """Copy a checkpoint with another head of the chain, in its state and manifest, and the hashes of both."""
    manifest = read_manifest(source)
    with StagedDirectory(target) as directory:
        for name in manifest["files"]:
            content = (source / name).read_bytes()
            if name == STATE_NAME:
                state = read_json(source / name, dict)
                state["progress"]["chain"] = head
                content = pretty_json(state)
            directory.write(name, content)
        directory.commit({**manifest["metadata"], "chain": head})
