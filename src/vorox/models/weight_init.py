"""The weights that training starts from: a pure function of (spec, seed), the same for every engine.

Each parameter has a stream of its own, keyed by its canonical name, so neither the order of the table nor the presence
of other parameters changes it. Values are drawn in fp32 by numpy's Philox.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from vorox.core.atomic import canonical_json
from vorox.core.engine import NamedArray
from vorox.models.spec import ModelSpec, ParameterSpec


def initial_weights(spec: ModelSpec, seed: int) -> Iterator[NamedArray]:
    """All parameters of a fresh model, in table order, one at a time."""
    for parameter in spec.parameters:
        yield parameter.name, _draw(parameter, seed)


def _draw(parameter: ParameterSpec, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if parameter.init == "ones":
        return np.ones(parameter.shape, np.float32)
    if parameter.init == "zeros":
        return np.zeros(parameter.shape, np.float32)
    key = xxhash.xxh3_128_intdigest(canonical_json(["initial weights", 1, seed, parameter.name]))
    generator = np.random.Generator(np.random.Philox(key=key))
    values = generator.standard_normal(parameter.shape, dtype=np.float32)
    values *= np.float32(parameter.std)
    return values
