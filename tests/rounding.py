"""Rounding matrices to 8 and 4 bits in float64, as the oracle of quantisation.

Shape legend: R rows, I inputs, O outputs, G groups, S inputs of a group.
"""

from __future__ import annotations

import numpy as np


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to bf16: the 16 upper bits of fp32, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def round_int8(x_RI: np.ndarray) -> np.ndarray:
    """The largest magnitude of a row lies between two values, so its quotient is that of fp32 here too."""
    scale_R1 = (np.abs(x_RI).max(-1, keepdims=True) / np.float32(127.5)).astype(np.float32)
    values_RI = np.rint((x_RI * (np.float32(1) / scale_R1)).astype(np.float32))
    return np.clip(values_RI, -128, 127).astype(np.float64) * scale_R1


def round_int4(weight_OI: np.ndarray) -> np.ndarray:
    if weight_OI.shape[1] % 32:
        return weight_OI.astype(np.float64)
    groups_OGS = weight_OI.astype(np.float64).reshape(len(weight_OI), -1, 32)
    low_OG1, high_OG1 = groups_OGS.min(-1, keepdims=True), groups_OGS.max(-1, keepdims=True)
    scale_OG1 = bf16((high_OG1 - low_OG1) / 15)
    zero_OG1 = bf16(low_OG1 + 8 * scale_OG1)
    values_OGS = np.clip(np.rint((groups_OGS - zero_OG1) / scale_OG1), -8, 7)
    return (values_OGS * scale_OG1 + zero_OG1).reshape(weight_OI.shape)
