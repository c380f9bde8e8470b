"""A run whose cache is lost resumes and replays bit for bit: its directory records the files that it read.

Whole runs with the numpy engine. A twin in a folder of its own, whose cache is kept, is the oracle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import vorox
from changing_text import GROW, add, config_of, insert, latest, queries, replay, write
from numpy_engine import NumpyEngine
from tiny_runs import events, result, run, use_numpy_engine, write_text
from vorox.cli import main
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.corpus import prepare
from vorox.data.corpus.run_views import RunViews
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.tokenizers.store import configured_untrained

LONG_ROWS = "data.sequence_length_tokens=256"
"""A pass has few steps, so that files that join are soon read."""


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same text: one loses its cache, the other keeps it."""
    for folder in (tmp_path / "lost", tmp_path / "kept"):
        write(write_text(folder / "text"), "more", 3)
    return tmp_path / "lost", tmp_path / "kept"


def check_read(directory: Path, *names: str) -> None:
    with RunDataIndex.open(directory) as data:
        assert all(when(data, name) for name in names)


def lose_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


def build(config: RunConfig, directory: Path) -> None:
    """``vorox data build RUN``."""
    views = RunViews.of_run(directory, cache_root(config.data))
    options = BuildOptions(wait_for="complete")
    prepare(config, tokenizer=configured_untrained(config.tokenizer), views=views, options=options).close()


def restored_from_copy(directory: Path) -> Path:
    """The run as its mirror has it, and its checkpoints, in the place of the run."""
    copy = directory.with_name("copy")
    files = RunLayout(directory).mirrored_files()
    for path in files:
        (copy / path.relative_to(directory)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(directory))
    shutil.copytree(directory / "checkpoints", copy / "checkpoints")
    shutil.rmtree(directory)
    copy.rename(directory)
    return directory


def check_same(found: Path, expected: Path) -> None:
    """Both runs trained on the same rows with the same losses, and answer alike."""
    ours, theirs = ([len(queries(one)[0]), [[part.documents for part in rows] for rows in queries(one)[:2]]]
                    for one in (found, expected))  # fmt: skip
    assert str(ours).replace("/lost/", "/kept/") == str(theirs)


@pytest.mark.parametrize("change", [add, insert, lambda text: None])
def test_a_lost_cache_is_built_again_from_the_files_of_the_run(tmp_path: Path, change: Callable[[Path], None]) -> None:
    lost, kept = texts(tmp_path)
    first = [run(config_of(folder)) for folder in (lost, kept)]
    before = queries(first[0].run_directory)
    directory = restored_from_copy(first[0].run_directory)
    lose_cache(lost)
    change(lost / "text")
    with pytest.raises(DataError, match=r"not built|is lost"):
        replay(directory)
    with pytest.raises(DataError, match=r"is missing") as caught:
        queries(directory)
    assert "vorox data build" in str(caught.value.hint)
    build(config_of(lost), directory)
    assert queries(directory) == before
    report = replay(directory)
    assert report.is_exact, str(report)
    opened = vorox.open_run(directory)
    assert [batch.step for batch in opened.batches(1, 12)] == list(range(1, 13))
    assert len(list(opened.validation_batches())) > 0
    lose_cache(lost)
    longer = [run(config_of(folder, "train.num_steps=16"), resume_from=latest(folder)) for folder in (lost, kept)]
    found, expected = map(result, longer)
    assert found == expected
    assert longer[0].start_step == 12
    assert replay(longer[0].run_directory).is_exact
    check_same(longer[0].run_directory, longer[1].run_directory)


