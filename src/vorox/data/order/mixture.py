"""Exact mixing of sources by rational weights, in stages: the source of each draw, and its inverse.

``mix/1``: the sources are the leaves of a weight-balanced binary tree. Of the first k draws that reach a node,
``k * left weight / weight`` go left, rounded to the nearest integer, halves up. All arithmetic is in integers, without
tables or random numbers, so nothing drifts: counts are exact at every multiple of the common denominator, stay within
two draws of the exact share in between (1.25 measured), and each draw resolves in O(log sources) in both directions.

A mixture may change during a run. A *stage* continues each source's count of draws from earlier stages (its *base*), so
a source continues with its next row however the weights changed. Both directions use the mixture's closed form and one
binary search over the stages. A single stage over all sources equals the mixture itself.

Invariant: the result for given weights, in their order, never changes. Plans record the name.

Shape legend: G stages, S sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError

NAME = "mix/1"

Draws = npt.NDArray[np.int64]
_Integers = npt.NDArray[Any]  # int64, or Python's integers
NEVER = 2**62
"""The position of a draw that is never reached."""
_NONE = -1
_LARGEST_INT64_PERIOD = 2**30


class Mixture:
    """Sources mixed by exact weights.

    Args:
        weights: Weight of each source, up to a common factor; all above zero.

    Raises:
        ConfigError: The list is empty, or a weight is not above zero.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        if not weights:
            raise ConfigError("The mixture has no source", where="data.sources")
        for index, weight in enumerate(weights):
            if weight <= 0:
                raise ConfigError(
                    f"The weight {weight} is not above zero", where=f"data.sources.{index}.weight",
                    hint="remove the source instead",
                )  # fmt: skip
        scale = math.lcm(*(weight.denominator for weight in weights))
        shares = [int(weight * scale) for weight in weights]
        divisor = math.gcd(*shares)
        self.shares: tuple[int, ...] = tuple(share // divisor for share in shares)
        """The weights as the smallest integers in the same proportion."""
        self.period = sum(self.shares)
        """Number of draws after which all counts are exact: the sum of ``shares``."""
        # Products below stay under 2 * period * (period + 1). Beyond int64, numpy computes with Python integers.
        self._dtype: npt.DTypeLike = np.int64 if self.period <= _LARGEST_INT64_PERIOD else np.object_
        self._build_tree()

    def locate(self, draws: Draws) -> tuple[npt.NDArray[np.int32], Draws]:
        """Return the source of each draw, and its index among the draws of that source."""
        node = np.zeros(draws.shape, np.int32)
        nth: _Integers = draws.astype(self._dtype)
        inner = np.flatnonzero(self._left_child[node] != _NONE)
        while inner.size:
            at, k = node[inner], nth[inner]
            total, left_weight = self._weight[at], self._weight[self._left_child[at]]
            before = _go_left(k, left_weight, total)
            goes_left = _go_left(k + 1, left_weight, total) != before
            nth[inner] = np.where(goes_left, before, k - before)
            node[inner] = np.where(goes_left, self._left_child[at], self._right_child[at])
            inner = inner[self._left_child[node[inner]] != _NONE]
        return self._source[node], nth.astype(np.int64)

    def invert(self, source_index: npt.NDArray[np.int32], source_draw: Draws) -> Draws:
        """Return the draw with the given index among the draws of each source: the inverse of ``locate``."""
        node = self._leaf[source_index]
        nth: _Integers = source_draw.astype(self._dtype)
        inner = np.flatnonzero(node != 0)
        while inner.size:
            at, q = node[inner], nth[inner]
            parent = self._parent[at]
            total, weight = self._weight[parent], self._weight[at]
            # The first k whose successor's count is q + 1, from the inequality of rounding on either side.
            whole, middle = q // weight * total, (2 * (q % weight) + 1) * total
            from_left = whole - (-middle // (2 * weight)) - 1
            from_right = whole + middle // (2 * weight)
            nth[inner] = np.where(self._left_child[parent] == at, from_left, from_right)
            node[inner] = parent
            inner = inner[parent != 0]
        return nth.astype(np.int64)

    def counts(self, num_draws: int) -> tuple[int, ...]:
        """Return the number of draws of each source among the first ``num_draws``."""
        reaching = {0: num_draws}
        for node in range(len(self._weight)):  # parents come before their children
            left, right = int(self._left_child[node]), int(self._right_child[node])
            if left != _NONE:
                total = int(self._weight[node])
                reaching[left] = (2 * reaching[node] * int(self._weight[left]) + total) // (2 * total)
                reaching[right] = reaching[node] - reaching[left]
        return tuple(reaching[int(leaf)] for leaf in self._leaf)

    def _build_tree(self) -> None:
        """Build the tree: heaviest sources first, each group split as close to half as possible; the root is node 0."""
        order = sorted(range(len(self.shares)), key=lambda source: (-self.shares[source], source))
        groups, parents, sources = [order], [_NONE], list[int]()
        children: list[tuple[int, int]] = []
        for node, group in enumerate(groups):  # the loop appends to groups
            sources.append(group[0] if len(group) == 1 else _NONE)
            children.append((_NONE, _NONE))
            if len(group) > 1:
                cut = _nearest_half([self.shares[source] for source in group])
                children[node] = (len(groups), len(groups) + 1)
                groups += [group[:cut], group[cut:]]
                parents += [node, node]
        self._weight: _Integers = np.array([sum(self.shares[s] for s in group) for group in groups], self._dtype)
        self._parent = np.array(parents, np.int32)
        self._left_child, self._right_child = np.array(children, np.int32).T
        self._source = np.array(sources, np.int32)
        self._leaf = np.array([sources.index(source) for source in range(len(self.shares))], np.int32)


def _nearest_half(shares: list[int]) -> int:
    """Return the first split index that makes the two sums as equal as possible."""
    total, left, best, best_gap = sum(shares), 0, 1, sum(shares)
    for cut, share in enumerate(shares[:-1], 1):
        left += share
        if abs(total - 2 * left) < best_gap:
            best, best_gap = cut, abs(total - 2 * left)
    return best


def _go_left(k: _Integers, left_weight: _Integers, total: _Integers) -> _Integers:
    """Compute ``floor(k * left_weight / total + 1/2)`` without the large product."""
    return k // total * left_weight + (2 * (k % total) * left_weight + total) // (2 * total)


@dataclass(frozen=True, slots=True)
class MixtureStage:
    """The mixture that applies from a position onwards.

    Attributes:
        start_position: First position (and draw) of the stage; 0 for the first stage.
        weights: Weight of each sampled source, by index; other sources are paused.
        row_pieces: Number of pieces that stored rows are split into, each of T / row_pieces positions.
    """

    start_position: int
    weights: Mapping[int, Fraction]
    row_pieces: int = 1

    def is_like(self, other: MixtureStage) -> bool:
        """Return whether both stages have the same shares and row pieces; their positions may differ."""
        mine, theirs = sum(self.weights.values()), sum(other.weights.values())
        shares = {source: weight / mine for source, weight in self.weights.items()}
        return self.row_pieces == other.row_pieces and shares == {
            source: weight / theirs for source, weight in other.weights.items()
        }


class MixtureStages:
    """The mixture over consecutive stages.

    Args:
        stages: The stages in ascending order; the first starts at 0.
        num_sources: Number of sources, sampled or not.

    Raises:
        ConfigError: A stage has no source, or a weight that is not above zero.
    """

    def __init__(self, stages: Sequence[MixtureStage], num_sources: int) -> None:
        starts = [stage.start_position for stage in stages]
        assert starts[:1] == [0], "the first stage starts at 0"
        assert starts == sorted(set(starts)), "stages are in ascending order"
        self.stages = tuple(stages)
        mixtures, active = list[Mixture](), list[npt.NDArray[np.int32]]()
        for stage in stages:
            if not stage.weights:
                raise ConfigError("A stage has no source", where="data.stages", hint="give it at least one weight")
            sources = sorted(stage.weights)
            mixtures.append(Mixture([stage.weights[source] for source in sources]))
            active.append(np.array(sources, np.int32))
        self._mixtures, self._active = tuple(mixtures), tuple(active)
        self._starts = np.array(starts, np.int64)
        self._bases_GS = np.zeros((len(stages), num_sources), np.int64)
        for index in range(1, len(stages)):
            counts = self._mixtures[index - 1].counts(starts[index] - starts[index - 1])
            self._bases_GS[index] = self._bases_GS[index - 1]
            self._bases_GS[index, self._active[index - 1]] += np.array(counts, np.int64)
        self._is_one = len(stages) == 1 and len(self._active[0]) == num_sources

    def stage_at(self, position: int) -> MixtureStage:
        """Return the stage in force at a position."""
        return self.stages[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def locate(self, draws: Draws) -> tuple[npt.NDArray[np.int32], Draws]:
        """Return the source of each draw, and its index among the draws of that source."""
        if self._is_one:
            return self._mixtures[0].locate(draws)
        source_index, source_draw = np.empty(draws.shape, np.int32), np.empty(draws.shape, np.int64)
        stage_of = np.searchsorted(self._starts, draws, side="right") - 1
        for stage in map(int, np.unique(stage_of)):
            here = np.flatnonzero(stage_of == stage)
            local, nth = self._mixtures[stage].locate(draws[here] - self._starts[stage])
            source_index[here] = self._active[stage][local]
            source_draw[here] = nth + self._bases_GS[stage][source_index[here]]
        return source_index, source_draw

    def invert(self, source_index: npt.NDArray[np.int32], source_draw: Draws) -> Draws:
        """Return the draw with the given index among the draws of each source, or ``NEVER``: inverse of ``locate``."""
        if self._is_one:
            return self._mixtures[0].invert(source_index, source_draw)
        draws = np.full(source_draw.shape, NEVER, np.int64)
        for source in map(int, np.unique(source_index)):
            mine = np.flatnonzero(source_index == source)
            # Among stages with equal bases, only the last can sample the source.
            stage_of = np.searchsorted(self._bases_GS[:, source], source_draw[mine], side="right") - 1
            for stage in map(int, np.unique(stage_of)):
                local = int(np.searchsorted(self._active[stage], source))
                if local == len(self._active[stage]) or self._active[stage][local] != source:
                    continue
                here = mine[stage_of == stage]
                nth = source_draw[here] - self._bases_GS[stage, source]
                found = self._mixtures[stage].invert(np.full(here.shape, local, np.int32), nth)
                draws[here] = found + self._starts[stage]
        return draws

    def counts(self, num_draws: int) -> tuple[int, ...]:
        """Return the number of draws of each source among the first ``num_draws``."""
        stage = int(np.searchsorted(self._starts, max(0, num_draws - 1), side="right")) - 1
        counts = self._bases_GS[stage].copy()
        counts[self._active[stage]] += np.array(self._mixtures[stage].counts(num_draws - int(self._starts[stage])))
        return tuple(counts.tolist())
