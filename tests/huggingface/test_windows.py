"""Sliding windows shorter than the sequences: packed rows, training gradients and decoding, against transformers.

Losses within 1e-5 relative, logits within 2e-5, in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from huggingface.small_cases import CASES
from huggingface.test_engine import BACKENDS, engine_of, transformers_logits
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.core.engine import Engine
from vorox.models.arrays.weights_file import open_directory
from vorox.models.huggingface.weights import from_huggingface

pytestmark = [pytest.mark.hf, pytest.mark.torch]
LENGTHS = (24, 5, 17, 14)
"""Documents of a packed row of 64 positions; the rest is padding. Windows are of 9 to 12 positions."""
MODELS = pytest.mark.parametrize("name", ["mistral", "qwen2-windows", "phi3-partial", "olmo2", "gemma3-scaled"])


def packed(documents: list[np.ndarray], length: int = 64) -> Batch:
    tokens, labels, segments, positions = (np.zeros((1, 1, length), np.int32) for _ in range(4))
    labels[:] = IGNORED_LABEL
    start = 0
    for index, document in enumerate(documents):
        end = start + len(document)
        tokens[0, 0, start:end], labels[0, 0, start : end - 1] = document, document[1:]
        segments[0, 0, start:end], positions[0, 0, start:end] = index + 1, np.arange(len(document))
        start = end
    count = int((labels != IGNORED_LABEL).sum())
    return Batch(0, tokens, labels, segments, positions, np.zeros((1, 1), np.uint64), count, DataCursor("", 0, 1, 0, 0))


def imported(
    name: str, backend: Any, random_model: Callable[..., Any], place: Path, **runtime: Any
) -> tuple[Any, Engine]:
    model = random_model(deepcopy(dict(CASES[name])) | {"bos_token_id": 1, "eos_token_id": 1}, seed=21)
    model.save_pretrained(place)
    spec, engine = engine_of(json.loads((place / "config.json").read_text()), 7, backend, **runtime)
    engine.import_weights(from_huggingface(spec, (pair for file in open_directory(place) for pair in file)))
    return model, engine


def cross_entropy(model: Any, document: np.ndarray) -> float:
    logits = transformers_logits(model, document[None, :-1]).astype(np.float64)[0]
    peak = logits.max(-1, keepdims=True)
    logs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    return -float(logs[np.arange(len(logs)), document[1:]].sum())


@MODELS
@BACKENDS
def test_a_packed_row_is_its_documents_alone(
    backend: str, name: str, random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model, engine = imported(name, backend, random_model, tmp_path)
    generator = np.random.default_rng()
    documents = [generator.integers(0, 97, length).astype(np.int32) for length in LENGTHS]
    alone = sum(cross_entropy(model, document) for document in documents)
    assert engine.eval_step(packed(documents)).loss_sum == pytest.approx(alone, rel=1e-5)
    batch = packed(documents)
    trained = engine.train_step(batch, lr=0.0, weight_decay=0.0)
    assert float(trained.fetch().loss) == pytest.approx(alone / batch.num_target_tokens, rel=1e-5)


@MODELS
@BACKENDS
def test_decoding_equals_whole_sequences_beyond_the_window(
    backend: str, name: str, random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model, engine = imported(name, backend, random_model, tmp_path)
    tokens = np.random.default_rng().integers(0, 97, (2, 64)).astype(np.int32)
    whole, theirs = engine.logits(tokens), transformers_logits(model, tokens)
    assert theirs.std() > 0.5, "the comparison would be trivial"
    decoder, start = engine.decoder(2, 64), 0
    for length in (3, 1, 20, 1, 1, 7, 30, 1):
        start += length
        logits = decoder.feed(tokens[:, start - length : start])
        assert np.abs(logits - whole[:, start - 1]).max() <= 2e-5 * max(1, np.abs(whole).max())
        assert np.abs(logits - theirs[:, start - 1]).max() <= 2e-5 * max(1, np.abs(whole).max())
    assert start == 64


@pytest.mark.jax
@pytest.mark.parametrize("name", ["qwen2-windows", "gemma3"])
def test_scanned_layers_have_their_windows(name: str, random_model: Callable[..., Any], tmp_path: Path) -> None:
    model, engine = imported(name, "jax", random_model, tmp_path, scan_layers=True)
    tokens = np.random.default_rng().integers(0, 97, (2, 64)).astype(np.int32)
    assert np.abs(engine.logits(tokens) - transformers_logits(model, tokens)).max() <= 1e-4


@pytest.mark.parametrize("name", ["mistral", "qwen2-windows", "qwen3-windows", "phi3-partial"])
def test_another_window_is_seen(name: str, random_model: Callable[..., Any], tmp_path: Path) -> None:
    """The bounds above are sharp: one position more or less changes the logits."""
    model, _ = imported(name, "torch", random_model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = np.random.default_rng(3).integers(0, 97, (2, 64)).astype(np.int32)
    theirs = transformers_logits(model, tokens)
    for change in (-1, 1):
        spec, engine = engine_of(config | {"sliding_window": config["sliding_window"] + change}, 7)
        engine.import_weights(from_huggingface(spec, (pair for file in open_directory(tmp_path) for pair in file)))
        assert np.abs(engine.logits(tokens) - theirs).max() > 1e-2
