"""How a stored weight divides into matrices: experts in a stack, transposed storage, fused projections.

A matrix is ``[out, in]``: it maps ``in`` inputs to ``out`` outputs. A stored weight is one of them in the native
decoder. In transformers it may be a stack (one matrix for each expert), transposed (GPT-2's Conv1D), or fused (query,
key and value; gate and up). Muon and pruning act on each matrix alone; their results do not depend on how a library
stores it.

Shape legend: C matrices in the stack, O outputs, I inputs, G groups of fused outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The matrices of a stored weight.

    Attributes:
        count: Matrices in the stack; the first dimension, or equal ranges of it.
        is_transposed: Whether each is stored as ``[in, out]``.
        parts: Outputs of each fused projection. Outputs repeat this pattern: ``(1, 1)`` interleaves two projections,
            ``(d, d, d)`` with heads of width d stores query, key and value head by head. Empty: one projection.
    """

    count: int = 1
    is_transposed: bool = False
    parts: tuple[int, ...] = ()

    def shapes(self, stored: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shape ``(out, in)`` of every matrix."""
        first, last = prod(stored[:-1]) // self.count, stored[-1]
        outputs, inputs = (last, first) if self.is_transposed else (first, last)
        parts = self.parts or (outputs,)
        return [(outputs * part // sum(parts), inputs) for _ in range(self.count) for part in parts]

    def split(self, stored: Any) -> list[Any]:
        """Return the stack of each projection, ``[C, O, I]``, of an array or tensor; views where possible."""
        matrices_COI = stored.reshape(self.count, -1, stored.shape[-1])
        if self.is_transposed:
            matrices_COI = matrices_COI.swapaxes(1, 2)
        if not self.parts:
            return [matrices_COI]
        inputs = matrices_COI.shape[-1]
        grouped_CGOI = matrices_COI.reshape(self.count, -1, sum(self.parts), inputs)
        ends = list(accumulate(self.parts))
        return [
            grouped_CGOI[:, :, end - size : end].reshape(self.count, -1, inputs)
            for end, size in zip(ends, self.parts, strict=True)
        ]

    def join(
        self, parts_COI: Sequence[Any], stored: Sequence[int], concatenate: Callable[..., Any] = np.concatenate
    ) -> Any:
        """Undo ``split``.

        Args:
            parts_COI: The stack of each projection.
            stored: Shape of the stored weight.
            concatenate: The function of the arrays' library.
        """
        joined_COI = parts_COI[0]
        if self.parts:
            inputs = parts_COI[0].shape[-1]
            grouped = [
                part.reshape(self.count, -1, size, inputs) for part, size in zip(parts_COI, self.parts, strict=True)
            ]
            joined_COI = concatenate(grouped, 2).reshape(self.count, -1, inputs)
        if self.is_transposed:
            joined_COI = joined_COI.swapaxes(1, 2)
        return joined_COI.reshape(tuple(stored))


PLAIN_MATRIX = MatrixLayout()
