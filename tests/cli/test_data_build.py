"""``vorox data build``, ``fill``, ``grow``, ``repair`` and ``gc``: what they say, leave and return."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventually import PATIENCE_SECONDS, wait_until
from tiny_runs import configuration, run, use_numpy_engine
from vorox.cli import main
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.reader import CacheReader

Run = Callable[..., tuple[int, str, str]]

CONFIG = """
data:
  sources: [{{name: text, format: jsonl, paths: [{text}]}}]
  sequence_length_tokens: 64
  cache: {{directory: {cache}, unit_bytes: 4000, chunk_rows: 16}}
  validation: {{held_out_fraction: 0.2}}
tokenizer: {{kind: byte}}
train: {{num_steps: 1}}
"""


def write(folder: Path, name: str, count: int = 200) -> None:
    folder.mkdir(exist_ok=True)
    first = 1000 * ord(name)
    records = ({"text": f"Record {n} says {n * n}, {n**3} and {n**5}."} for n in range(first, first + count))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write(tmp_path / "text", "a")
    (tmp_path / "c.yaml").write_text(CONFIG.format(text=tmp_path / "text", cache=tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def vorox(place: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def reports(found: tuple[int, str, str]) -> dict[str, dict[str, Any]]:
    code, out, err = found
    assert code == 0, err
    return json.loads(out)["caches"]


def digests(found: tuple[int, str, str]) -> list[str]:
    return [report["digest"] for report in reports(found).values()]


def linked(found: tuple[int, str, str]) -> list[int]:
    return [report["units_adopted"] for report in reports(found).values()]


def built(found: tuple[int, str, str]) -> list[int]:
    return [report["units_built"] for report in reports(found).values()]


def chunks(place: Path, split: str = "train") -> list[Path]:
    return sorted((place / "cache").glob(f"text-{split}-*/chunks/*/u*.psc"))


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_every_way_to_build_gives_the_same(place: Path, vorox: Run) -> None:
    first = vorox("data", "build", "c.yaml", "--json")
    assert all(report["units_built"] == report["units"] > 0 for report in reports(first).values())
    for number, options in enumerate(
        (["--mode", "inverse"], ["--mode", "gaps"], ["--workers", "2"], ["data.cache.codec=zstd"])
    ):
        elsewhere = f"data.cache.directory={place / str(number)}"
        assert digests(vorox("data", "build", "c.yaml", elsewhere, *options, "--json")) == digests(first)
    again = vorox("data", "build", "c.yaml", "--force-rebuild", "--json")
    assert built(again) == built(first)
    assert digests(again) == digests(first)
    assert built(vorox("data", "build", "c.yaml", "--json")) == [0, 0]
    code, out, _ = vorox("data", "build", "c.yaml")
    assert code == 0
    for title in ("CHUNKS", "FULL", "OF-UINT32", "OF-UINT16"):
        assert title in out.splitlines()[0]


def test_fill_looks_and_repair_reads(place: Path, vorox: Run) -> None:
    first = vorox("data", "build", "c.yaml", "--json")
    chunks(place)[0].unlink()
    assert linked(vorox("data", "fill", "c.yaml", "--json")) == [1, 0]
    path = chunks(place)[1]
    for words in (["fill", "c.yaml", "--verify"], ["repair", "c.yaml"], ["build", "c.yaml", "--repair"]):
        flip_a_bit(path)
        assert vorox("data", "verify", "c.yaml")[0] == 4
        found = vorox("data", *words, "--json")
        assert built(found) == [1, 0]
        assert digests(found) == digests(first)
        assert vorox("data", "verify", "c.yaml")[0] == 0


def test_a_repair_takes_no_damaged_rows_from_the_units_of_other_caches(place: Path, vorox: Run) -> None:
    first = vorox("data", "build", "c.yaml", "--json")
    path = chunks(place)[1]
    raw = bytearray(path.read_bytes())
    raw[Chunk.open(path).header.payload_offset] ^= 1
    path.write_bytes(raw)
    found = vorox("data", "repair", "c.yaml", "--json")
    assert (built(found), linked(found)) == ([1, 0], [0, 0])
    assert digests(found) == digests(first)
    assert vorox("data", "verify", "c.yaml")[0] == 0


@pytest.mark.parametrize("mode", ["forward", "inverse", "gaps"])
@pytest.mark.parametrize("damage", ["missing", "short", "of another unit"])
def test_a_build_in_any_order_finds_lost_and_damaged_chunks(place: Path, vorox: Run, mode: str, damage: str) -> None:
    first = vorox("data", "build", "c.yaml", "--json")
    path, other = chunks(place)[1:3]
    shutil.rmtree(place / "cache" / "units")
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()[:-7] if damage == "short" else other.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert vorox("data", "verify", "c.yaml")[0] == 4
    found = vorox("data", "build", "c.yaml", "--mode", mode, "--json")
    assert (found[0], built(found)) == (0, [1, 0])
    assert digests(found) == digests(first)
    assert vorox("data", "verify", "c.yaml")[0] == 0


def test_grow_takes_up_new_files(place: Path, vorox: Run) -> None:
    first = reports(vorox("data", "build", "c.yaml", "--json"))
    write(place / "text", "b")
    grown = reports(vorox("data", "grow", "c.yaml", "--json"))
    for before, after in zip(first.values(), grown.values(), strict=True):
        assert after["units_built"] == after["units"] - before["units"] > 0
        assert after["digest"] != before["digest"]
        assert after["units_adopted"] == before["units"]
    views = sorted((place / "cache").glob("text-*"))
    assert len(views) == 4  # the fixed ones stay
    assert built(vorox("data", "build", "c.yaml", "data.cache.grow=true", "--json")) == [0, 0]
    assert sorted((place / "cache").glob("text-*")) == views
    (place / "text" / "a.jsonl").unlink()
    assert vorox("data", "grow", "c.yaml")[0] == 0
    for view in views:
        CacheReader.open(view).verify()


@pytest.mark.parametrize("name", ["c.yaml", "tiny"])
def test_new_files_join_the_caches_of_the_tokenizer_that_was_trained_before(
    place: Path, vorox: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use_numpy_engine(monkeypatch)
    trained = CONFIG.replace("kind: byte", "kind: bpe, vocab_size: 300")
    (place / "c.yaml").write_text(trained.format(text=place / "text", cache=place / "cache"))
    assert vorox("train", "c.yaml", "--name", "tiny")[0] == 0
    before = {path.name for path in (place / "cache").glob("text-*")}
    write(place / "text", "b")
    grown = reports(vorox("data", "grow", name, "--json"))
    assert all(0 < report["units_built"] < report["units"] for report in grown.values())
    views = {path.name for path in (place / "cache").glob("text-*")}
    assert {name.rpartition("-grow-")[0].rpartition("-")[2] for name in views - before} == {
        name.split("-")[2] for name in before
    }, "the same recipes, so the same tokenizer"
    assert vorox("data", "stats", name, "data.cache.grow=true")[0] == 0
    _, out, _ = vorox("data", "grow", name)
    assert "BUILT-NOW" in out, "0 of the units: all were there"


def test_a_run_with_another_tokenizer_section_does_not_use_the_tokenizer_of_the_run(
    place: Path, vorox: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_numpy_engine(monkeypatch)
    trained = CONFIG.replace("kind: byte", "kind: bpe, vocab_size: 300")
    (place / "c.yaml").write_text(trained.format(text=place / "text", cache=place / "cache"))
    assert vorox("train", "c.yaml", "--name", "tiny")[0] == 0
    assert built(vorox("data", "build", "tiny", "tokenizer={kind: bpe, vocab_size: 300}", "--json")) == [0, 0]
    assert all(built(vorox("data", "build", "tiny", "tokenizer={kind: bpe, vocab_size: 280}", "--json")))
    sizes = [
        len(json.loads(path.read_bytes())["model"]["vocab"]) for path in place.glob("cache/tokenizers/*/tokenizer.json")
    ]
    assert sorted(sizes) == [280, 300]


def test_options_that_contradict_each_other_are_refused(vorox: Run) -> None:
    code, _, err = vorox("data", "build", "c.yaml", "--force-rebuild", "--repair")
    assert code == 2
    assert "--repair" in err
    assert vorox("data", "build", "c.yaml", "--mode", "sideways")[0] == 2
    assert vorox("data", "build", "c.yaml", "--workers", "0")[0] == 2
    code, _, err = vorox("data", "build", "c.yaml", "--worker=3")
    assert code == 2
    assert "--workers" in err


def test_gc_frees_what_nobody_needs(place: Path, vorox: Run) -> None:
    vorox("data", "build", "c.yaml")
    path = chunks(place)[0]
    orphan = path.with_name("u000007000-0.psc")
    orphan.write_bytes(path.read_bytes())
    code, out, _ = vorox("data", "gc", "c.yaml", "--dry-run")
    assert code == 0
    assert "Would free" in out
    assert f"({orphan.stat().st_size:,} bytes)" in out
    assert orphan.exists()
    found = json.loads(vorox("data", "gc", "c.yaml", "--json")[1])
    assert found["freed_bytes"] == path.stat().st_size
    assert [entry["path"] for entry in found["files"]] == [str(orphan)]
    assert [entry["remove"] for entry in found["caches"]] == [False, False]
    assert not orphan.exists()
    assert vorox("data", "verify", "c.yaml")[0] == 0
    assert "Freed 0 B" in vorox("data", "gc", "c.yaml", "--older-than", "1d")[1]
    code, _, err = vorox("data", "gc", "c.yaml", "--older-than", "0s")
    assert code == 2  # nobody can be asked here
    assert "--yes" in err
    assert len(chunks(place)) > 0
    code, out, _ = vorox("data", "gc", "c.yaml", "--older-than", "0s", "--yes")
    assert code == 0
    assert list((place / "cache").glob("text-*")) == []
    assert vorox("data", "gc", "c.yaml", "--older-than", "soon")[0] == 2


def test_pinned_caches_stay(place: Path, vorox: Run) -> None:
    vorox("data", "build", "c.yaml")
    kept = sorted((place / "cache").glob("text-*"))
    assert vorox("data", "pin")[0] == 2
    assert vorox("data", "pin", "c.yaml", "--name", "../x")[0] == 2
    assert vorox("data", "pin", "--cache", "text-train-nothing", "c.yaml")[0] == 2
    code, out, _ = vorox("data", "pin", "c.yaml", "--name", "paper", "--reason", "figure 3")
    assert code == 0
    assert all(f"pinned  {directory}" in out for directory in kept)
    listed = json.loads(vorox("data", "gc", "c.yaml", "--older-than", "0s", "--dry-run", "--json")[1])["caches"]
    assert [(entry["remove"], entry["pins"]) for entry in listed] == [(False, {"paper": "figure 3"})] * 2
    assert "paper: figure 3" in vorox("data", "gc", "c.yaml", "--older-than", "0s", "--yes")[1]
    assert vorox("data", "build", "c.yaml", "--force-rebuild")[0] == 0
    assert vorox("data", "gc", "c.yaml", "--older-than", "0s", "--yes")[0] == 0
    assert sorted((place / "cache").glob("text-*")) == kept, "pins outlive a rebuild"
    assert vorox("data", "verify", "c.yaml")[0] == 0
    assert "not pinned as kept" in vorox("data", "unpin", "c.yaml")[1]
    assert vorox("data", "unpin", "c.yaml", "--cache", kept[0].name, "--name", "paper")[0] == 0
    assert vorox("data", "gc", "c.yaml", "--older-than", "0s", "--yes")[0] == 0
    assert sorted((place / "cache").glob("text-*")) == kept[1:]


def test_gc_without_a_configuration_looks_where_caches_are_by_default(
    place: Path, vorox: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    vorox("data", "build", "c.yaml")
    monkeypatch.setenv("VOROX_CACHE", str(place / "cache"))
    found = json.loads(vorox("data", "gc", "--dry-run", "--json")[1])
    assert found["root"] == str(place / "cache")
    assert len(found["caches"]) == 2


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_a_build_with_75_and_the_next_goes_on(place: Path, vorox: Run, workers: str) -> None:
    write(place / "text", "b", 1500)
    words = [sys.executable, "-c", "import sys; from vorox.cli import main; sys.exit(main())"]
    process = subprocess.Popen(
        [*words, "data", "build", "c.yaml", "--workers", workers],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: len(chunks(place)) >= 8 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT if workers == "2" else signal.SIGTERM)  # as a terminal does
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert "run the same command again" in err
    found = reports(vorox("data", "build", "c.yaml", "--json"))
    assert 0 < found["text train"]["units_built"] + found["text train"]["units_adopted"] < found["text train"]["units"]
    assert vorox("data", "verify", "c.yaml")[0] == 0


def test_the_text_of_a_run_is_verified_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with a trained tokenizer, the files are known without listing them."""
    use_numpy_engine(monkeypatch)
    monkeypatch.setenv("COLUMNS", "400")
    settings = ["train.num_steps=2", "tokenizer.kind=bpe", "tokenizer.vocab_size=300"]
    directory = str(run(configuration(tmp_path, settings)).run_directory)
    assert main(["data", "verify", directory]) == 0, capsys.readouterr().err
    text = tmp_path / "text" / "text.jsonl"
    whole = text.read_bytes()
    text.write_bytes(whole.replace(b"e", b"E", 1))
    assert main(["data", "verify", directory]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("content") == said.count(str(text)) == 1, "one sentence for one file"
    assert "run the same command again" not in said
    assert "`versions`" not in said, "what a run has read is in its record"
    text.write_bytes(whole)
    assert main(["data", "verify", directory]) == 0, capsys.readouterr().err


def test_before_a_build_the_command_as_typed_is_named_and_of_splits_train_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "my splits"
    folder.mkdir()
    for name in ("train", "test", "validation"):
        lines = [json.dumps({"text": f"{name} record {n} has the words of {name}"}) for n in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    words = ["--data", "my splits", "tokenizer.kind=byte", "data.sequence_length_tokens=64"]
    assert main(["data", "peek", "--rows", "3", *words]) == 4
    command = shlex.join(["vorox", "data", "build", *words])
    assert f"build it first: {command}" in capsys.readouterr().err
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    for split, shown, other in (("train", "train", "validation"), ("validation", "validation", "train")):
        capsys.readouterr()
        assert main(["data", "peek", "--rows", "3", "--split", split, *words]) == 0
        captured = capsys.readouterr()
        assert f"words of {shown}" in captured.out
        assert f"words of {other}" not in captured.out
        assert "words of test" not in captured.out
        assert "these splits are left out: test" in captured.err


def test_the_text_of_a_run_is_verified_where_it_was_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are found by content: after a rename, and after a move of the whole project. What is lost is named once."""
    use_numpy_engine(monkeypatch)
    monkeypatch.setenv("COLUMNS", "1000")
    project, moved = tmp_path / "project", tmp_path / "moved"
    project.mkdir()
    for name in "abcd":
        write(project / "text", name, 20)
    monkeypatch.chdir(project)
    settings = ["train.num_steps=2", "run.directory=runs", 'data.sources.0.paths=["text"]',
                f"data.cache.directory={tmp_path / 'cache'}"]  # fmt: skip
    directory = run(configuration(project, settings)).run_directory.relative_to(project)

    def verified() -> tuple[int, str]:
        code = main(["data", "verify", str(directory)])
        captured = capsys.readouterr()
        return code, " ".join(captured.err.split())

    assert verified()[0] == 0
    text = Path("text")
    (text / "b.jsonl").rename(text / "x.jsonl")
    code, said = verified()
    assert code == 0, said
    assert "1 file of source 'text' moved" in said
    assert "b.jsonl (now" in said
    monkeypatch.chdir(tmp_path)
    project.rename(moved)
    monkeypatch.chdir(moved)
    code, said = verified()
    assert code == 0, said
    assert f"{len(list(text.iterdir()))} files of source 'text' moved" in said
    (text / "a.jsonl").unlink()
    (text / "c.jsonl").unlink()
    (text / "d.jsonl").write_bytes(b"{}")
    code, said = verified()
    assert code == 4
    assert "3 files cannot be read" in said  # the rewritten one is not where the run has read it, either
    assert all(str(project / "text" / f"{name}.jsonl") in said for name in "acd")
    assert "all caches, which are intact" in said
    assert "`versions`" not in said
