"""A run reads its own view of its text: what happens to the folder, or in other runs, never disturbs it.

Whole runs with the numpy engine. A twin in a folder of its own, where nothing happens, is the oracle for losses.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from changing_text import GROW, add, config_of, insert, latest, queries, rename, replay, rewrite, touch, write
from tiny_runs import events, result, run, use_numpy_engine, write_text
from vorox import backends
from vorox.cli import main
from vorox.core.config import load_config
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.upkeep import gc, retention
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.corpus import prepare
from vorox.data.corpus.run_views import RunViews
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.log import RunLog
from vorox.run import Outcome, make_workload
from vorox.training import replay as replaying


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


def check_undisturbed(outcome: Outcome, before: list[Any]) -> None:
    """Its replay is exact, and its queries answer as before."""
    report = replay(outcome.run_directory)
    assert report.is_exact, str(report)
    assert report.num_steps == outcome.progress.step
    assert queries(outcome.run_directory)[: len(before)] == before


def delete(text: Path) -> None:
    (text / "text.jsonl").unlink()
    write(text, "other", 10)


def remove_folder(text: Path) -> None:
    shutil.rmtree(text)


CHANGES: list[Callable[[Path], None]] = [add, insert, rename, touch, rewrite, delete, remove_folder]


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_the_folder_disturbs_neither_replay_queries_nor_resume(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    write(write_text(tmp_path / "text"), "more", 3)
    outcome = run(config_of(tmp_path))
    before = queries(outcome.run_directory)
    change(tmp_path / "text")
    check_undisturbed(outcome, before)
    write(write_text(tmp_path / "twin" / "text"), "more", 3)
    run(config_of(tmp_path / "twin"))
    configs = [config_of(folder, "train.num_steps=16") for folder in (tmp_path, tmp_path / "twin")]
    if change is remove_folder:
        remove_folder(tmp_path / "text")  # ``configuration`` has written the missing folder again
    longer = [
        run(config, resume_from=latest(folder))
        for config, folder in zip(configs, (tmp_path, tmp_path / "twin"), strict=True)
    ]
    found, expected = map(result, longer)
    assert found["losses"] == expected["losses"]
    assert found["fingerprint"] == expected["fingerprint"]
    assert longer[0].start_step == 12
    check_undisturbed(longer[0], before)


@pytest.mark.parametrize("change", [add, insert, rename, rewrite, delete])
def test_another_run_that_grows_disturbs_nobody(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Two runs over copies of the same text share their units; one of them grows."""
    write_text(tmp_path / "text")
    write_text(tmp_path / "copy")
    still = run(config_of(tmp_path, name="still"))
    before = queries(still.run_directory)
    growing = run(config_of(tmp_path, GROW, name="grows", text="copy"))
    grown_before = queries(growing.run_directory)
    change(tmp_path / "copy")
    longer = run(
        config_of(tmp_path, GROW, "train.num_steps=40", name="grows", text="copy"), resume_from=growing.run_directory
    )
    assert longer.progress.step == 40
    check_undisturbed(still, before)
    check_undisturbed(longer, grown_before[:3])  # its validation set has grown
    resumed = run(config_of(tmp_path, "train.num_steps=16", name="still"), resume_from=still.run_directory)
    check_undisturbed(resumed, before)
    check_undisturbed(run(config_of(tmp_path, name="new")), before)  # the same bits, hence the same answers


def names(directory: Path) -> list[str]:
    with RunDataIndex.open(directory) as data:
        return [Path(file.uri).stem for file in data.readers[0].files]


def test_growth_is_switched_on_at_a_resume_and_moves_no_boundary(tmp_path: Path) -> None:
    outcome = run(config_of(tmp_path))
    with RunDataIndex.open(outcome.run_directory) as data:
        units, digest = data.readers[0].units, data.plan.digest
    insert(tmp_path / "text")
    told = run(config_of(tmp_path, "train.num_steps=13"), resume_from=outcome.run_directory)
    assert any("aaa.jsonl" in text and GROW in text for text in events(told.run_directory, "source_added_files"))
    longer = run(config_of(tmp_path, GROW, "train.num_steps=200"), resume_from=outcome.run_directory)
    assert names(longer.run_directory) == ["text", "aaa"]
    with RunDataIndex.open(longer.run_directory) as data:
        cache = data.readers[0]
        assert cache.units[: len(units)] == units
        assert digest in [data.plan.digest_at(number) for number in range(1, data.plan.num_events + 1)]
        read = {Path(one.uri).stem for step in range(1, 201) for row in where(data, step) for one in row.documents}
        assert read == {"text", "aaa"}
    assert replay_from_last(longer.run_directory).is_exact
    check = run(config_of(tmp_path, GROW, "train.num_steps=204"), resume_from=longer.run_directory)
    assert check.progress.step == 204