@pytest.mark.slow
@pytest.mark.parametrize("grows_from_the_start", [True, False])
def test_a_grown_run_is_built_again_in_the_order_of_arrival(tmp_path: Path, grows_from_the_start: bool) -> None:
    folders = texts(tmp_path)
    for folder in folders:
        run(config_of(folder, LONG_ROWS, *([GROW] if grows_from_the_start else [])))
        insert(folder / "text")
        run(config_of(folder, LONG_ROWS, GROW, "train.num_steps=30"), resume_from=latest(folder))
        write(folder / "text", "aa", 11)
        run(config_of(folder, LONG_ROWS, GROW, "train.num_steps=70"), resume_from=latest(folder))
    lost, _ = folders
    directory = restored_from_copy(latest(lost))
    check_read(directory, "aaa.jsonl", "aa.jsonl")
    before = queries(directory)
    lose_cache(lost)
    for folder in folders:
        write(folder / "text", "a", 12)
        write(folder / "text", "m", 13)
    build(config_of(lost, LONG_ROWS), directory)
    assert queries(directory) == before
    assert replay(directory).is_exact
    lose_cache(lost)
    resumed = [config_of(folder, LONG_ROWS, GROW, "train.num_steps=110") for folder in folders]
    longer = [run(config, resume_from=latest(folder)) for config, folder in zip(resumed, folders, strict=True)]
    assert result(longer[0]) == result(longer[1])
    check_same(longer[0].run_directory, longer[1].run_directory)
    check_read(longer[0].run_directory, "a.jsonl", "m.jsonl")


@pytest.mark.slow
def test_a_lost_cache_that_was_built_again_goes_on_growing(tmp_path: Path) -> None:
    folders = texts(tmp_path)
    for folder in folders:
        run(config_of(folder, LONG_ROWS))
    for name, seed, num_steps in (("aaa", 8, 30), ("aa", 11, 70)):
        lose_cache(folders[0])
        for folder in folders:
            write(folder / "text", name, seed)
            run(config_of(folder, LONG_ROWS, GROW, f"train.num_steps={num_steps}"), resume_from=latest(folder))
    check_same(*map(latest, folders))
    check_read(latest(folders[0]), "aaa.jsonl", "aa.jsonl")
    lose_cache(folders[0])
    resumed = [config_of(folder, LONG_ROWS, GROW, "train.num_steps=75") for folder in folders]
    longer = [run(config, resume_from=latest(folder)) for config, folder in zip(resumed, folders, strict=True)]
    assert result(longer[0]) == result(longer[1])


def test_files_that_join_in_the_middle_of_a_run_are_recorded_before_it_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [GROW, LONG_ROWS, "data.growth.mode=elastic", "data.growth.horizon_steps=2", "train.num_steps=40"]
    config, train_step = config_of(tmp_path, *settings), NumpyEngine.train_step

    def with_growth(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        if batch.step == 5:
            insert(tmp_path / "text")
            prepare(config, options=BuildOptions(wait_for="complete")).close()
        return train_step(self, batch, **kwargs)

    monkeypatch.setattr(NumpyEngine, "train_step", with_growth)
    directory = run(config).run_directory
    monkeypatch.undo()
    use_numpy_engine(monkeypatch)
    check_read(directory, "aaa.jsonl")
    before = queries(directory)
    lose_cache(tmp_path)
    write(tmp_path / "text", "aa", 11)
    build(config_of(tmp_path, *settings, "data.cache.grow=false"), directory)
    assert queries(directory) == before
    assert replay(directory).is_exact


def delete(text: Path) -> None:
    (text / "more.jsonl").unlink()


def rewrite(text: Path) -> None:
    write(text, "more", 9)


@pytest.mark.parametrize(("change", "what"), [(delete, "is gone"), (rewrite, "has changed")])
def test_a_lost_file_is_named(tmp_path: Path, change: Callable[[Path], None], what: str) -> None:
    folder, _ = texts(tmp_path)
    directory = run(config_of(folder)).run_directory
    lose_cache(folder)
    change(folder / "text")
    before = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.suffix in {".json", ".jsonl"}}
    with pytest.raises(DataError, match=f"more.jsonl of source 'text' {what}") as caught:
        run(config_of(folder, "train.num_steps=16"), resume_from=directory)
    assert "restore the file as it was" in str(caught.value.hint)
    after = {path: path.read_bytes() for path in before}
    # The record of the run, and what it says, have one more attempt.
    assert {path.name for path in before if before[path] != after[path]} <= {"events.jsonl", "run.json"}
    write(folder / "text", "more", 3)
    assert run(config_of(folder, "train.num_steps=16"), resume_from=directory).start_step == 12


