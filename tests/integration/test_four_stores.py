"""One run that mixes four stores, streamed while they fail: step by step what it is without a fault."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from numpy_engine import NumpyEngine, NumpyResult
from servers.four_stores import FourStores, four_stores
from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.batch import Batch
from vorox.core.config import load_config
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import RunDataIndex, when, where
from vorox.data.storage import waiting_for_data
from vorox.records.replay_chain import read_chain
from vorox.run import Outcome

STEPS = 150
ROWS = 8
STREAMED = {
    "mode": "streaming",
    "growth": {"mode": "strict", "later_passes": "segments", "max_segment_units": 4},
    "streaming": {"retention_bytes": 400_000},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourStores]:
    with four_stores(tmp_path_factory.mktemp("csv")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


@pytest.fixture(scope="module")
def clean(stores: FourStores, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The chain of the run that meets no fault."""
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return result(run(configured(stores, tmp_path_factory.mktemp("clean") / "run", STREAMED)))


def configured(stores: FourStores, directory: Path, data: dict[str, Any]) -> RunConfig:
    """A run over the four sources, everything of it below a directory."""
    (directory / "text").mkdir(parents=True)
    configuration(directory)
    file = directory / "tiny.yaml"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["data"] |= data
    settings["data"]["sources"] = [{**source, "stall_seconds": 1.0} for source in stores.sources]
    settings["data"]["cache"]["unit_bytes"] = 6_000
    settings["data"]["sequence_length_tokens"] = 64
    settings["train"] |= {"num_steps": STEPS, "global_batch_sequences": ROWS}
    settings["checkpoint"]["every_steps"] = 50
    settings["eval"]["every_steps"] = 50
    file.write_text(json.dumps(settings), encoding="utf-8")
    return load_config(file)


def result(outcome: Outcome) -> list[tuple[str, str]]:
    return [(entry.batch, entry.chain) for entry in read_chain(outcome.run_directory).values()]


def text_of(stores: FourStores, source: str, uri: str, ordinal: int) -> str:
    """The text that was put there, by the name of its file and its number in it."""
    texts = stores.texts[{"crawl": "s3", "books": "gcs", "edu": "hub", "notes": "local"}[source]]
    file = int(uri.rpartition("/")[2].partition(".")[0])
    return texts[file * len(texts) // 2 + ordinal]


@pytest.mark.slow
def test_faults_change_no_step_and_provenance_agrees_both_ways(
    stores: FourStores, clean: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert len(clean) == STEPS
    with stores.behind(error_503_fraction=0.2, truncated_fraction=0.4, stall_once_seconds=60, seed=11) as proxies:
        faulty = run(configured(stores, tmp_path / "faulty", STREAMED))
        kinds = {
            kind: sum(proxy.faults[kind] for proxy in proxies.values()) for kind in ("answer", "truncate", "stall")
        }
    assert waiting_for_data() is None
    assert kinds["stall"] == 3
    assert min(kinds.values()) >= 1, f"too few faults to show anything: {kinds}"
    assert result(faulty) == clean

    run_data = RunDataIndex.open(faulty.run_directory)
    chooser = random.Random(1)
    seen: set[str] = set()
    for _ in range(1_000):
        step, slot = chooser.randint(1, STEPS), chooser.randrange(ROWS)
        (row,) = where(run_data, step, slot)
        assert row.documents
        document = chooser.choice(row.documents)
        seen.add(document.uri.partition(":")[0])
        text = text_of(stores, row.source, document.uri, document.ordinal)
        assert document.text_xxh3 == xxhash.xxh3_64_intdigest(text.encode())
        times = when(run_data, document.uri, ordinal=document.ordinal)
        assert (step, slot, row.row) in {(time.step, time.slot, time.row) for time in times}
    assert len(seen) == 4


class Killed(BaseException):
    """Ends a run in its middle."""


@pytest.mark.slow
def test_a_run_that_was_killed_twice_goes_on_under_faults(
    stores: FourStores, clean: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = NumpyEngine.train_step, [31, 118]

    def train_step(self: NumpyEngine, batch: Batch, **arguments: float) -> NumpyResult:
        if left and batch.step + 1 == left[0]:
            left.pop(0)
            raise Killed
        return original(self, batch, **arguments)

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    config = configured(stores, tmp_path / "killed", STREAMED)
    with stores.behind(error_503_fraction=0.2, truncated_fraction=0.2, seed=7):
        for _ in range(2):
            with pytest.raises(Killed):
                run(config)
        outcome = run(config)
    assert result(outcome) == clean


@pytest.mark.slow
def test_streamed_from_four_stores_is_what_a_cache_of_them_is(stores: FourStores, tmp_path: Path) -> None:
    growing = {"growth": {**STREAMED["growth"]}}
    with stores.behind(error_503_fraction=0.2, truncated_fraction=0.2, seed=9):
        streamed = run(configured(stores, tmp_path / "streamed", STREAMED))
        cached = run(configured(stores, tmp_path / "cached", growing))
    assert result(streamed) == result(cached)