def replay_from_last(directory: Path) -> replaying.ReplayReport:
    def workload(config: RunConfig) -> Any:
        kept = RunLayout(directory).tokenizer
        return make_workload(
            config, backends.connect(config), RunLog(None), None, build=False, tokenizer_directory=kept
        )

    return replaying.replay(directory, workload, first_step=13)


def test_two_runs_grow_at_once_and_garbage_is_collected_meanwhile(tmp_path: Path) -> None:
    runs = [run(config_of(tmp_path, GROW, name=name)) for name in ("one", "two")]
    before = [queries(outcome.run_directory) for outcome in runs]
    root, ended = tmp_path / "cache", threading.Event()
    errors: list[BaseException] = []

    def collect() -> None:
        while not ended.is_set():
            gc.remove_garbage(gc.find_garbage(root))
            gc.remove_unused(gc.find_caches(root, tmp_path / "nowhere"))

    configs = {name: config_of(tmp_path, GROW, name=name) for name in ("a", "b")}

    def grow(name: str, added: Sequence[int]) -> None:
        try:
            for seed in added:
                write(tmp_path / "text", f"{name}{seed}", seed)
                prepare(configs[name]).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=grow, args=(name, seeds)) for name, seeds in (("b", (1, 2)), ("a", (3, 4)))]
    collector = threading.Thread(target=collect)
    collector.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    collector.join()
    assert errors == []
    for outcome, answers in zip(runs, before, strict=True):
        check_undisturbed(outcome, answers[:3])  # the validation set of what grows has grown
    longer = run(config_of(tmp_path, GROW, "train.num_steps=200", name="one"), resume_from=runs[0].run_directory)
    found = names(longer.run_directory)
    assert found[0] == "text"
    assert sorted(found[1:]) == ["a3", "a4", "b1", "b2"]
    assert replay(longer.run_directory).is_exact


def test_nothing_is_tokenized_twice(tmp_path: Path) -> None:
    """A unit is built once, whichever views plan it: fixed, growing, of a copy, with files before or after it."""
    text = write_text(tmp_path / "text", documents=200)
    write_text(tmp_path / "copy", documents=200)

    def built(*overrides: str, folder: str = "text") -> int:
        corpus = prepare(config_of(tmp_path, *overrides, text=folder))
        corpus.close()
        for cache in corpus.caches:
            cache.reader.verify()
        return sum(report.units_built for report in corpus.reports.values())

    first = built()
    assert first > 4
    assert built(folder="copy") == 0
    assert built(GROW) == 0
    insert(text)
    one_unit = 3  # the last unit of the old file may end in the new one
    added = built(GROW)
    assert 0 < added < first
    assert built() <= one_unit + added
    (text / "aaa.jsonl").unlink()
    assert built() == 0
    rename(text)
    assert built() in {0, first}  # the split of single records hashes the path of their file


def test_collection_keeps_the_views_of_runs_outside_the_searched_folder(tmp_path: Path) -> None:
    outcome = run(config_of(tmp_path))
    used = [RunViews.of_run(outcome.run_directory, tmp_path).directories[note]["text"]
            for note in ("caches", "holdout_caches")]  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = cache_root(config_of(tmp_path).data)
    unused = prepare(config_of(tmp_path, "data.sequence_length_tokens=8"))
    unused.close()
    found = gc.find_caches(root, elsewhere)
    assert {cache.directory for cache in found if not cache.is_removable} == set(used)
    gc.remove_unused([cache for cache in found if cache.is_removable])
    gc.remove_garbage(gc.find_garbage(root))
    assert replay(outcome.run_directory).is_exact
    assert not any(cache.reader.directory.exists() for cache in unused.caches)
    shutil.rmtree(outcome.run_directory)
    assert all(cache.is_removable for cache in gc.find_caches(root, elsewhere))
    gc.remove_unused(gc.find_caches(root, elsewhere))
    gc.remove_garbage(gc.find_garbage(root))
    assert not list(root.rglob("*.psc"))