def test_a_renamed_file_is_found_and_a_displaced_one_is_read(tmp_path: Path) -> None:
    limit = "data.sources.0.max_bytes=14000"
    folders = texts(tmp_path)
    for folder in folders:
        run(config_of(folder, limit))
    lose_cache(folders[0])
    write(folders[0] / "text", "aaa", 5)
    (folders[0] / "text" / "text.jsonl").rename(folders[0] / "text" / "zzz.jsonl")
    longer = [run(config_of(folder, limit, "train.num_steps=16"), resume_from=latest(folder)) for folder in folders]
    assert result(longer[0]) == result(longer[1])


def test_a_streamed_run_starts_from_its_own_files(tmp_path: Path) -> None:
    streamed = ["data.mode=streaming", "data.growth.mode=strict", "data.growth.first_segment_units=2",
                "data.growth.max_segment_units=2"]  # fmt: skip
    folders = texts(tmp_path)
    first = [run(config_of(folder, *streamed)) for folder in folders]
    before = queries(first[0].run_directory)
    lose_cache(folders[0])
    insert(folders[0] / "text")
    assert replay(first[0].run_directory).is_exact
    assert queries(first[0].run_directory) == before
    lose_cache(folders[0])
    longer = [run(config_of(folder, *streamed, "train.num_steps=16"), resume_from=latest(folder))
              for folder in folders]  # fmt: skip
    assert result(longer[0]) == result(longer[1])
    assert queries(longer[0].run_directory) == before


# The run directory is untrusted


def spoiled(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in (directory / "views").glob("*.json"):
        body = json.loads(path.read_bytes())
        change(body)
        path.write_text(json.dumps(body))


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    directory = run(config_of(tmp_path)).run_directory
    lose_cache(tmp_path)
    original = {path: path.read_bytes() for path in (directory / "views").glob("*.json")}
    assert len(original) == 2
    values = [None, [], {}, [[[0, 0, 1 << 61, 0]]], [[[9, 0, 1, 0]]], [[[0, 0.5, 1, 0]]], [["x"]], [["x", -1, "", ""]]]
    for key in ("recipe", "files", "units"):
        for value in values:
            spoiled(directory, lambda body, key=key, value=value: body.__setitem__(key, value))
            with pytest.raises(DataError, match="record of its files cannot be used"):
                RunViews.of_run(directory, tmp_path / "cache")
            for path, body in original.items():
                path.write_bytes(body)
    assert not (tmp_path / "cache").exists()
    assert RunViews.of_run(directory, tmp_path / "cache")


def test_a_record_of_others_reads_no_other_file_and_changes_no_other_cache(tmp_path: Path) -> None:
    """Neither a file outside the source, nor units that leave text out, reach a run that trusts its own folder."""
    folder, kept = texts(tmp_path)
    directory = run(config_of(folder)).run_directory
    lose_cache(folder)
    secret = write(write_text(tmp_path / "secret"), "secret", 20)
    original = {path: path.read_bytes() for path in (directory / "views").glob("*.json")}

    def point_elsewhere(body: dict[str, Any]) -> None:
        from vorox.data.storage import list_files
        from vorox.data.storage.versions import content_hash

        (found,) = list_files(str(secret), ())
        body["files"][0] = [str(secret), found.size_bytes, content_hash(found), "secret.jsonl"]

    spoiled(directory, point_elsewhere)
    with pytest.raises(DataError, match=r"secret\.jsonl of source 'text' is gone"):
        run(config_of(folder, "train.num_steps=16"), resume_from=directory)
    for path, body in original.items():
        path.write_bytes(body)
    spoiled(directory, lambda body: body.__setitem__("units", body["units"][:1]))
    build(config_of(folder), directory)
    with closing(prepare(config_of(folder))) as mine, closing(prepare(config_of(kept))) as expected:
        assert [cache.reader.digest for cache in mine.caches] == [cache.reader.digest for cache in expected.caches]


# Messages about the validation text


def test_a_resume_and_a_look_at_the_data_say_what_the_run_holds_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the configured fraction, and nothing of files that the run does not read."""
    folder, _ = texts(tmp_path)
    directory = run(config_of(folder)).run_directory
    insert(folder / "text")
    run(config_of(folder, "train.num_steps=16"), resume_from=directory)
    (first, second) = events(directory, "held_out")
    assert first == second
    assert "about" not in first
    capsys.readouterr()
    for command in ("peek", "stats"):
        assert main(["data", command, str(directory)]) == 0
        assert first.removeprefix("Validation set: ") in capsys.readouterr().err
