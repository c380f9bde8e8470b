"""Prune weights: set the smallest elements of the matrices in the blocks to zero.

*magnitude:F* zeroes the fraction F of each matrix, also of every expert and every fused projection. *2:4* zeroes two of
every four consecutive inputs of an output, the pattern that sparse tensor cores multiply. Embeddings, norms, biases,
routers and the head keep their values.

Shape legend: O rows (outputs), I columns (inputs) of a matrix, G groups of four inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.models.spec import ModelSpec, ParameterSpec

_GROUP, _KEPT = 4, 2


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which elements of a matrix are zeroed.

    Attributes:
        fraction: Fraction of each matrix.
        is_structured: Whether it is 2:4.
    """

    fraction: float
    is_structured: bool = False

    @classmethod
    def parse(cls, text: str) -> Pruning:
        """Parse ``magnitude:F`` or ``2:4``.

        Raises:
            ConfigError: It is neither, or F is not between 0 and 1.
        """
        if text == "2:4":
            return cls(_KEPT / _GROUP, is_structured=True)
        kind, _, value = text.partition(":")
        try:
            fraction = float(value)
        except ValueError:
            fraction = 0.0
        if kind != "magnitude" or not 0 < fraction < 1:
            raise ConfigError(
                f"Unknown pruning {text!r}", where="--prune", hint="write magnitude:0.5 (between 0 and 1) or 2:4"
            )
        return cls(fraction)

    def __str__(self) -> str:
        return "2:4" if self.is_structured else f"magnitude:{self.fraction:g}"


def pruned_matrices(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return the parameters that pruning changes: the matrices in the blocks."""
    return tuple(parameter for parameter in spec.parameters if parameter.kind == "matrix")


def check_pruning(spec: ModelSpec, pruning: Pruning) -> None:
    """Check that a model has matrices to prune.

    Raises:
        ConfigError: It has none, or 2:4 does not divide the inputs of one.
    """
    matrices = pruned_matrices(spec)
    if not matrices:
        raise ConfigError("Model has no linear layer to prune", where="--prune", hint="its layers are of other kinds")
    odd = [(row.name, inputs) for row in matrices for _, inputs in row.matrix_shapes if inputs % _GROUP]
    if pruning.is_structured and odd:
        raise ConfigError(
            f"{odd[0][0]} has {odd[0][1]} inputs, which 2:4 cannot divide into groups of {_GROUP}",
            where="--prune", hint="prune by magnitude:0.5",
        )  # fmt: skip


def prune(spec: ModelSpec, weights: Iterable[NamedArray], pruning: Pruning) -> Iterator[NamedArray]:
    """Yield weights with pruned matrices; other parameters are passed on."""
    layouts = {row.name: row.layout for row in pruned_matrices(spec)}
    function = _prune_groups if pruning.is_structured else _prune_smallest
    for name, array in weights:
        layout = layouts.get(name)
        if layout is None:
            yield name, array
            continue
        stacks = [np.stack([function(one_OI, pruning.fraction) for one_OI in stack]) for stack in layout.split(array)]
        yield name, np.ascontiguousarray(layout.join(stacks, array.shape))


def zero_fraction(spec: ModelSpec, weights: Iterable[NamedArray]) -> float:
    """Return the fraction of the elements of all matrices in the blocks that are zero."""
    names = {matrix.name for matrix in pruned_matrices(spec)}
    counts = [(array.size - np.count_nonzero(array), array.size) for name, array in weights if name in names]
    return sum(zeros for zeros, _ in counts) / max(1, sum(size for _, size in counts))


def _prune_smallest(array_OI: npt.NDArray[np.float32], fraction: float) -> npt.NDArray[np.float32]:
    """Zero a fraction of the elements, rounded; of equal magnitudes the first."""
    magnitudes = np.abs(array_OI).reshape(-1)
    count = round(fraction * magnitudes.size)
    if not count:
        return array_OI
    threshold = np.partition(magnitudes, count - 1)[count - 1]
    zeroed = magnitudes < threshold
    equal = np.flatnonzero(magnitudes == threshold)
    zeroed[equal[: count - int(zeroed.sum())]] = True
    return np.where(zeroed.reshape(array_OI.shape), np.float32(0), array_OI)


def _prune_groups(array_OI: npt.NDArray[np.float32], fraction: float) -> npt.NDArray[np.float32]:
    """Zero the two smallest of every four consecutive inputs; of equal magnitudes the first."""
    del fraction
    groups_G4 = array_OI.reshape(-1, _GROUP).copy()
    order_G4 = np.argsort(np.abs(groups_G4), axis=1, kind="stable")
    np.put_along_axis(groups_G4, order_G4[:, : _GROUP - _KEPT], np.float32(0), axis=1)
    return groups_G4.reshape(array_OI.shape)