def _kept(root: Path, elsewhere: Path) -> set[Path]:
    return {cache.directory for cache in gc.find_caches(root, elsewhere) if not cache.is_removable}


def test_collection_keeps_the_views_of_a_moved_run_until_it_is_removed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    outcome = run(config)
    root, elsewhere, moved = cache_root(config.data), tmp_path / "elsewhere", tmp_path / "archive" / "paper"
    used = {path for views in RunViews.of_run(outcome.run_directory, root).directories.values()
            for path in views.values()}  # fmt: skip
    moved.parent.mkdir()
    outcome.run_directory.rename(moved)
    assert _kept(root, elsewhere) == used
    assert {pin.place for cache in gc.find_caches(root, elsewhere) for pin in cache.pins} == {"moved"}
    gc.remove_unused(gc.find_caches(root, elsewhere))
    prepare(config, options=BuildOptions(force_rebuild=True)).close()
    assert _kept(root, elsewhere) >= used, "also after a rebuild"
    second = run(config)  # another run, at the place of the moved one
    assert second.run_directory == outcome.run_directory
    shutil.rmtree(second.run_directory)
    assert _kept(root, elsewhere) == used
    assert replay(moved).is_exact
    reasons = {pin.reason for cache in gc.find_caches(root, elsewhere) for pin in cache.pins if not pin.place}
    assert reasons == {f"read by run {moved}"}, "opening it has recorded its new place"
    shutil.rmtree(moved)
    assert not _kept(root, elsewhere)
    assert all(str(moved) in cache.removed_runs for cache in gc.find_caches(root, elsewhere) if cache.directory in used)


