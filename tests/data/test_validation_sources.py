"""Validation text from separate sources, and validation shards in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tiny_runs
import vorox.run
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.corpus import prepare
from vorox.data.provenance.inspection import peek, stats, verify
from vorox.data.provenance.queries import RunDataIndex, when, where
from vorox.data.text.shard_format import write_shard
from vorox.data.transfer.token_export import export_tokens
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.training.replay import replay


def files_in(reader: CacheReader) -> set[str]:
    return {Path(span.uri).name for row in range(reader.num_rows) for span in reader.documents_of(row)}


def configuration(root: Path, overrides: list[str] | None = None) -> RunConfig:
    tiny_runs.write_text(root / "text")
    tiny_runs.write_text(root / "other", documents=20, seed=7)
    (root / "other" / "text.jsonl").rename(root / "other" / "held.jsonl")
    other = json.dumps([{"name": "other", "format": "jsonl", "paths": [str(root / "other")]}])
    tiny_runs.configuration(root)  # leaves tiny.yaml, whose fraction a later layer's sources replace
    return load_config(root / "tiny.yaml", [f"data.validation.sources={other}", *(overrides or [])])


@pytest.mark.parametrize("mode", ["cached", "streaming"])
def test_all_of_the_named_text_validates_and_all_of_the_sources_trains(tmp_path: Path, mode: str) -> None:
    config = configuration(tmp_path, [f"data.mode={mode}"])
    corpus = prepare(config)
    try:
        assert [files_in(reader) for reader in corpus.validation] == [{"held.jsonl"}]
        assert corpus.validation[0].manifest.units["documents"].sum() == 20
        assert "data.validation.sources (other)" in corpus.held_out
    finally:
        corpus.close()
    if mode == "cached":
        assert corpus.train[0].manifest.units["documents"].sum() == 60
        assert {(entry.source, entry.split) for entry in stats(corpus)} == {("text", "train"), ("other", "validation")}
        assert {row.source for row in peek(corpus, split="validation")} == {"other"}
        verify(corpus)
        report = export_tokens(corpus, "bin", tmp_path / "out")
        assert report.documents == 80


def test_without_a_held_out_share_the_training_cache_is_that_of_a_run_without_validation(tmp_path: Path) -> None:
    corpus = prepare(configuration(tmp_path))
    alone = prepare(tiny_runs.configuration(tmp_path, ["data.validation.held_out_fraction=0", "eval.every_steps=null"]))
    assert corpus.train[0].directory == alone.train[0].directory


def test_a_file_that_validates_does_not_train(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    (tmp_path / "text" / "copy.jsonl").write_bytes((tmp_path / "other" / "held.jsonl").read_bytes())
    corpus = prepare(config)
    assert files_in(corpus.train[0]) == {"text.jsonl"}
    assert any(note.kind == "validation" for note in corpus.notes)
    (tmp_path / "text" / "text.jsonl").unlink()
    with pytest.raises(DataError, match="no training text remains") as caught:
        prepare(config)
    assert caught.value.hint


@pytest.mark.parametrize("mode", ["cached", "streaming"])
def test_a_run_validates_on_them_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    streamed = ["data.mode=streaming", "data.growth.mode=strict", "data.growth.later_passes=segments"]
    outcome = tiny_runs.run(configuration(tmp_path, streamed if mode == "streaming" else []))
    assert sorted(outcome.eval_losses) == [6, 12]
    log = (outcome.run_directory / "log.txt").read_text()
    assert "Validation set: 1 file of data.validation.sources (other)" in log
    with RunDataIndex.open(outcome.run_directory) as run_data:
        assert {Path(d.uri).name for row in where(run_data, 1) for d in row.documents} == {"text.jsonl"}
        assert len(when(run_data, "text.jsonl", ordinal=0)) >= 1
        for name in ("held.jsonl", str(tmp_path / "other" / "held.jsonl")):
            assert when(run_data, name) == ()
        with pytest.raises(ConfigError):
            when(run_data, "nowhere.jsonl")
    assert main(["data", "when", str(outcome.run_directory), "--source", "held.jsonl"]) == 0
    assert "data.validation.sources" in capsys.readouterr().out
    report = replay(
        outcome.run_directory,
        lambda config: vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False),
    )
    assert (report.is_exact, report.num_steps) == (True, 12)


@pytest.mark.parametrize(
    "engine", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_both_engines_validate_on_them(tmp_path: Path, engine: str) -> None:
    words = [f"backend={engine}", "runtime.num_threads=null", "train.num_steps=1", "eval.every_steps=1"]
    outcome = tiny_runs.run(configuration(tmp_path, words))
    assert 0 < outcome.eval_losses[1] < 10


def shards(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        ids = np.random.default_rng(number).integers(0, 256, 700).astype(np.uint16)
        ids[::50] = 256  # the byte tokenizer's end of text
        write_shard(folder / name, ids)
    return folder


def test_validation_shards_of_a_folder_validate(tmp_path: Path) -> None:
    folder = shards(tmp_path / "web", ("web_train_000001.bin", "web_train_000002.bin", "web_val_000000.bin"))
    tiny_runs.configuration(tmp_path)
    shard_source = json.dumps([{"name": "web", "format": "bin", "paths": [str(folder)], "tokenizer": "byte"}])
    corpus = prepare(load_config(tmp_path / "tiny.yaml", [f"data.sources={shard_source}"]))
    assert files_in(corpus.train[0]) == {"web_train_000001.bin", "web_train_000002.bin"}
    assert [files_in(reader) for reader in corpus.validation] == [{"web_val_000000.bin"}]
    assert "1 of 3 files" in corpus.held_out
    other = tiny_runs.write_text(tmp_path / "other", seed=3)
    named = json.dumps([{"name": "other", "format": "jsonl", "paths": [str(other)]}])
    config = load_config(tmp_path / "tiny.yaml", [f"data.sources={shard_source}", f"data.validation.sources={named}"])
    corpus = prepare(config, options=BuildOptions())
    assert files_in(corpus.train[0]) == {"web_train_000001.bin", "web_train_000002.bin"}
    assert [files_in(reader) for reader in corpus.validation] == [{"text.jsonl"}]


def test_the_loss_of_a_source_is_that_of_a_run_which_validates_on_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    tiny_runs.write_text(tmp_path / "more", documents=9, seed=8)
    more = [{"name": "more", "format": "jsonl", "paths": [str(tmp_path / "more")]}]
    other = [{"name": "other", "format": "jsonl", "paths": [str(tmp_path / "other")]}]

    def trained(name: str, sources: list[dict[str, object]], *overrides: str) -> Path:
        words = [f"data.validation.sources={json.dumps(sources)}", f"run.name={name}", *overrides]
        return tiny_runs.run(configuration(tmp_path, words)).run_directory

    both = trained("both", other + more, "eval.by_source=true")
    found = read_metrics(both)
    for name, sources in (("other", other), ("more", more)):
        alone = read_metrics(trained(name, sources))
        for step in (6, 12):
            assert found[step][f"eval/sources/{name}/loss"] == alone[step]["eval/loss"]
            assert found[step][f"eval/sources/{name}/perplexity"] == alone[step]["eval/perplexity"]
            assert found[step][f"eval/sources/{name}/bits_per_byte"] == alone[step]["eval/bits_per_byte"]
    assert found[12]["eval/sources/other/loss"] != found[12]["eval/sources/more/loss"]
    assert f"by source: other {found[12]['eval/sources/other/loss']:.4f}, more " in (both / "log.txt").read_text()
    capsys.readouterr()
    assert main(["runs", "compare", str(both), str(both)]) == 0
    assert "eval/sources/more/loss" in capsys.readouterr().out
