"""Round matrices to 8 or 4 bits, for ``vorox compress`` and quantisation-aware training.

*int8* is torchao's ``Int8Tensor``: symmetric, a scale per row. *int4* is torchao's ``Int4Tensor`` for bf16 activations:
a scale and a zero point per group of 32 inputs, both in bf16.

Shape legend: R rows, I inputs, O outputs, G groups of inputs, S inputs of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_INPUTS = 32
_INT8_STEPS, _INT4_STEPS = 255, 15
_INT8_RANGE, _INT4_RANGE = (-128, 127), (-8, 7)
_MIN_SCALE = torch.finfo(torch.float32).eps


class Int4Matrix(NamedTuple):
    """A matrix in 4 bits: element = value * scale + zero point.

    Attributes:
        values_OI: int8, from -8 to 7.
        scale_OG: bf16.
        zero_OG: bf16.
    """

    values_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor


def round_int8(x_RI: Tensor) -> Tensor:
    """Return rows with their elements rounded to 8 bits, in the given dtype, bit for bit as torchao."""
    scale_R1 = (x_RI.abs().amax(-1, keepdim=True) / (_INT8_STEPS / 2)).clamp(min=_MIN_SCALE).float()
    values_RI = (x_RI * (1.0 / scale_R1)).round().clamp(*_INT8_RANGE)
    return (values_RI * scale_R1).to(x_RI.dtype)


def has_int4_groups(weight_OI: Tensor) -> bool:
    """Whether the inputs of a matrix divide into groups; int4 leaves other matrices as they are."""
    return weight_OI.shape[-1] % GROUP_INPUTS == 0


def quantize_int4(weight_OI: Tensor) -> Int4Matrix:
    """Quantise a matrix to 4 bits; the smallest and the largest element of a group get the values -8 and 7."""
    groups_OGS = weight_OI.float().unflatten(-1, (-1, GROUP_INPUTS))
    low_OG, high_OG = groups_OGS.amin(-1), groups_OGS.amax(-1)
    scale_OG = ((high_OG - low_OG) / _INT4_STEPS).clamp(min=_MIN_SCALE).bfloat16()
    zero_OG = (low_OG - _INT4_RANGE[0] * scale_OG.float()).bfloat16()
    values_OGS = (groups_OGS - zero_OG.float()[..., None]) / scale_OG.float()[..., None]
    return Int4Matrix(values_OGS.round().clamp(*_INT4_RANGE).to(torch.int8).flatten(-2), scale_OG, zero_OG)


def dequantize_int4(matrix: Int4Matrix) -> Tensor:
    """Return the elements, ``[O, I]`` in fp32."""
    values_OGS = matrix.values_OI.unflatten(-1, (-1, GROUP_INPUTS)).float()
    return (values_OGS * matrix.scale_OG.float()[..., None] + matrix.zero_OG.float()[..., None]).flatten(-2)


def round_int4(weight_OI: Tensor) -> Tensor:
    """Return a matrix with its elements rounded to 4 bits, in the given dtype."""
    return dequantize_int4(quantize_int4(weight_OI)).to(weight_OI.dtype)
