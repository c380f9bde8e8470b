"""Disk space for checkpoints: checked before step 1, close to the real size, and reported with consistent numbers."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox import backends
from vorox.cli import main
from vorox.cli.planning.dry_run import RunPreview
from vorox.core.config import load_config
from vorox.core.errors import DoesNotFitError
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import step_directories
from vorox.data.text.shard_format import write_shard
from vorox.models.decoder.spec import decoder_spec
from vorox.planning.disk_space import checkpoint_bytes, checkpoint_space, plan_disk
from vorox.planning.memory_estimate import memory_per_device
from vorox.records.replay_chain import read_chain
from vorox.records.run_lookup import run_directories
from vorox.training.checkpoints.store import write_state

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30
IMAGES = [
    "model.vision.num_layers=1", "data.sequence_length_tokens=128", "tokenizer.kind=bpe", "tokenizer.vocab_size=300",
    "tokenizer.special_tokens=['<|image|>']",
]  # fmt: skip


def leave_free(patch: pytest.MonkeyPatch, free: int) -> None:
    patch.setattr("shutil.disk_usage", lambda path: Usage(free, 0, free))


@pytest.mark.parametrize(
    ("settings", "total", "done", "present", "most"),
    [
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=0"], 12, 0, 0, 3),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=1"], 400, 0, 0, 4),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=9", "checkpoint.keep_best=0"], 13, 0, 0, 4),
        (["checkpoint.every_steps=null", "checkpoint.every_seconds=null", "checkpoint.keep_last=9"], 12, 0, 0, 1),
        (["checkpoint.every_steps=null", "checkpoint.every_seconds=null", "checkpoint.at_end=false"], 12, 0, 0, 0),
        (["checkpoint.every_steps=null", "checkpoint.at_end=false"], 12, 0, 0, 3),
        (["checkpoint.every_steps=null", "checkpoint.every_seconds=9", "checkpoint.keep_last=2",
          "checkpoint.keep_best=0"], 12, 0, 0, 3),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=0",
          "checkpoint.keep_every_steps=100"], 1000, 0, 0, 13),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=0"], 12, 8, 2, 3),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=0"], 12, 12, 2, 2),
        (["checkpoint.every_steps=4", "checkpoint.keep_last=2", "checkpoint.keep_best=0"], 12, 8, 7, 7),
    ],
)  # fmt: skip
def test_how_many_lie_there_at_once(
    settings: list[str], total: int, done: int, present: int, most: int, tmp_path: Path
) -> None:
    config = configuration(tmp_path, settings)
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    space = checkpoint_space(config, spec, total, done_steps=done, present=present)
    assert space.most == most
    assert space.needed_bytes == (most - present) * space.checkpoint_bytes


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("torch", [], marks=pytest.mark.torch),
        pytest.param("torch", ["optimizer.name=muon"], marks=pytest.mark.torch),
        pytest.param("jax", ["runtime.num_threads=null"], marks=pytest.mark.jax),
        pytest.param("jax", ["runtime.num_threads=null", "checkpoint.format=orbax"], marks=pytest.mark.jax),
    ],
)
def test_the_estimate_is_what_an_engine_writes(backend: str, settings: list[str], tmp_path: Path) -> None:
    shape = ["model.hidden_size=128", "model.num_layers=2"]
    config = configuration(tmp_path, [*settings, *shape, f"backend={backend}"])
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    engine = backends.load(backend).create(config, spec, DistributedContext())
    with StagedDirectory(tmp_path / "checkpoint") as directory:
        write_state(engine.snapshot(detached=False), directory)
        directory.commit({})
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    assert checkpoint_space(config, spec, 12).checkpoint_bytes == pytest.approx(written, rel=0.05)


def test_the_reference_of_dpo_is_in_no_checkpoint(tmp_path: Path) -> None:
    """Weights and two moments, 4 bytes each, whatever the device holds beside them."""
    config = configuration(tmp_path, ["optimizer.name=adamw"])
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    dpo = config.model_copy(update={"loss": config.loss.model_copy(update={"name": "dpo"})})
    assert memory_per_device(spec, dpo).parameter_bytes == 8 * spec.num_parameters
    assert checkpoint_bytes(dpo, spec) == 12 * spec.num_parameters + 3 * 256 * len(spec.parameters) + (16 << 10)


def test_too_little_space_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    config = configuration(tmp_path)
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    needed = checkpoint_space(config, spec, 12).needed_bytes
    with monkeypatch.context() as patch:
        leave_free(patch, needed - 1)
        with pytest.raises(DoesNotFitError) as refused:
            run(config)
    error = refused.value
    assert error.exit_code == 3
    assert f"{needed:,} bytes" in error.what
    assert f"{needed - 1:,} are free" in error.what
    assert f"checkpoint.every_steps={2 * (config.checkpoint.every_steps or 0)}" in error.hint
    assert "every_seconds" not in error.hint, "it is null already"
    assert {"checkpoint.keep_last", "run.directory"} <= set(error.hint.replace(",", " ").replace("(", " ").split())
    assert run_directories(tmp_path / "runs") == [], "refused before the first step"
    with monkeypatch.context() as patch:
        leave_free(patch, needed)
        assert run(config).progress.step == 12
        leave_free(patch, 0)
        run(config)  # nothing is left to save
    (directory,) = run_directories(tmp_path / "runs")
    assert len(read_chain(directory)) == 12
    assert len(step_directories(directory)) <= checkpoint_space(config, spec, 12).most


@pytest.mark.torch
def test_a_dry_run_shows_it_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["train", "tiny.yaml", "--dry-run"]
    leave_free(monkeypatch, GIB)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "checkpoints: at most 3 x " in shown
    assert "1 GiB free" in shown or "1.0 GiB free" in shown
    assert "caches: about" in shown
    leave_free(monkeypatch, 1000)
    assert main(command) == 3
    assert "checkpoint.keep_last" in capsys.readouterr().err
    spec = decoder_spec(load_config("tiny.yaml").model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    leave_free(monkeypatch, checkpoint_space(load_config("tiny.yaml"), spec, 12).needed_bytes + 1000)
    assert main(command) == 3
    assert "data.cache.directory" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_cached_ids_take_the_space_of_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards of 2 MiB, held out in part, whatever bytes of text a token of the tokenizer stands for."""
    use_numpy_engine(monkeypatch)
    configuration(tmp_path)
    (tmp_path / "web").mkdir()
    for number in (1, 2):
        write_shard(tmp_path / "web" / f"web_{number}.bin", np.full(1 << 20, number, np.uint16))
    source = json.dumps([{"name": "web", "format": "bin", "paths": [str(tmp_path / "web")], "tokenizer": "byte"}])
    config = load_config(tmp_path / "tiny.yaml", [f"data.sources={source}"])
    (line,) = [line for line in RunPreview(config, "never").lines() if "caches: about" in line]
    assert "caches: about 4.0 MiB needed" in line


@pytest.mark.parametrize(("vision", "token_bytes"), [([], 2), (IMAGES, 4)])
def test_a_token_beside_images_takes_four_bytes(vision: list[str], token_bytes: int, tmp_path: Path) -> None:
    config = configuration(tmp_path, vision)
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    plan = plan_disk(config, spec, tmp_path, present_steps=[], total_steps=12, done_steps=0, new_tokens=1000)
    assert plan.cache_bytes == 1000 * token_bytes
