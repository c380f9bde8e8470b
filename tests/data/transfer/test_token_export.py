"""Exports equal the cache, as read by parsers written from the specifications of the formats."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import FileOperation, observe
from vorox.core.files.staged_directory import verify_directory
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.storage import local_path
from vorox.data.tokenizers.loading import load
from vorox.data.transfer.token_export import export_tokens

LINES = 120


def texts_of(name: str) -> list[str]:
    """One record per function of a file of the standard library; lengths differ by a hundred."""
    return [part for part in local_path(f"stdlib:{name}").read_text().split("\ndef ") if part]


def write_corpus(root: Path) -> RunConfig:
    for name, records in (("wrap", texts_of("textwrap.py")), ("tokens", texts_of("tokenize.py"))):
        lines = [json.dumps({"text": text}) for text in [*records, "", "é😀", "x" * 5000]]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources = [{"name": name, "format": "jsonl", "paths": [str(root / f"{name}.jsonl")]} for name in ("wrap", "tokens")]
    data = {
        "sources": sources,
        "sequence_length_tokens": 64,
        "cache": {"directory": str(root / "cache"), "unit_bytes": 4000},
        "validation": {"split": "document", "held_out_fraction": 0.3},
    }
    return RunConfig.model_validate({
        "data": data, "tokenizer": {"vocab_size": 300, "train_bytes": 20_000}, "train": {"num_steps": 1},
    })  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(write_corpus(tmp_path_factory.mktemp("corpus")))


def expected(corpus: Corpus, source: int, split: str) -> list[list[int]]:
    """The documents of a split in the order of the file, encoded again."""
    stored = corpus.sources[source].source.stored[0]
    end = corpus.tokenizer.end_of_text_id
    reader = corpus.sources[source].train if split == "train" else corpus.sources[source].validation
    assert reader is not None
    inside = {span.byte_offset for row in range(reader.num_rows) for span in reader.documents_of(row)}
    documents: list[list[int]] = []
    offset = 0
    for line in Path(stored.uri).read_bytes().splitlines(keepends=True):
        if offset in inside:
            documents.append([*corpus.tokenizer.encode(json.loads(line)["text"]).tolist(), end])
        offset += len(line)
    return documents


def read_bin(path: Path) -> np.ndarray:
    """Parse an llm.c shard: 256 int32, of which three matter, then the tokens."""
    data = path.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    magic, version, count = header[:3]
    assert (magic, version) == (20240520, 1)
    assert not any(header[3:])
    tokens = np.frombuffer(data[1024:], "<u2")
    assert len(tokens) == count
    return tokens


def read_mds(folder: Path) -> Iterator[np.ndarray]:
    """Parse an MDS shard, by the specification of the format and not by our writer."""
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    for shard in index["shards"]:
        assert (shard["format"], shard["version"], shard["compression"], shard["zip_data"]) == ("mds", 2, None, None)
        assert (shard["column_names"], shard["column_encodings"], shard["column_sizes"]) == (
            ["tokens"], ["ndarray:uint16"], [None],
        )  # fmt: skip
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        assert hashlib.sha256(data).hexdigest() == shard["raw_data"]["hashes"]["sha256"]
        (count,) = struct.unpack_from("<I", data, 0)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        described = json.loads(data[4 + 4 * (count + 1) : offsets[0]])
        assert described["column_names"] == ["tokens"]
        assert offsets[-1] == len(data)
        for start, end in itertools.pairwise(offsets):
            (size,) = struct.unpack_from("<I", data, start)
            column = data[start + 4 : end]
            assert len(column) == size
            axes, width = column[0] >> 2, 2 ** (column[0] & 3)
            assert axes == 1
            length = int.from_bytes(column[1 : 1 + width], "little")
            values = np.frombuffer(column[1 + width :], "<u2")
            assert len(values) == length
            yield values


def cut(tokens: np.ndarray, end: int) -> list[list[int]]:
    stops = np.flatnonzero(tokens == end) + 1
    assert stops[-1] == len(tokens)
    return [part.tolist() for part in np.split(tokens, stops[:-1])]


@pytest.mark.parametrize("shard_tokens", [None, 700])
def test_bin_shards_hold_every_document_whole_and_in_order(
    corpus: Corpus, tmp_path: Path, shard_tokens: int | None
) -> None:
    report = export_tokens(corpus, "bin", tmp_path / "out", shard_tokens=shard_tokens)
    total = 0
    for source, name in enumerate(("wrap", "tokens")):
        for split, part in (("train", "train"), ("validation", "val")):
            files = sorted((tmp_path / "out").glob(f"{name}_{part}_*.bin"))
            shards = [read_bin(file) for file in files]
            assert (len(files) > 1) == (shard_tokens is not None)
            found = [document for shard in shards for document in cut(shard, corpus.tokenizer.end_of_text_id)]
            assert found == expected(corpus, source, split)
            total += sum(map(len, found))
            if shard_tokens is not None:
                assert all(len(shard) <= shard_tokens or np.sum(shard == 0) == 1 for shard in shards)
    assert total == report.tokens
    assert total == sum(entry.tokens for entry in corpus.reports.values())
    assert report.documents == sum(entry.documents for entry in corpus.reports.values())


@pytest.mark.parametrize("shard_tokens", [None, 700])
def test_mds_gives_every_document_as_a_sample(corpus: Corpus, tmp_path: Path, shard_tokens: int | None) -> None:
    export_tokens(corpus, "mds", tmp_path / "out", shard_tokens=shard_tokens)
    for source, name in enumerate(("wrap", "tokens")):
        for split, part in (("train", "train"), ("validation", "val")):
            found = [values.tolist() for values in read_mds(tmp_path / "out" / name / part)]
            assert found == expected(corpus, source, split)
            lengths = [len(document) for document in found]
            assert split == "validation" or (min(lengths) < 256 < max(lengths))  # both widths of the shape


def test_numpy_has_all_tokens_and_document_offsets(corpus: Corpus, tmp_path: Path) -> None:
    export_tokens(corpus, "npy", tmp_path / "out", splits=("train",))
    for source, name in enumerate(("wrap", "tokens")):
        tokens = np.load(tmp_path / "out" / f"{name}_train.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(tmp_path / "out" / f"{name}_train.offsets.npy", allow_pickle=False)
        assert tokens.dtype == np.uint16
        found = [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert offsets[0] == 0
        assert offsets[-1] == len(tokens)
        assert found == expected(corpus, source, "train")
    assert not list((tmp_path / "out").glob("*_val*"))


@pytest.mark.parametrize("form", ["bin", "mds", "npy"])
def test_the_same_cache_gives_the_same_bytes_and_a_true_manifest(corpus: Corpus, tmp_path: Path, form: Any) -> None:
    first = export_tokens(corpus, form, tmp_path / "a")
    export_tokens(corpus, form, tmp_path / "b")
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    metadata = verify_directory(tmp_path / "a")
    assert metadata["tokenizer"] == corpus.tokenizer.fingerprint
    assert metadata["contents"][0]["cache"] == corpus.sources[0].train.digest
    for entry in metadata["contents"]:
        for file in entry["files"]:
            data = (tmp_path / "a" / file["name"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file["sha256"]
            assert len(data) == file["size_bytes"]
    assert load(tmp_path / "a" / "tokenizer").fingerprint == corpus.tokenizer.fingerprint
    assert first.directory == tmp_path / "a"


def test_wide_ids_have_the_other_magic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import AddedToken, Tokenizer

    from vorox.core.schema.tokenizer import TokenizerConfig
    from vorox.data.tokenizers.loading import train

    library = Tokenizer.from_str(train(TokenizerConfig(kind="byte"), ()).files()["tokenizer.json"].decode())
    library.add_special_tokens([AddedToken(f"<extra {number}>", special=True) for number in range(66_000)])
    library.save(str(tmp_path / "wide.json"))
    config = write_corpus(tmp_path)
    tokenizer = config.tokenizer.model_copy(update={"kind": "file", "path": str(tmp_path / "wide.json")})
    corpus = prepare(config.model_copy(update={"tokenizer": tokenizer}))
    export_tokens(corpus, "bin", tmp_path / "out")
    data = (tmp_path / "out" / "wrap_train_000000.bin").read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version, len(data)) == (20240801, 7, 1024 + 4 * count)
    found = cut(np.frombuffer(data[1024:], "<u4"), corpus.tokenizer.end_of_text_id)
    assert found == expected(corpus, 0, "train")


def test_exported_shards_are_a_source_with_the_same_documents(corpus: Corpus, tmp_path: Path) -> None:
    export_tokens(corpus, "bin", tmp_path / "out", splits=("train",), shard_tokens=2000)
    tokenizer = tmp_path / "out" / "tokenizer" / "tokenizer.json"
    source = {
        "name": "again", "format": "bin", "paths": [str(tmp_path / "out" / "wrap_train_*.bin")],
        "tokenizer": corpus.tokenizer.fingerprint, "end_of_text_id": corpus.tokenizer.end_of_text_id,
    }  # fmt: skip
    config = RunConfig.model_validate({
        "data": {
            "sources": [source], "sequence_length_tokens": 64, "cache": {"directory": str(tmp_path / "cache")},
            "validation": {"held_out_fraction": 0},
        },
        "tokenizer": {"kind": "file", "path": str(tokenizer)}, "train": {"num_steps": 1},
    })  # fmt: skip
    again = prepare(config)
    export_tokens(again, "npy", tmp_path / "numpy")
    tokens = np.load(tmp_path / "numpy" / "again_train.npy", allow_pickle=False)
    # An end of text alone is an empty document, which a source of shards does not count as one.
    assert cut(tokens, again.tokenizer.end_of_text_id) == [d for d in expected(corpus, 0, "train") if len(d) > 1]


class TestRefusals:
    def test_a_directory_that_exists(self, corpus: Corpus, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="exists already"):
            export_tokens(corpus, "bin", tmp_path)

    def test_shard_size_of_a_format_without_shards(self, corpus: Corpus, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no shards"):
            export_tokens(corpus, "npy", tmp_path / "out", shard_tokens=5)

    def test_no_validation(self, tmp_path: Path) -> None:
        config = write_corpus(tmp_path)
        data = config.data.model_copy(
            update={"validation": config.data.validation.model_copy(update={"held_out_fraction": 0.0})}
        )
        with pytest.raises(DataError, match="No validation text is held out"):
            export_tokens(
                prepare(config.model_copy(update={"data": data})), "bin", tmp_path / "out", splits=("validation",)
            )

    @pytest.mark.parametrize("kind", ["write", "fsync", "rename"])
    def test_a_full_disk_leaves_nothing(self, corpus: Corpus, tmp_path: Path, kind: str) -> None:
        left = [12]

        def fail(operation: FileOperation) -> None:
            left[0] -= operation.kind == kind
            if operation.kind == kind and (left[0] < 0 or kind == "rename"):
                raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

        with observe(fail), pytest.raises(DataError, match="No space left") as caught:
            export_tokens(corpus, "bin", tmp_path / "out", shard_tokens=300)
        assert "make room" in caught.value.hint
        assert list(tmp_path.iterdir()) == []

    def test_a_damaged_cache_is_not_exported(self, tmp_path: Path) -> None:
        config = write_corpus(tmp_path)
        prepare(config)
        corpus = prepare(config, build=False)  # as the command does; nothing is repaired on the way
        chunk = sorted((tmp_path / "cache").glob("wrap-train-*/chunks/*/*.psc"))[0]
        data = bytearray(chunk.read_bytes())
        data[400] ^= 1
        chunk.write_bytes(data)
        with pytest.raises(DataError) as caught:
            export_tokens(corpus, "bin", tmp_path / "new" / "out")
        assert str(chunk) in caught.value.where
        assert not (tmp_path / "new").exists()


def one_and_more(text: str) -> list[str]:
    """A transform that keeps the original, adds two other texts of it, and the original again."""
    return [text, text.upper(), text[::2], text]


def both(text: str) -> list[str]:
    """A transform that keeps the original beside a text of the same size."""
    return [text, text.upper()]


@pytest.mark.parametrize(
    ("form", "transform", "settings"),
    [
        *((form, one_and_more, {}) for form in ("bin", "npy", "mds")),
        ("bin", both, {"chunk_rows": 3}),
        ("bin", both, {"chunk_rows": 3, "packing": "concat"}),
    ],
)
def test_all_texts_that_a_transform_makes_of_a_record_are_exported(
    tmp_path: Path, form: Any, transform: Callable[[str], list[str]], settings: dict[str, Any]
) -> None:
    """Also two of equal size, in several chunks of a unit, and two that are equal."""
    config = write_corpus(tmp_path)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["data"]["transforms"] = [{"name": f"{__name__}:{transform.__name__}"}]
    values["data"]["cache"] |= {key: value for key, value in settings.items() if key == "chunk_rows"}
    values["data"] |= {key: value for key, value in settings.items() if key == "packing"}
    values["data"]["validation"] = {"held_out_fraction": 0.0}
    values["tokenizer"] = {"kind": "byte"}
    corpus = prepare(RunConfig.model_validate(values))
    report = export_tokens(corpus, form, tmp_path / "out", splits=("train",))
    lines = [line for name in ("wrap", "tokens") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    texts = [text for line in lines for text in transform(json.loads(line)["text"])]
    assert (report.documents, report.tokens) == (len(texts), sum(len(text.encode()) + 1 for text in texts))
    if form == "bin":
        end = corpus.tokenizer.end_of_text_id
        tokens = np.concatenate([read_bin(path) for path in sorted((tmp_path / "out").glob("*.bin"))])
        found = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]]
        assert sorted(found) == sorted([*text.encode(), end] for text in texts)
