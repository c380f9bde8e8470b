"""Files, units and records depend on the content alone; the splits are disjoint and complete."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import BadRecord, Document
from vorox.data.text.format_detection import detect_source
from vorox.data.text.sources import Source, list_files, list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.tokenizers.training_sample import allocate, training_sample


def source(paths: Path | list[Path], form: str = "txt", **options: Any) -> SourceConfig:
    names = [str(path) for path in ([paths] if isinstance(paths, Path) else paths)]
    return SourceConfig.model_validate({"name": "s", "format": form, "paths": names, **options})


def rule(split: str, fraction: float) -> ValidationConfig:
    return ValidationConfig.model_validate({"split": split, "held_out_fraction": fraction})


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def records(listed: Source, split: str, validation: ValidationConfig, unit_bytes: int) -> list[Document | BadRecord]:
    units = split_into_units(listed, split, validation, unit_bytes)  # type: ignore[arg-type]
    assert [unit.unit_id for unit in units] == list(range(len(units)))
    return [record for unit in units for record in UnitReader(listed, split, validation)(unit)]  # type: ignore[arg-type]


STDLIB = SourceConfig(name="python", format="python_stdlib")


class TestStandardLibrary:
    def test_holds_the_library_and_no_tests_or_packages(self) -> None:
        listed = list_source(STDLIB)
        uris = [file.uri for file in listed.files]
        assert uris == sorted(uris)
        assert {"stdlib:json/decoder.py", "stdlib:os.py", "stdlib:turtledemo/clock.py"} <= set(uris)
        forbidden = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
        for uri in uris:
            parts = uri.removeprefix("stdlib:").split("/")
            assert not forbidden & set(parts), uri
            assert not any(part.startswith(("config-", "_sysconfigdata")) for part in parts), uri
        generated = ("encodings/", "pydoc_data/", "lib2to3/", "html/entities.py", "stringprep.py", "locale.py")
        assert not [uri for uri in uris if uri.removeprefix("stdlib:").startswith(generated)]
        assert listed.definition["selection"] == "2", "another choice of files is another corpus"
        assert 400 < len(uris) < 2_000
        assert 5 << 20 < listed.size_bytes < 40 << 20

    def test_every_file_reads_and_each_content_is_there_once(self) -> None:
        """The default budget for bad records, one in a thousand, must never be touched by the standard library."""
        listed = list_source(STDLIB)
        found = records(listed, "train", rule("file", 0), 64 << 20)
        assert [record for record in found if isinstance(record, BadRecord)] == []
        assert len({record.text for record in found if isinstance(record, Document)}) == len(found) == len(listed.files)

    def test_versions_are_the_files_hashes(self) -> None:
        (file,) = [file for file in list_files(STDLIB) if file.uri == "stdlib:json/decoder.py"]
        content = Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes()
        assert (file.size_bytes, file.version) == (len(content), hashlib.sha256(content).hexdigest())

    def test_is_the_same_list_in_any_directory_and_locale(self, tmp_path: Path) -> None:
        program = (
            "from vorox.core.schema.data import SourceConfig; from vorox.data.text.sources import list_source; "
            "print(list_source(SourceConfig(name='other', format='python_stdlib')).digest)"
        )
        environment = {**os.environ, "LC_ALL": "C", "PYTHONHASHSEED": "7", "HOME": str(tmp_path)}
        command = [sys.executable, "-c", program]
        other = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert other.stdout.strip() == list_source(STDLIB).digest

    def test_max_bytes_takes_the_first_files(self) -> None:
        everything, some = list_source(STDLIB), list_source(STDLIB.model_copy(update={"max_bytes": 300_000}))
        assert some.files == everything.files[: len(some.files)]
        assert 250_000 < some.size_bytes <= 300_000


class TestListing:
    def test_duplicates_and_empty_files_are_left_out(self, tmp_path: Path) -> None:
        write(tmp_path, {"b.txt": "same", "a.txt": "same", "c.txt": "", "d.txt": "other"})
        assert [Path(file.uri).name for file in list_files(source(tmp_path))] == ["a.txt", "d.txt"]

    def test_files_of_the_format_with_other_endings_are_named(self, tmp_path: Path) -> None:
        files: dict[str, str | bytes] = {
            "a.txt": "one",
            "b.md": "two",
            "c.md": "three",
            "README.md": "read me",
            "d.json": "{}",
            "e.bin": "x",
        }
        write(tmp_path, files)
        (note,) = list_source(source(tmp_path)).notes
        assert f"leaves out files of {tmp_path}: 2 .md (add {tmp_path}/**/*.md to its paths" in note.text
        assert not list_source(source([tmp_path, tmp_path / "**" / "*.md"])).notes
        assert not list_source(source(tmp_path / "*.txt")).notes
        write(tmp_path / "j", {"a.jsonl": '{"text": "a"}', "b.json": '{"text": "b"}', "c.txt": "c"})
        (note,) = list_source(source(tmp_path / "j", "jsonl")).notes
        assert ": 1 .json (" in note.text

    def test_a_compressed_copy_beside_its_file_is_left_out_with_a_note(self, tmp_path: Path) -> None:
        """As gzip -k and zstd leave it; another text of that name, and a file named itself, are read."""
        line = b'{"text": "one"}\n'
        packed, other = gzip.compress(line), gzip.compress(line.replace(b"one", b"two"))
        write(tmp_path, {"a.jsonl": line, "a.jsonl.gz": packed, "b.jsonl.gz": other, "x/a.jsonl.gz": other + packed})
        for paths in (tmp_path, tmp_path / "**" / "*.jsonl*"):
            listed = list_source(source(paths, "jsonl"))
            names = [file.uri.removeprefix(f"{tmp_path}/") for file in listed.files]
            assert names == ["a.jsonl", "b.jsonl.gz", "x/a.jsonl.gz"]
            assert [note.kind for note in listed.notes] == ["duplicates"]
            assert "a.jsonl.gz" in listed.notes[0].text
            assert "3 files" in detect_source([str(paths)]).summary
        both = list_source(source([tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"], "jsonl"))
        assert len(both.files) == 2

    def test_paths_that_overlap_name_a_file_once(self, tmp_path: Path) -> None:
        write(tmp_path, {"a.txt": "a", "sub/b.txt": "b"})
        overlapping = source([tmp_path / "sub", tmp_path, tmp_path / "a.txt"])
        found, expected = list_files(overlapping), list_files(source(tmp_path))
        assert [(file.uri, file.version) for file in found] == [(file.uri, file.version) for file in expected]

    def test_places_are_relative_so_that_a_moved_folder_keeps_its_split(self, tmp_path: Path) -> None:
        files: dict[str, str | bytes] = {f"{n}.txt": f"text {n}\n" for n in range(40)}
        one, two = write(tmp_path / "one", files), write(tmp_path / "deep" / "two", files)
        assert list_source(source(one)).relative_paths == list_source(source(two)).relative_paths
        assert list_source(source(one)).digest == list_source(source(two)).digest
        held_out = [records(list_source(source(p)), "validation", rule("file", 0.3), 100) for p in (one, two)]
        texts = [[r.text for r in found] for found in held_out]  # type: ignore[union-attr]
        assert texts[0] == texts[1] != []

    @pytest.mark.parametrize("limit", [1, 5, 11, 12, 17, 18, 40, 10_000])
    def test_max_bytes_ends_at_a_line(self, tmp_path: Path, limit: int) -> None:
        write(tmp_path, {"a.txt": "one\ntwo\n", "b.txt": "three\nfour\n", "c.txt": "five\n"})
        listed = list_source(source(tmp_path, max_bytes=limit))
        text = "".join(r.text for r in records(listed, "train", rule("file", 0), 1 << 20))  # type: ignore[union-attr]
        assert "one\ntwo\nthree\nfour\nfive\n".startswith(text)
        assert limit - 6 < len(text) <= limit or len(text) == 24

    def test_max_bytes_never_cuts_a_json_line(self, tmp_path: Path) -> None:
        lines = [json.dumps({"text": f"number {n}"}) + "\n" for n in range(20)]
        write(tmp_path, {"a.jsonl": "".join(lines)})
        listed = list_source(source(tmp_path, "jsonl", max_bytes=200))
        found = records(listed, "train", rule("document", 0), 64)
        assert [r.text for r in found] == [f"number {n}" for n in range(len(found))]  # type: ignore[union-attr]
        assert 150 < listed.size_bytes <= 200

    def test_digest_follows_content_names_and_use(self, tmp_path: Path) -> None:
        write(tmp_path, {"a.txt": "one\ntwo\n"})
        digests = {list_source(source(tmp_path)).digest, list_source(source(tmp_path, max_bytes=4)).digest}
        write(tmp_path, {"a.txt": "one\nTwo\n"})
        digests.add(list_source(source(tmp_path)).digest)
        (tmp_path / "a.txt").rename(tmp_path / "b.txt")
        digests.add(list_source(source(tmp_path)).digest)
        assert len(digests) == 4

    @pytest.mark.parametrize(
        ("config", "where"),
        [
            ({"format": "python_stdlib", "paths": ["x"]}, "paths"),
            ({"format": "txt"}, "paths"),
            ({"format": "txt", "paths": ["x"], "text_field": "body"}, "text_field"),
        ],
    )
    def test_contradictions_are_refused(self, config: dict[str, Any], where: str) -> None:
        with pytest.raises(ConfigError) as caught:
            list_source(SourceConfig.model_validate({"name": "s", **config}), key="data.sources.3")
        assert caught.value.where == f"data.sources.3.{where}"
        assert caught.value.hint

    def test_empty_corpus_is_refused_with_its_place(self, tmp_path: Path) -> None:
        write(tmp_path, {"a.txt": ""})
        with pytest.raises(DataError, match=r"empty: .*a\.txt has 0 bytes") as caught:
            list_source(source(tmp_path))
        assert caught.value.where == str(tmp_path)
        write(tmp_path, {"b.txt": ""})
        with pytest.raises(DataError, match="empty: every file has 0 bytes"):
            list_source(source(tmp_path))
        write(tmp_path, {"b.jsonl": json.dumps({"text": "x" * 99}) + "\n"})
        with pytest.raises(DataError, match="no record that ends within max_bytes = 50") as caught:
            list_source(source(tmp_path, "jsonl", max_bytes=50), key="data.sources.0")
        assert "data.sources.0.max_bytes" in caught.value.hint


class TestSplits:
    """For every split and unit size: disjoint, complete, in order, and independent of the units."""

    @pytest.mark.parametrize("split", ["file", "document", "span"])
    @pytest.mark.parametrize("form", ["txt", "jsonl"])
    @pytest.mark.parametrize("unit_bytes", [1, 64, 500, 1 << 20])
    def test_train_and_validation_are_disjoint_and_complete(
        self, tmp_path: Path, split: str, form: str, unit_bytes: int
    ) -> None:
        for n in range(30):
            lines = [f"file {n} line {k} é\n" for k in range(n)]
            if form == "jsonl":
                lines = [json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines]
            write(tmp_path, {f"{n:02}.{form}": "".join(lines)})
        listed = list_source(source(tmp_path, form))
        parts = [records(listed, side, rule(split, 0.2), unit_bytes) for side in ("train", "validation")]
        keys = [[(r.file_index, r.byte_offset, r.byte_length) for r in part] for part in parts]
        assert all(part == sorted(part) for part in keys)
        assert keys[1], "nothing is held out"
        covered = sorted(keys[0] + keys[1])
        for index, file in enumerate(listed.files):
            spans = [(offset, length) for i, offset, length in covered if i == index]
            ends = [offset + length for offset, length in spans]
            assert [offset for offset, _ in spans] == [0, *ends[:-1]], "a gap or an overlap"
            assert ends[-1] == file.size_bytes
        ordinals = sorted((r.file_index, r.ordinal) for part in parts for r in part)
        assert len(set(ordinals)) == len(ordinals)
        by_place = {(r.file_index, r.byte_offset): r.ordinal for part in parts for r in part}
        assert [by_place[key] for key in sorted(by_place)] == [ordinal for _, ordinal in ordinals]

    @pytest.mark.parametrize("split", ["file", "document", "span"])
    def test_json_records_do_not_depend_on_units(self, tmp_path: Path, split: str) -> None:
        lines = [json.dumps({"text": f"line {k}"}) if k % 7 else "{broken" for k in range(200)]
        write(tmp_path, {"a.jsonl": "\n".join(lines), "b.jsonl": "\n".join(lines[:50]) + "\n"})
        listed = list_source(source(tmp_path, "jsonl"))
        for side in ("train", "validation"):
            expected = records(listed, side, rule(split, 0.5), 1 << 20)
            for unit_bytes in (1, 100, 777):
                assert records(listed, side, rule(split, 0.5), unit_bytes) == expected

    def test_a_file_more_or_less_moves_nothing_else(self, tmp_path: Path) -> None:
        write(tmp_path, {f"{n}.txt": f"text {n}" for n in range(50)})
        for split in ("file", "document"):
            before = {r.text for r in records(list_source(source(tmp_path)), "validation", rule(split, 0.3), 99)}  # type: ignore[union-attr]
            write(tmp_path, {"0000.txt": "new", "zzz.txt": "new as well"})
            after = {r.text for r in records(list_source(source(tmp_path)), "validation", rule(split, 0.3), 99)}  # type: ignore[union-attr]
            assert after - {"new", "new as well"} == before
            (tmp_path / "0000.txt").unlink()
            (tmp_path / "zzz.txt").unlink()

    def test_spans_of_one_file_are_its_share_to_the_line_and_spread_over_it(self, tmp_path: Path) -> None:
        text = "".join(f"line {n:06}\n" for n in range(100_000))
        write(tmp_path, {"a.txt": text})
        listed = list_source(source(tmp_path))
        train, held_out = (records(listed, side, rule("span", 0.1), 1 << 30) for side in ("train", "validation"))
        found: list[Document] = []
        for document in (*train, *held_out):
            assert isinstance(document, Document)
            found.append(document)
        assert "".join(one.text for one in sorted(found, key=lambda one: one.byte_offset)) == text
        assert sorted(one.ordinal for one in found) == list(range(len(found)))
        held_bytes = sum(one.byte_length for one in held_out)
        assert abs(held_bytes - len(text) * 0.1) <= 12 * 2 * len(held_out)
        assert all(one.text.startswith("line ") and one.text.endswith("\n") for one in found)
        assert {4 * one.byte_offset // len(text) for one in held_out} == {0, 1, 2, 3}
        assert held_out[-1].byte_offset + held_out[-1].byte_length < len(text)

    def test_spans_do_not_depend_on_other_files(self, tmp_path: Path) -> None:
        text = "".join(f"a line of number {n:05}\n" for n in range(2_000))
        write(tmp_path, {"b.txt": text, "d.txt": text[::-1]})

        def spans() -> set[tuple[str, int, int]]:
            listed = list_source(source(tmp_path))
            found = records(listed, "validation", rule("span", 0.05), 1 << 20)
            return {(listed.relative_paths[one.file_index], one.byte_offset, one.byte_length) for one in found}

        before = spans()
        write(tmp_path, {"a.txt": text + "more\n", "c.txt": "short\n" * 50, "e.txt": text + "other\n"})
        after = spans()
        assert before < after
        assert {name for name, _, _ in after - before} == {"a.txt", "c.txt", "e.txt"}

    def test_units_cover_about_as_much_text_as_asked(self, tmp_path: Path) -> None:
        write(tmp_path, {f"{n:03}.txt": "x" * 99 + "\n" + str(n) for n in range(200)})
        units = split_into_units(list_source(source(tmp_path)), "train", rule("file", 0), 1_000)
        sizes = [sum(span.end_byte - span.start_byte for span in unit.spans) for unit in units]
        assert all(800 < size <= 1_000 for size in sizes[:-1])
        (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(5_000)))
        listed = list_source(source(tmp_path / "one.jsonl", "jsonl"))
        sparse = split_into_units(listed, "validation", rule("document", 0.01), 1_000)
        assert len(sparse) <= Fraction(listed.size_bytes, 50_000), "units of a sparse split hold too little of it"


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 1_000),
    parties=st.lists(
        st.tuples(st.fractions(Fraction(1, 50), 5, max_denominator=50), st.integers(0, 400)), min_size=1, max_size=6
    ),
)
def test_budget_is_shared_by_weight_and_never_overdrawn(budget: int, parties: list[tuple[Fraction, int]]) -> None:
    weights, available = [weight for weight, _ in parties], [size for _, size in parties]
    shares = allocate(budget, weights, available)
    assert all(0 <= share <= size for share, size in zip(shares, available, strict=True))
    assert sum(shares) <= budget
    assert sum(shares) >= min(budget, sum(available)) - len(parties)
    hungry = [i for i, share in enumerate(shares) if share < available[i]]
    for i in hungry:
        for j in hungry:
            assert abs(shares[i] / weights[i] - shares[j] / weights[j]) <= 1 / min(weights[i], weights[j])


class TestExcerpt:
    def texts(self, folder: Path, form: str, validation: ValidationConfig, budget: int) -> list[str]:
        listed = list_source(source(folder, form))
        return list(
            training_sample([replace(listed, holdout=validation)], [Fraction(1)], unit_bytes=5_000, budget_bytes=budget)
        )

    @pytest.mark.parametrize("split", ["file", "document", "span"])
    @pytest.mark.parametrize("form", ["txt", "jsonl"])
    def test_nothing_held_out_is_seen_and_all_is_taken_when_it_fits(
        self, tmp_path: Path, split: str, form: str
    ) -> None:
        for n in range(20):
            lines = [f"<{n}.{k}>" for k in range(60)]
            lines = [json.dumps({"text": line}) if form == "jsonl" else line for line in lines]
            write(tmp_path, {f"{n}.{form}": "\n".join(lines) + "\n"})
        validation = rule(split, 0.3)
        listed = list_source(source(tmp_path, form))
        held_out, train = (
            "\n".join(r.text for r in records(listed, side, validation, 5_000)).split()  # type: ignore[union-attr]
            for side in ("validation", "train")
        )
        everything = "\n".join(self.texts(tmp_path, form, validation, 1 << 30)).split()
        assert sorted(everything) == sorted(train)
        some = "\n".join(self.texts(tmp_path, form, validation, 3_000)).split()
        assert not set(some) & set(held_out)
        assert set(some) <= set(train)

    def test_is_evenly_spread_within_the_budget(self, tmp_path: Path) -> None:
        for n in range(100):
            write(tmp_path, {f"{n:03}.txt": "".join(f"file {n:03}\n" for _ in range(300))})
        texts = self.texts(tmp_path, "txt", rule("file", 0), 100_000)
        assert 85_000 < sum(map(len, texts)) <= 100_500
        seen = {text[5:8] for text in texts}
        assert len(seen) > 30
        tenths = [sum(int(name) // 10 == tenth for name in seen) for tenth in range(10)]
        assert max(tenths) - min(tenths) <= 2

    def test_one_large_file_is_sampled_from_start_to_end(self, tmp_path: Path) -> None:
        write(tmp_path, {"a.jsonl": "".join(json.dumps({"text": f"{n:06}"}) + "\n" for n in range(50_000))})
        numbers = [int(text) for text in self.texts(tmp_path, "jsonl", rule("document", 0.1), 20_000)]
        assert numbers == sorted(set(numbers))
        assert numbers[0] < 5_000
        assert numbers[-1] > 45_000
        assert max(b - a for a, b in zip([0, *numbers], [*numbers, 50_000], strict=True)) < 5_000

    def test_unreadable_records_are_left_to_the_build(self, tmp_path: Path) -> None:
        write(tmp_path, {"a.jsonl": '{"text": "a"}\n{broken\n{"text": ""}\n{"text": "b"}\n'})
        assert self.texts(tmp_path, "jsonl", rule("document", 0), 1_000) == ["a", "b"]
