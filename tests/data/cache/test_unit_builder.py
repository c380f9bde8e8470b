"""Units as pure functions: the same bytes as in a cache, in the requested order, in any process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache_corpus import ByteTokenizer, Corpus, build_corpus, corpus_of, recipe_for, small_corpus
from transport import received
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.cache.files.manifest import Manifest, chunk_path
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import UnitReader
from vorox.data.text.unit_splitter import split_into_units
from vorox.data.tokenizers.loading import train

TOKENIZER = ByteTokenizer()


def work_of(corpus: Corpus, **changes) -> UnitBuilder:
    values = {"recipe": recipe_for(TOKENIZER), "tokenizer": TOKENIZER, **changes}
    return UnitBuilder(files=corpus.files, read_unit=corpus.read_unit, **values)


def test_units_equal_those_of_a_built_cache_in_any_order(tmp_path):
    corpus = small_corpus()
    build_corpus(tmp_path, corpus)
    manifest = Manifest.open(tmp_path)
    backwards = list(work_of(corpus).run(reversed(corpus.units)))
    assert [unit.unit_id for unit in backwards] == [3, 2, 1, 0]
    for unit in backwards:
        assert [record for _, record in unit.chunks] == manifest.unit_chunks(unit.unit_id)
        for data, record in unit.chunks:
            assert data == chunk_path(tmp_path, record.unit, record.part).read_bytes()
        row = manifest.units[unit.unit_id]
        assert (row["documents"], row["tokens"]) == (unit.statistics.documents, unit.statistics.tokens)
        assert unit.records_read == unit.statistics.documents


def test_no_unit_is_consumed_after_a_stop():
    corpus = small_corpus()
    taken = []
    units = (taken.append(unit.unit_id) or unit for unit in corpus.units)
    built = work_of(corpus).run(units, stop=lambda: len(taken) >= 2)
    assert len(list(built)) <= 2 < len(corpus.units)
    assert len(taken) <= 3


def test_a_unit_of_bad_records_only_is_aborted_with_the_place():
    corpus = corpus_of([["!"] * 150], 200)
    (unit,) = work_of(corpus).run(corpus.units)
    assert unit.aborted
    assert unit.chunks == ()
    assert (len(unit.bad_records), unit.records_read) == (100, 100)


def test_a_file_that_cannot_be_read_is_named_behind_the_units_before_it(tmp_path):
    corpus = small_corpus()

    def read(unit):
        if unit.unit_id == 2:
            raise FileNotFoundError(2, "No such file or directory", "/corpus/gone.txt")
        return corpus.read_unit(unit)

    built = UnitBuilder(corpus.files, read, TOKENIZER, recipe_for(TOKENIZER)).run(corpus.units)
    assert [next(built).unit_id, next(built).unit_id] == [0, 1]
    with pytest.raises(DataError, match="Cannot read unit 2 of the source") as caught:
        next(built)
    assert caught.value.where == "/corpus/gone.txt"


def test_the_builder_of_a_real_source_can_be_pickled(tmp_path: Path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    source = list_source(SourceConfig(name="text", format="txt", paths=(str(tmp_path),)))
    rule = ValidationConfig(held_out_fraction=0)
    tokenizer = train(TokenizerConfig(vocab_size=270), ["the quick brown fox jumps over the lazy dog " * 20])
    recipe = recipe_for(tokenizer)  # type: ignore[arg-type]
    read = UnitReader(source, "train", rule)
    work = UnitBuilder(source.files, read, tokenizer, recipe)
    sent = received(work)
    assert sent.tokenizer.fingerprint == tokenizer.fingerprint
    assert np.array_equal(sent.tokenizer.encode("the fox"), tokenizer.encode("the fox"))
    units = split_into_units(source, "train", rule, 4000)
    assert len(units) > 1
    assert list(sent.run(units)) == list(work.run(units))
