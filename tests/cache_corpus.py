"""A small in-memory corpus and a trivial tokenizer, for tests of the token cache.

A file is some lines; a line is a document, and one that begins with ``!`` cannot be read. The tokenizer gives every
byte of the text its value times ``scale``; the end of text is the highest id. Written without the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vorox.data.cache.build import BuildOptions, build
from vorox.data.cache.building.report import BuildReport
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.documents import BadRecord, Document, SourceFile, Unit, UnitSpan
from vorox.data.recipe import Recipe


@dataclass(frozen=True)
class ByteTokenizer:
    scale: int = 1

    @property
    def fingerprint(self) -> str:
        return f"bytes times {self.scale}"

    @property
    def vocab_size(self) -> int:
        return 256 * self.scale + 1

    @property
    def end_of_text_id(self) -> int:
        return self.vocab_size - 1

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64) * self.scale


@dataclass(frozen=True)
class Corpus:
    """Files of lines, and the units that they are split into."""

    contents: tuple[bytes, ...]
    files: tuple[SourceFile, ...]
    units: tuple[Unit, ...]

    def read_unit(self, unit: Unit) -> Iterator[Document | BadRecord]:
        for span in unit.spans:
            offset, ordinal = span.start_byte, span.first_ordinal
            for line in self.contents[span.file_index][span.start_byte : span.end_byte].splitlines(keepends=True):
                place = (span.file_index, ordinal, offset, len(line))
                if line.startswith(b"!"):
                    yield BadRecord(*place, ordinal + 1, "begins with an exclamation mark")
                else:
                    yield Document(*place, line.rstrip(b"\n").decode())
                offset += len(line)
                ordinal += 1

    def documents(self) -> list[Document]:
        return [record for unit in self.units for record in self.read_unit(unit) if isinstance(record, Document)]


def corpus_of(files: Sequence[Sequence[str]], lines_per_unit: int) -> Corpus:
    """One file per list of lines; units of so many lines, none across files."""
    contents = tuple(b"".join(line.encode() + b"\n" for line in lines) for lines in files)
    units: list[Unit] = []
    for index, content in enumerate(contents):
        lines = content.splitlines(keepends=True)
        ends = np.cumsum([0, *map(len, lines)]).tolist()
        for first in range(0, len(lines), lines_per_unit):
            last = min(first + lines_per_unit, len(lines))
            units.append(Unit(len(units), (UnitSpan(index, ends[first], ends[last], first),)))
    names = tuple(SourceFile(f"/corpus/{index}.txt", len(c), f"version {c!r}"[:99]) for index, c in enumerate(contents))
    return Corpus(contents, names, tuple(units))


def small_corpus(num_files: int = 2, lines_per_file: int = 30, lines_per_unit: int = 15, seed: int = 5) -> Corpus:
    """Lines of very different lengths, some longer than several rows, some empty."""
    generator = np.random.default_rng(seed)
    files = [
        [
            "".join(map(chr, generator.integers(97, 123, int(generator.lognormal(3, 1.2)))))
            if generator.random() > 0.05
            else ""
            for _ in range(lines_per_file)
        ]
        for _ in range(num_files)
    ]
    return corpus_of(files, lines_per_unit)


def recipe_for(tokenizer: ByteTokenizer, row_tokens: int = 33, chunk_rows: int = 8, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text_id": tokenizer.end_of_text_id,
        "row_tokens": row_tokens,
        "source": {"name": "corpus"},
        "split": {"name": "train"},
        "chunk_rows": chunk_rows,
    }
    return Recipe(**{**values, **changes})


def build_corpus(directory: Path, corpus: Corpus, *, recipe: Recipe | None = None, **options: Any) -> BuildReport:
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    recipe = recipe or recipe_for(tokenizer)
    fields = ("codec", "block_rows", "pipeline", "bad_record_fraction")
    changes = {name: options.pop(name) for name in fields if name in options}
    work = work_of(corpus, tokenizer=tokenizer, recipe=recipe, **changes)
    callbacks = {name: options.pop(name) for name in ("on_progress", "on_verified") if name in options}
    return build(directory, work, corpus.units, BuildOptions(**options), **callbacks)


def work_of(corpus: Corpus, **changes: Any) -> UnitBuilder:
    tokenizer = changes.pop("tokenizer", ByteTokenizer())
    values: dict[str, Any] = {"recipe": recipe_for(tokenizer), "tokenizer": tokenizer, **changes}
    return UnitBuilder(files=corpus.files, read_unit=corpus.read_unit, **values)
