"""Pruned weights, against sorting and against every group of four by itself."""

from __future__ import annotations

import numpy as np
import pytest

from vorox.core.errors import ConfigError
from vorox.core.schema.model import ModelConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.pruning import Pruning, check_pruning, prune, zero_fraction
from vorox.models.weight_init import initial_weights


def spec_of(**fields: object) -> DecoderSpec:
    config = ModelConfig.model_validate({"num_layers": 2, "hidden_size": 32, "num_heads": 4, **fields})
    return decoder_spec(config, tokenizer_vocab_size=50, sequence_length_tokens=16)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_the_smallest_elements_of_each_matrix_are_zero(fraction: float) -> None:
    spec = spec_of()
    weights = dict(initial_weights(spec, seed=3))
    pruned = dict(prune(spec, weights.items(), Pruning.parse(f"magnitude:{fraction}")))
    kinds = {parameter.name: parameter.kind for parameter in spec.parameters}
    assert "matrix" in kinds.values()
    for name, array in pruned.items():
        if kinds[name] != "matrix":
            np.testing.assert_array_equal(array, weights[name], err_msg=name)
            continue
        kept = array != 0
        assert (~kept).sum() == round(fraction * array.size), name
        np.testing.assert_array_equal(array[kept], weights[name][kept], err_msg=name)
        assert np.abs(weights[name][~kept]).max() <= np.abs(array[kept]).min()
    assert zero_fraction(spec, weights.items()) == 0
    assert zero_fraction(spec, pruned.items()) == pytest.approx(fraction, abs=1e-3)


def test_two_of_four_consecutive_inputs_are_zero() -> None:
    spec = spec_of()
    weights = dict(initial_weights(spec, seed=3))
    name = next(parameter.name for parameter in spec.parameters if parameter.kind == "matrix")
    weights[name][0, :8] = [1, -2, 3, -4, 5, 5, 5, 5]  # equal magnitudes: the first ones
    pruned = dict(prune(spec, weights.items(), Pruning.parse("2:4")))
    np.testing.assert_array_equal(pruned[name][0, :8], [0, 0, 3, -4, 0, 0, 5, 5])
    for row, before in zip(pruned[name], weights[name], strict=True):
        for start in range(0, len(row), 4):
            four, original = row[start : start + 4], before[start : start + 4]
            assert np.count_nonzero(four) == 2
            assert sorted(np.abs(four[four != 0])) == sorted(np.abs(original))[2:]


def test_equal_magnitudes_are_pruned_to_the_exact_count() -> None:
    spec = spec_of()
    weights = {parameter.name: np.full(parameter.shape, -1, np.float32) for parameter in spec.parameters}
    pruned = prune(spec, weights.items(), Pruning.parse("magnitude:0.5"))
    assert zero_fraction(spec, pruned) == 0.5


@pytest.mark.parametrize("text", ["magnitude", "magnitude:0", "magnitude:1", "magnitude:x", "1:2", "random:0.5"])
def test_other_prunings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Unknown pruning"):
        Pruning.parse(text)


def test_inputs_that_four_does_not_divide_are_refused() -> None:
    spec = spec_of(hidden_size=18, num_heads=3, head_dim=4)
    check_pruning(spec, Pruning.parse("magnitude:0.5"))
    with pytest.raises(ConfigError, match="has 18 inputs"):
        check_pruning(spec, Pruning.parse("2:4"))
