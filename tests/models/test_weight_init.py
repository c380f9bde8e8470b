"""Initial weights: the distribution that the table asks for, and streams that depend on name and seed alone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vorox.core.schema.model import ModelConfig
from vorox.models import weight_init
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.weight_init import initial_weights


def spec_of(num_layers: int = 2, **fields: object) -> DecoderSpec:
    config = ModelConfig.model_validate({"num_layers": num_layers, "hidden_size": 64, "num_heads": 4, **fields})
    return decoder_spec(config, tokenizer_vocab_size=500, sequence_length_tokens=32)


def test_every_parameter_once_in_order_with_its_distribution() -> None:
    spec = spec_of(attention_bias=True, init_std=0.05)
    found = list(initial_weights(spec, 3))
    assert [name for name, _ in found] == [row.name for row in spec.parameters]
    for row, (name, array) in zip(spec.parameters, found, strict=True):
        assert array.dtype == np.float32
        assert array.shape == row.shape
        if row.init != "normal":
            assert np.array_equal(array, np.full(row.shape, 1.0 if row.init == "ones" else 0.0, np.float32)), name
            continue
        assert abs(float(array.std()) / row.std - 1) < 0.05, name
        assert abs(float(array.mean())) < 5 * row.std / np.sqrt(array.size), name
        inside = float((np.abs(array) < row.std).mean())
        assert abs(inside - 0.6827) < 0.02, f"{name} is not normal"


def test_a_parameter_does_not_depend_on_the_others() -> None:
    small, large = dict(initial_weights(spec_of(2), 3)), dict(initial_weights(spec_of(4, tie_embeddings=False), 3))
    for name, array in small.items():
        if "output" not in name and "down" not in name:  # their scale depends on the depth
            assert np.array_equal(array, large[name]), name


def test_names_and_seeds_have_streams_of_their_own() -> None:
    first, other = dict(initial_weights(spec_of(), 3)), dict(initial_weights(spec_of(), 4))
    assert not np.array_equal(first["embedding.weight"], other["embedding.weight"])
    query, key = first["blocks.0.attention.query.weight"], first["blocks.0.attention.key.weight"]
    assert abs(np.corrcoef(query.ravel(), key.ravel())[0, 1]) < 0.1
    assert all(np.array_equal(array, first[name]) for name, array in initial_weights(spec_of(), 3))


def test_what_waits_is_bounded_and_what_is_not_needed_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are those of one parameter at a time, with any bound; a reader that stops early stops the threads."""
    spec = spec_of()
    expected = [(row.name, weight_init._sample(row, 3, np.empty(row.shape, np.float32))) for row in spec.parameters]
    given: dict[str, weight_init.Array] = {}

    class Recording(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            row, _, values = args
            given[row.name] = values
            return super().submit(fn, *args, **kwargs)

    monkeypatch.setattr(weight_init, "ThreadPoolExecutor", Recording)
    monkeypatch.setattr(weight_init, "usable_cores", lambda: 2)
    largest = max(4 * row.num_elements for row in spec.parameters)
    for bound in (0, largest, 1 << 30):
        monkeypatch.setattr(weight_init, "AHEAD_BYTES", bound)
        given.clear()
        weights = weight_init.initial_weights(spec, 3)
        first = next(weights)
        np.testing.assert_array_equal(first[1], expected[0][1])
        if bound == 0:
            assert list(given) == [expected[0][0]], "one at a time"
        assert len(given) <= 3, "one for each thread beside the one that is read"
        for (name, found), (wanted, values) in zip(weights, expected[1:], strict=True):
            assert name == wanted
            assert found is given[name], "threads fill what the reader has allocated"
            np.testing.assert_array_equal(found, values)
    monkeypatch.setattr(weight_init, "AHEAD_BYTES", 0)
    given.clear()
    weights = weight_init.initial_weights(spec, 3)
    next(weights)
    weights.close()
    assert len(given) == 1
