"""Configured transforms: their effect on a run's rows, on the cache's identity, and their errors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.provenance.inspection import verify
from vorox.experiments.metrics import metric

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 12)) + f" {number}."


def write_lines(path: Path, count: int = 400) -> None:
    """Every tenth record is short, every seventh one that was there before."""
    texts = ["tiny" if n % 10 == 3 else sentence(n - 7 if n % 7 == 0 and n else n) for n in range(count)]
    path.write_text("".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts)))


def configuration(root: Path, *transforms: dict[str, Any], **data: Any) -> RunConfig:
    source = {"name": "lines", "format": "jsonl", "paths": [str(root / "lines.jsonl")], **data.pop("source", {})}
    sections = {
        "sources": [source],
        "sequence_length_tokens": 64,
        "cache": {"directory": str(root / "cache"), "unit_bytes": 9_000},
        "validation": {"split": "document", "held_out_fraction": 0.2},
        "transforms": list(transforms),
        **data,
    }
    tokenizer = {"kind": "byte", "special_tokens": list(SENTINELS)}
    return RunConfig.model_validate({"data": sections, "tokenizer": tokenizer, "train": {"num_steps": 1}})


def ordinals(corpus: Corpus) -> list[int]:
    """Records of the training cache, as often as documents were made of them."""
    reader = corpus.train[0]
    rows = [reader.documents_of(row) for row in range(reader.num_rows)]
    return sorted(document.ordinal for spans in rows for document in spans if document.document_token_offset == 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_lines(tmp_path / "lines.jsonl")
    return tmp_path


def test_rows_trace_back_through_filters_duplicates_and_augmentation(root):
    config = configuration(
        root,
        {"name": "length", "args": {"min_characters": 10}},
        {"name": "exact_duplicates"},
        {"name": "fill_in_the_middle", "args": {"rate": 0.7}},
        {"name": "token_dropout", "args": {"fraction": 0.05}},
    )
    plain = prepare(configuration(root))
    corpus = prepare(config)
    verify(corpus)
    texts = [json.loads(line)["text"] for line in (root / "lines.jsonl").read_text().splitlines()]
    held_out = set(range(len(texts))) - set(ordinals(plain))
    seen: set[str] = set()
    expected = [
        ordinal for ordinal, text in enumerate(texts)
        if ordinal not in held_out and len(text) >= 10 and not (text in seen or seen.add(text))
    ]  # fmt: skip
    assert ordinals(corpus) == expected
    block = corpus.train[0].read_rows(np.arange(corpus.train[0].num_rows))
    counts = [int((block.tokens_NC == corpus.tokenizer.special_id(token)).sum()) for token in SENTINELS]
    assert 0.5 * len(expected) < min(counts) <= max(counts) < 0.8 * len(expected)
    assert corpus.validation[0].directory == plain.validation[0].directory  # held-out text stays as it is
    again = prepare(config)
    assert again.train[0].directory == corpus.train[0].directory


def test_a_transform_may_apply_to_held_out_text_too(root):
    both = {"name": "length", "args": {"min_characters": 10}, "splits": ["train", "validation"]}
    corpus, plain = prepare(configuration(root, both)), prepare(configuration(root))
    assert corpus.validation[0].directory != plain.validation[0].directory
    assert corpus.sources[0].validation_report.documents < plain.sources[0].validation_report.documents
    verify(corpus)


def test_a_source_may_have_its_own(root):
    own = {"transforms": [{"name": "length", "args": {"max_characters": 10}}]}
    corpus = prepare(configuration(root, {"name": "length", "args": {"min_characters": 10}}, source=own))
    assert all(ordinal % 10 == 3 for ordinal in ordinals(corpus))
    none = prepare(configuration(root, {"name": "length", "args": {"min_characters": 10}}, source={"transforms": []}))
    assert none.train[0].directory == prepare(configuration(root)).train[0].directory


@pytest.mark.parametrize("how", ["staged", "serial"])
def test_the_pipeline_is_no_part_of_what_comes_out(root, how):
    transforms = (
        {"name": "near_duplicates", "args": {"threshold": 0.9}},
        {"name": "token_dropout", "args": {"fraction": 0.1}},
    )
    pytest.importorskip("datasketch")
    reference = prepare(configuration(root, *transforms)).sources[0].train_report
    pipeline = {"staged": False} if how == "serial" else {"tokenize_threads": 3, "filter_threads": 2, "queue_bytes": 1}
    other = configuration(
        root, *transforms, pipeline=pipeline,
        cache={"directory": str(root / how), "unit_bytes": 9_000},
    )  # fmt: skip
    assert prepare(other).sources[0].train_report.digest == reference.digest


def test_streamed_rows_are_the_cached_ones_and_their_stages_are_measured(root):
    transforms = ({"name": "exact_duplicates"}, {"name": "token_dropout", "args": {"fraction": 0.1}})
    cached = prepare(configuration(root, *transforms)).train[0]
    streamed = prepare(configuration(root, *transforms, mode="streaming"))
    try:
        reader = streamed.train[0]
        while reader.num_rows < cached.num_rows:
            reader = reader.refreshed(awaited_units=len(reader.units) + 1)
            time.sleep(0.01)
        rows = np.arange(cached.num_rows)
        assert np.array_equal(reader.read_rows(rows).tokens_NC, cached.read_rows(rows).tokens_NC)
        assert streamed.streams is not None
        metrics = streamed.streams.metrics()
        assert metrics["pipeline/tokenize/busy_seconds"] > 0
        assert all(metric(name).unit in {"s", "bytes", "items"} for name in metrics)
    finally:
        streamed.close()


def test_mistakes_are_found_before_a_byte_is_read(root):
    (root / "lines.jsonl").unlink()
    with pytest.raises(ConfigError, match="Unknown transform 'lengths'") as caught:
        prepare(configuration(root, {"name": "lengths"}))
    assert caught.value.where == "data.transforms.0.name"
    with pytest.raises(ConfigError, match="valid integer") as caught:
        prepare(configuration(root, source={"transforms": [{"name": "length", "args": {"min_characters": 1.5}}]}))
    assert caught.value.where == "data.sources.0.transforms.0.args.min_characters"


def test_sentinels_that_the_tokenizer_lacks_are_refused(root):
    config = configuration(root, {"name": "fill_in_the_middle", "args": {"middle": "<|hole|>"}})
    with pytest.raises(ConfigError, match=r"fill_in_the_middle needs the special token <\|hole\|>"):
        prepare(config)


def test_nothing_left_to_train_on_is_an_error(root):
    with pytest.raises(DataError, match="no text"):
        prepare(configuration(root, {"name": "length", "args": {"min_characters": 10**6}}))
