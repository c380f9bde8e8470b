"""A mixture that changes during a run: consecutive stages of exact weights, in closed form.

A stage continues each source's count of draws from earlier stages (its *base*), so a source continues with its next
row however the weights changed. Both directions use the mixture's closed form and one binary search over the stages.
A single stage over all sources equals the mixture itself.

Shape legend: G stages, S sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError
from vorox.data.mixture import Draws, Mixture

NEVER = 2**62
"""The position of a draw that is never reached."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The mixture that applies from a position onwards.

    Attributes:
        start_position: First position (and draw) of the stage; 0 for the first stage.
        weights: Weight of each sampled source, by index; other sources are paused.
        row_pieces: Number of pieces that stored rows are split into, each of T / row_pieces positions.
    """

    start_position: int
    weights: Mapping[int, Fraction]
    row_pieces: int = 1

    def is_like(self, other: Stage) -> bool:
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

    def __init__(self, stages: Sequence[Stage], num_sources: int) -> None:
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

    def stage_at(self, position: int) -> Stage:
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
