"""A run whose checkpoints are sharded is verified, resumed, replayed, exported and loaded as one that is whole.

One process trains; then its checkpoints are written again as three ranks would write them. The oracle is the same run
with whole files.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import vorox
from tiny_runs import configuration, run
from vorox.cli import app
from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.run_layout import RunLayout, step_directories
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.stored.engine_state import ENGINE_FILE, MODEL_FILE, OPTIMIZER_FILE, read_weights
from vorox.models.stored.sharded_snapshot import ShardedSnapshot, ShardRows
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import latest_valid

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TORCH = ["backend=torch", "log.matmul_peak=false", "checkpoint.keep_last=9", "model.family=llama"]
COUNT = 3


def shard(checkpoint: Path) -> None:
    """Replace the arrays of a checkpoint by shards; every third row range belongs to one of three ranks."""
    spec = DecoderSpec(**json.loads((checkpoint / ENGINE_FILE).read_bytes())["spec"])
    counters = json.loads((checkpoint / ENGINE_FILE).read_bytes())["counters"]
    moments = load_file(checkpoint / OPTIMIZER_FILE)
    arrays = {f"weights.{name}": array for name, array in read_weights(checkpoint, spec)} | moments
    names: dict[str, tuple[str, ...]] = {}
    for kind in sorted({name.partition(".")[0] for name in moments}):
        names[kind] = tuple(row.name for row in spec.parameters if f"{kind}.{row.name}" in moments)
    snapshots = [ShardedSnapshot(spec, (index, COUNT), rows(arrays, index), names, counters) for index in range(COUNT)]
    whole, metadata = checkpoint.with_name("whole"), read_manifest(checkpoint)["metadata"]
    checkpoint.rename(whole)
    with StagedDirectory(checkpoint) as directory:
        parts = [snapshot.write_part(directory) for snapshot in snapshots]
        snapshots[0].write_metadata(directory, parts)
        for path in whole.iterdir():
            if path.name not in {MODEL_FILE, OPTIMIZER_FILE, ENGINE_FILE, "MANIFEST.json"}:
                directory.write(path.name, path.read_bytes())
        directory.commit({**metadata, "fingerprint": snapshots[0].fingerprint(parts)})
    shutil.rmtree(whole)


def rows(arrays: dict[str, np.ndarray], index: int) -> list[ShardRows]:
    found: list[ShardRows] = []
    for name, array in arrays.items():
        share = -(-len(array) // COUNT)
        part = array[share * index : share * (index + 1)]
        if len(part):
            found.append(ShardRows(name, share * index, part.shape, partial(np.asarray, part)))
    return found


def test_everything_that_reads_a_run_reads_shards(tmp_path: Path) -> None:
    straight = run(configuration(tmp_path, [*TORCH, f"run.directory={tmp_path / 'straight'}"]))
    directory = run(configuration(tmp_path, TORCH)).run_directory
    for path in step_directories(directory).values():
        shard(path)
        assert not (path / MODEL_FILE).exists()
    shutil.rmtree(RunLayout(directory).checkpoint(12))
    assert run(configuration(tmp_path, TORCH)).fingerprint == straight.fingerprint, "resumed from the shards of step 8"
    assert read_chain(directory) == read_chain(straight.run_directory)
    shard(RunLayout(directory).checkpoint(12))
    _commands(directory, straight.run_directory)
    expected, loaded = (vorox.load_model(path) for path in (straight.run_directory, directory))
    np.testing.assert_array_equal(loaded.logits([5, 6, 7]), expected.logits([5, 6, 7]))
    begun = [f"run.directory={tmp_path / 'begun'}", "train.num_steps=1", "train.from_optimizer=true"]
    begun = [
        run(configuration(tmp_path, [*TORCH, *begun, f"run.name={name}", f"train.from_weights={path}"])).fingerprint
        for name, path in (("whole", straight.run_directory), ("shards", directory))
    ]
    assert begun[0] == begun[1]
    damaged = RunLayout(directory).checkpoint(12) / "shard-00002-of-00003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    named: list[CheckpointError] = []
    found = latest_valid(directory, on_corrupt=lambda path, error: named.append(error))
    assert found is not None
    assert found.step == 8
    assert [error.where for error in named] == [str(damaged)]


def _commands(directory: Path, straight: Path) -> None:
    command = CliRunner()
    verified = command.invoke(app, ["checkpoints", "verify", str(directory), "--json"])
    assert verified.exit_code == 0, verified.output
    assert [entry["state"] for entry in json.loads(verified.stdout)] == ["valid"] * 3
    replayed = command.invoke(app, ["replay", str(directory), "--from", "4", "--json"])
    assert replayed.exit_code == 0, replayed.output
    report = json.loads(replayed.stdout)
    assert report["difference"] is None
    assert report["num_states"] == 2, "the fingerprints over elements of steps 8 and 12"
    exports = [directory.parent / name for name in ("shards", "whole")]
    for source, target in zip((directory, straight), exports, strict=True):
        exported = command.invoke(app, ["export", str(source), "--to", "hf", "--output", str(target)])
        assert exported.exit_code == 0, exported.output
    assert (exports[0] / MODEL_FILE).read_bytes() == (exports[1] / MODEL_FILE).read_bytes()
    generated = command.invoke(app, ["generate", str(directory), "-p", "the step", "--tokens", "4"])
    assert generated.exit_code == 0, generated.output
