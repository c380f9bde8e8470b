"""Runs over sources with images that grow, during a run or between two attempts: exact order, the right pixels."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from PIL import Image

import vorox
import vorox.run
from numpy_engine import NumpyEngine
from pictures import VISION, caption, picture_configuration, write_pictures
from tiny_runs import Killed, at_step, events, kill, result, run, use_numpy_engine
from vorox.cli import main
from vorox.core.batch import BatchImages
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.corpus import cache_opener
from vorox.data.corpus.corpus import prepare
from vorox.records.log import RunLog
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

RECORDS, ADDED = 150, 100
STRICT = ["data.growth.mode=strict", "data.growth.horizon_steps=2", "data.growth.first_segment_units=1"]
GROWS = [*STRICT, "data.cache.grow=true"]


class NoBackgroundBuild:
    """Builds nothing: the cache stays as it is until somebody else goes on."""

    is_running = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        del arguments, options

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def pixels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The hash of the pixels of every batch that is trained on, by the digest of its rows; equal rows, equal pixels."""
    use_numpy_engine(monkeypatch)
    original, seen = NumpyEngine.train_step, dict[str, str]()

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        found = xxhash.xxh3_128()
        for images in batch.images_A:
            found.update(images.rows_I.tobytes())
            found.update(images.pixels_ISSC.tobytes())
        assert seen.setdefault(batch.digest(), found.hexdigest()) == found.hexdigest()
        return original(self, batch, **kwargs)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    return seen


def configuration(directory: Path, overrides: Sequence[str]) -> RunConfig:
    if not (directory / "text").exists():
        write_pictures(directory / "text", records=RECORDS)
    return picture_configuration(directory, [f"data.sources.0.paths=['{directory}/text/*.jsonl']", *overrides])


def add_records(directory: Path) -> None:
    write_pictures(directory / "text", records=ADDED, first=RECORDS, name="more.jsonl")


def is_exact(directory: Path) -> bool:
    def make(config: RunConfig) -> Workload:
        kept = directory / "tokenizer"
        log = RunLog(None)
        return vorox.run.make_workload(config, DistributedContext(), log, None, build=False, tokenizer_directory=kept)

    return replay(directory, make).is_exact


def check_images_of(directory: Path, step: int) -> set[str]:
    """Compare the images of a step with those of its documents, decoded by Pillow; return the documents' files."""
    opened, side = vorox.open_run(directory), VISION["image_size_pixels"]
    (batch,) = opened.batches(step, 1)
    found: list[np.ndarray] = []
    for images in batch.images_A or ():
        assert isinstance(images, BatchImages)
        found += list(images.pixels_ISSC)
    expected: list[np.ndarray] = []
    files = set[str]()
    for document in [one for row in opened.where(step) for one in row.documents]:
        number = document.ordinal + (RECORDS if document.uri.endswith("more.jsonl") else 0)
        files.add(Path(document.uri).name)
        for index, _ in enumerate(caption(number)[1]):
            with Image.open(Path(document.uri).parent / f"pictures/{number}-{index}.png") as file:
                expected.append(np.asarray(file.resize((side, side), Image.Resampling.BICUBIC)))
    assert {pixels.tobytes() for pixels in found} == {pixels.tobytes() for pixels in expected}
    assert len(found) == len(expected) > 0
    return files


def test_a_run_over_a_growing_cache_is_the_run_over_the_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixels: dict[str, str]
) -> None:
    settings = [*STRICT, "train.num_steps=30"]
    with monkeypatch.context() as patch:
        patch.setattr(cache_opener, "build_in_background", NoBackgroundBuild)
        slow = configuration(tmp_path / "slow", settings)
        corpus = prepare(slow)
        assert len(corpus.train[0].missing_units(0, 4)) == 3
        others = threading.Timer(0.2, lambda: prepare(configuration(tmp_path / "slow", [])))
        others.start()  # another process that builds, for the run
        growing = run(slow)
        others.join()
    prepare(configuration(tmp_path / "complete", []))
    straight = run(configuration(tmp_path / "complete", settings))
    assert result(growing) == result(straight)
    assert len(set(pixels.values())) == 30, "the batches of both runs have the same pixels"
    assert len(events(growing.run_directory, "segment")) >= 2
    assert check_images_of(growing.run_directory, 30) == {"captions.jsonl"}
    assert is_exact(growing.run_directory)


@pytest.mark.slow
def test_records_that_are_added_between_two_attempts_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added while the run is down; killed again among the new rows, the end is that of the run that was killed once."""
    place = tmp_path / "place"
    config = configuration(place, [*GROWS, "train.num_steps=55"])
    kill_at(monkeypatch, 6, config)
    add_records(place)
    # Both continue from these files: how far the killed run had planned ahead depends on the speed of its reader.
    shutil.copytree(place, tmp_path / "killed once")
    (directory,) = (place / "runs").iterdir()
    assert check_images_of(directory, 4) == {"captions.jsonl"}
    once = result(run(config))
    files = set[str]().union(*(check_images_of(directory, step) for step in range(7, 56)))
    assert files == {"captions.jsonl", "more.jsonl"}
    assert is_exact(directory)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "killed once", place)
    kill_at(monkeypatch, 50, config)
    twice = result(run(config))
    assert twice == {**once, "losses": twice["losses"]}


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int, config: RunConfig) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config)


def test_a_run_that_does_not_grow_leaves_added_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, [])
    kill_at(monkeypatch, 6, config)
    (directory,) = (tmp_path / "runs").iterdir()
    before = (directory / "chain.jsonl").read_bytes()
    add_records(tmp_path)
    capsys.readouterr()
    plan = (directory / "plan.jsonl").read_bytes()
    assert main(["train", "--resume", str(directory)]) == 0
    assert "data.cache.grow=true" in (directory / "events.jsonl").read_text()
    assert (directory / "chain.jsonl").read_bytes().startswith(before.splitlines()[0])
    assert (directory / "plan.jsonl").read_bytes() == plan