def test_without_links_the_views_of_a_run_that_is_not_there_stay_until_it_is_removed_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(retention.os, "link", refused)
    config = config_of(tmp_path)
    root, elsewhere = cache_root(config.data), tmp_path / "elsewhere"
    first = run(config)
    used = _kept(root, elsewhere)
    assert used
    assert main(["runs", "remove", str(first.run_directory), "--yes"]) == 0
    assert not _kept(root, elsewhere)
    second = run(config)
    shutil.rmtree(second.run_directory)
    assert _kept(root, elsewhere) == used, "it may have been moved"
    monkeypatch.setenv("VOROX_CACHE", str(root))
    capsys.readouterr()
    assert main(["data", "gc", "--root", str(elsewhere), "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert str(second.run_directory) in listed
    commands = [line.split() for line in listed.splitlines() if line.startswith("  vorox data unpin")]
    assert len(commands) == len(used)
    assert all(main(command[1:]) == 0 for command in commands)
    assert not _kept(root, elsewhere)


def test_a_damaged_chunk_is_taken_from_another_view_or_built_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prepare(config).close()
    directory = prepare(config, build=False).sources[0].train.directory
    digest = CacheReader.open(directory).digest
    path = sorted(directory.glob("chunks/*/*.psc"))[1]
    path.unlink()
    report = prepare(config, repair=True).reports["text train"]
    assert (report.units_built, report.units_adopted) == (0, 1)
    with path.open("r+b") as file:  # the file of all views
        file.seek(300)
        file.write(b"damage")
    report = prepare(config, repair=True).reports["text train"]
    assert (report.units_built, report.units_adopted) == (1, 0)
    reader = CacheReader.open(directory)
    reader.verify()
    assert reader.digest == digest
    assert prepare(config_of(tmp_path, GROW)).reports["text train"].units_built == 0


def test_a_view_on_a_disk_without_links_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    config = config_of(tmp_path)
    built = prepare(config)
    built.close()
    grown = prepare(config_of(tmp_path, GROW))
    grown.close()
    assert all(report.units_built == 0 for report in grown.reports.values())
    root = tmp_path / "cache"
    gc.remove_garbage(gc.find_garbage(root))
    for corpus in (built, grown):
        for cache in corpus.caches:
            CacheReader.open(cache.reader.directory).verify()
    assert sum(1 for _ in root.glob("units/*/*.json")) > 0


def test_a_lost_view_is_named(tmp_path: Path) -> None:
    outcome = run(config_of(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="not built"):
        replay(outcome.run_directory)


def test_moved_caches_are_found(tmp_path: Path) -> None:
    outcome = run(config_of(tmp_path))
    before = queries(outcome.run_directory)
    (tmp_path / "cache").rename(tmp_path / "moved")
    file = outcome.run_directory / "config.yaml"
    file.write_text(file.read_text().replace(str(tmp_path / "cache"), str(tmp_path / "moved")))
    for path in (outcome.run_directory / "checkpoints").glob("*/MANIFEST.json"):
        assert json.loads(path.read_bytes())
    assert load_config(file).data.cache.directory == str(tmp_path / "moved")
    check_undisturbed(outcome, before)


# Other kinds of sources


def pairs(count: int, salt: int) -> str:
    lines = ({"prompt": f"say {n}", "chosen": f"yes {n * salt}", "rejected": f"no {n + salt}"} for n in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines)


PAIRS = {"format": "jsonl", "preference_pairs": True, "chat_fields": ["prompt", "chosen", "rejected"]}
CHATS = {"format": "jsonl", "text_field": "prompt"}


@pytest.mark.parametrize("form", [PAIRS, CHATS])
def test_a_recorded_view_of_pairs_and_of_validation_text_outlives_its_folder_and_grows(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    for folder, salt in (("train", 2), ("held", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.jsonl").write_text(pairs(60, salt))
    sources = [{"name": "train", "paths": [str(tmp_path / "train")], **form}]
    held_out = [{"name": "held", "paths": [str(tmp_path / "held")], **form}]
    overrides = [f"data.sources={json.dumps(sources)}", f"data.validation.sources={json.dumps(held_out)}",
                 "data.sequence_length_tokens=64", "data.cache.unit_bytes=500"]  # fmt: skip
    if form is PAIRS:
        overrides += ["loss.name=dpo", "train.from_weights=weights"]
    config = config_of(tmp_path, *overrides)
    first = prepare(config)
    first.close()
    views = RunViews({note: {name: Path(path) for name, path in found.items()}
                      for note, found in first.view_notes.items()})  # fmt: skip
    digests = [cache.reader.digest for cache in first.caches]
    for folder in ("train", "held"):
        (tmp_path / folder / "a.jsonl").write_text(pairs(30, 7 if folder == "train" else 8))
    tokenizer = first.tokenizer
    again = prepare(config, tokenizer=tokenizer, views=views)
    assert [cache.reader.digest for cache in again.caches] == digests
    assert len([note for note in again.notes if note.kind == "added_files"]) == 2
    grown = prepare(config_of(tmp_path, *overrides, GROW), tokenizer=tokenizer, views=views)
    for before, after in zip(first.caches, grown.caches, strict=True):
        num_units = before.reader.manifest.planned_units
        assert after.reader.content_digest(0, num_units) == before.reader.digest
        assert [Path(file.uri).stem for file in after.reader.files] == ["m", "a"]
    shutil.rmtree(tmp_path / "train")
    shutil.rmtree(tmp_path / "held")
    kept = prepare(config, tokenizer=tokenizer, views=views)
    assert [cache.reader.digest for cache in kept.caches] == digests
    assert [cache.reader.digest for cache in prepare(config, build=False, tokenizer=tokenizer, views=views).caches] == (
        digests
    )


def test_a_streamed_run_reads_its_own_files(tmp_path: Path) -> None:
    streamed = ["data.mode=streaming", "data.growth.mode=strict", "data.growth.first_segment_units=2",
                "data.growth.max_segment_units=2"]  # fmt: skip
    outcome = run(config_of(tmp_path, *streamed))
    write_text(tmp_path / "twin" / "text")
    run(config_of(tmp_path / "twin", *streamed))
    insert(tmp_path / "text")
    assert replay(outcome.run_directory).is_exact
    longer = [run(config_of(folder, *streamed, "train.num_steps=16"), resume_from=latest(folder))
              for folder in (tmp_path, tmp_path / "twin")]  # fmt: skip
    assert result(longer[0])["losses"] == result(longer[1])["losses"]
    assert replay(longer[0].run_directory).is_exact


def test_a_source_that_falls_back_keeps_the_rows_of_the_run(tmp_path: Path) -> None:
    write_text(tmp_path / "instead", seed=4)
    fallback = f'data.sources.0.fallback=["{tmp_path / "instead"}"]'
    outcome = run(config_of(tmp_path, fallback))
    before = queries(outcome.run_directory)
    config = config_of(tmp_path, fallback, "train.num_steps=16")
    remove_folder(tmp_path / "text")
    resumed = run(config, resume_from=outcome.run_directory)
    assert events(outcome.run_directory, "source_fallback")
    assert resumed.start_step == 12
    check_undisturbed(resumed, before)
