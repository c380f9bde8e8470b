"""Rotary frequencies scaled for longer contexts, as ``modeling_rope_utils`` of transformers computes them.

An engine computes the unscaled frequencies itself and scales them here, so that both engines rotate by equal angles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

RopeType = Literal["linear", "dynamic", "yarn", "llama3"]
FrequencyArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled. Fields that the type does not use are ``None``.

    Attributes:
        rope_type: ``linear`` divides all frequencies, ``llama3`` the low ones, ``yarn`` the low ones, with a ramp
            between rotations; ``dynamic`` divides none up to the model's longest row, and longer rows are refused.
        factor: By how much.
        original_max_positions_tokens: Longest row before scaling (``llama3``, ``yarn``).
        low_freq_factor: Wavelengths above original length / this are scaled fully (``llama3``).
        high_freq_factor: Wavelengths below original length / this are not scaled (``llama3``).
        beta_fast: Rotations over the original length above which a frequency is not scaled (``yarn``).
        beta_slow: Rotations below which it is scaled fully (``yarn``).
        attention_factor: Factor on cosines and sines; ``None`` derives it from ``factor`` (``yarn``).
        truncate: Whether the ends of the ramp are rounded outwards to whole dimensions (``yarn``).
    """

    rope_type: RopeType
    factor: float
    original_max_positions_tokens: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None


def scale_frequencies(
    frequencies: FrequencyArray, theta: float, scaling: RopeScaling | None
) -> tuple[FrequencyArray, float]:
    """Return scaled frequencies, and the factor on cosines and sines.

    Args:
        frequencies: Unscaled, one for each pair of rotated dimensions.
        theta: Their base.
        scaling: How to scale; ``None`` for not at all.
    """
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return _float32(frequencies / scaling.factor), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    factor = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return _yarn(frequencies, theta, scaling), factor if scaling.attention_factor is None else scaling.attention_factor


def _llama3(frequencies: FrequencyArray, scaling: RopeScaling) -> FrequencyArray:
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions_tokens
    assert low is not None
    assert high is not None
    assert length is not None
    rotations = length * frequencies.astype(np.float64) / (2 * math.pi)
    unscaled_share = np.clip((rotations - low) / (high - low), 0, 1)
    return _float32(frequencies * (unscaled_share + (1 - unscaled_share) / scaling.factor))


def _yarn(frequencies: FrequencyArray, theta: float, scaling: RopeScaling) -> FrequencyArray:
    fast, slow, length = scaling.beta_fast, scaling.beta_slow, scaling.original_max_positions_tokens
    assert fast is not None
    assert slow is not None
    assert length is not None
    width = 2 * len(frequencies)
    ends = [width * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (fast, slow)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
    low, high = max(low, 0), min(high, width - 1)
    ramp = (np.arange(len(frequencies)) - low) / (high - low if high != low else 0.001)
    scaled_share = np.clip(ramp, 0, 1)
    return _float32(frequencies * (1 - scaled_share + scaled_share / scaling.factor))


def _float32(values: npt.NDArray[np.floating]) -> FrequencyArray:
    return values.astype(np.float32)
