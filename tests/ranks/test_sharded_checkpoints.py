"""Checkpoints of sharded ranks: equal element by element in every layout, in bounded memory, whole after any kill.

The oracle of layouts is a checkpoint of one device, which one process writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engines import LR, POSITIONS, VOCAB, batch, jax_config, rows
from ranks.processes import Runs, entries, fingerprint, lines, on_ranks, stored_arrays, train_with_kills
from ranks.resharding import config_of
from ranks.test_torch_ranks import MODEL
from servers.shelves import shelf
from vorox import backends
from vorox.core.engine import Engine
from vorox.core.files.staged_directory import StagedDirectory, read_manifest, verify_directory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import step_directories
from vorox.models.decoder.spec import decoder_spec
from vorox.training.checkpoints.store import write_state

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def resharding(data: int, fsdp: int, *words: object) -> str:
    return on_ranks("ranks.resharding", data * fsdp, data, fsdp, *words)


def one_device(backend: str) -> Engine:
    config = config_of() if backend == "torch" else jax_config(seed=5, optimizer={"name": "muon"})
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    return backends.load(backend).create(config, spec, DistributedContext())


def save(engine: Engine, target: Path) -> Path:
    with StagedDirectory(target) as directory:
        directory.commit({"fingerprint": write_state(engine.snapshot(detached=False), directory)})
    return target


def recorded(path: Path) -> str:
    return read_manifest(path)["metadata"]["fingerprint"]


@pytest.mark.jax
def test_a_state_is_the_same_in_every_layout(tmp_path: Path) -> None:
    """One device, FSDP2 on two ranks, HSDP on four and JAX, in every direction; 37 rows divide unequally."""
    engine = one_device("torch")
    for step in range(2):
        engine.train_step(batch(rows(8, seed=step), step=step), lr=LR, weight_decay=0.1).fetch()
    alone = save(engine, tmp_path / "alone")
    jax_engine = one_device("jax")
    jax_engine.load(alone)
    from_jax = save(jax_engine, tmp_path / "jax")
    paths = {name: tmp_path / name for name in ("alone-fsdp", "jax-fsdp", "alone-hsdp", "fsdp-hsdp", "hsdp-fsdp")}
    resharding(1, 2, "reshard", alone, paths["alone-fsdp"], from_jax, paths["jax-fsdp"])
    resharding(2, 2, "reshard", alone, paths["alone-hsdp"], paths["alone-fsdp"], paths["fsdp-hsdp"])
    resharding(1, 2, "reshard", paths["fsdp-hsdp"], paths["hsdp-fsdp"])
    expected = stored_arrays(alone)
    assert any(name.startswith("momentum.") for name in expected)
    assert all(np.abs(array).max() > 0 for name, array in expected.items() if not name.endswith("bias"))
    for name, path in paths.items():
        verify_directory(path)
        assert len(list(path.glob("shard-*"))) == 2, f"{name}: replicas write nothing"
        assert recorded(path) == recorded(alone), "independent of the layout"
        found = stored_arrays(path)
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array, err_msg=f"{name}, {key}")
        for other in (one_device("torch"), jax_engine):
            other.load(path)
            assert other.fingerprint() == recorded(alone)


def test_a_save_copies_only_the_rows_of_a_rank(tmp_path: Path) -> None:
    """Gathering would take the whole state, four times the rows of a rank."""
    measured: dict[str, Any] = json.loads(resharding(1, 4, "measure", tmp_path / "saved"))
    share = measured["state_bytes"] / 4
    assert share > 20e6
    for saving, loading in measured["grown_bytes"]:
        assert 0.9 * share < saving < 1.6 * share
        assert loading < 0.6 * share


def test_kills_at_every_phase_of_a_save_leave_the_previous_checkpoint(tmp_path: Path) -> None:
    """Ranks die in the copy, within their file, after it, before the commit and after it."""
    runs = Runs(tmp_path, [*MODEL, "checkpoint.keep_last=20"])
    pair, _ = runs.train("pair", ["parallel.fsdp_size=2", "--nproc", "2"])
    kills = {"1-snapshot-4": 2, "0-rows-6": 4, "1-rows-8": 6, "1-shard-8": 6, "0-commit-10": 8, "0-committed-12": 12}
    run = train_with_kills(
        runs, "torch", ["parallel.fsdp_size=2", "checkpoint.every_steps=2"], tmp_path / "orders", tuple(kills)
    )
    resumed = [record["fields"]["step"] for record in lines(run, "events") if record["kind"] == "resumed"]
    assert resumed == list(kills.values())
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for path in step_directories(run).values():
        verify_directory(path)


def test_a_sharded_run_is_restored_from_its_mirror(tmp_path: Path) -> None:
    """All files of both ranks are there: the disk is lost, and the same command continues from the last step."""
    runs = Runs(tmp_path, MODEL)
    with shelf("s3", tmp_path) as store, store.behind() as (root, _):
        sharded = [f"checkpoint.mirror={root}/mirror", "parallel.fsdp_size=2", "--nproc", "2"]
        run, _ = runs.train("mirrored", sharded)
        chain, state = entries(run), fingerprint(run)
        shutil.rmtree(run)
        restored, _ = runs.train("mirrored", sharded)
        assert restored == run
        assert (entries(run), fingerprint(run)) == (chain, state)
        newest = max(step_directories(run).items())
        assert newest[0] == 12
        verify_directory(newest[1])
        runs.vorox(["train", "--resume", str(run), "train.num_steps=14", "--nproc", "2"])
    assert len(entries(run)) == 14
