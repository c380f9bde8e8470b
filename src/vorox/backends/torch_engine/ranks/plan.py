"""The plan of a parallel axis as data: which parameter the ranks of a group divide, and which way.

A model hands over its plan: the native decoder by the logical axes of its parameters (``decoder_plan.py``), a
transformers model by the plan that the library has for it (``module_plan.py``). Everything else follows from it and is
written once: the shapes of a rank's share (``ParallelPlan.share``), the layers that compute with it
(``divided_layers.py``), and its place in whole parameters, for initial weights, norms, fingerprints and checkpoints
(``divided_parameters.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from vorox.backends.torch_engine.ranks.rank_group import RankGroup
from vorox.core.errors import ConfigError
from vorox.models.spec import ParameterSpec


class Style(Enum):
    """How a parameter is divided. Matrices are ``[out, in]``.

    ``PER_HEAD`` is whole on every rank, which applies it to its heads, so its gradient is a part. ``COLWISE`` has a
    part of the outputs of a layer, ``ROWWISE`` of its inputs. ``VOCABULARY`` has a part of the tokens of an embedding
    or head, which may be unequal, ``EXPERTS`` some experts of a stack ``[experts, ...]``.
    """

    WHOLE = "whole"
    PER_HEAD = "per head"
    COLWISE = "colwise"
    ROWWISE = "rowwise"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"


_DIMS = {Style.COLWISE: 0, Style.ROWWISE: 1, Style.VOCABULARY: 0, Style.EXPERTS: 0}


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How the ranks of a group divide the parameters of a model.

    Attributes:
        styles: Canonical name to style.
        holders: Canonical name to the ranks of the group that alone have a parameter, all of it. The first one counts
            it in norms and writes it to checkpoints, as the first rank of the group does for those that all have.
    """

    styles: Mapping[str, Style]
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def dim(self, name: str) -> int | None:
        """Return the dimension of a parameter that is divided; ``None`` for none."""
        return _DIMS.get(self.styles[name])

    def is_divided(self, name: str) -> bool:
        """Whether a rank does not have all of a parameter that another one has."""
        return self.dim(name) is not None or name in self.holders

    def owner(self, name: str) -> int:
        """Return the rank of the group that counts a parameter which is not divided."""
        return self.holders[name][0] if name in self.holders else 0

    def share(self, table: Sequence[ParameterSpec], group: RankGroup) -> tuple[ParameterSpec, ...]:
        """Return the parameters of this rank, with their shapes here.

        Raises:
            ConfigError: A dimension does not divide.
        """
        found: list[ParameterSpec] = []
        for row in table:
            if group.index not in self.holders.get(row.name, (group.index,)):
                continue
            dim = self.dim(row.name)
            if dim is not None:
                num, count = row.shape[dim], group.range_of(row.shape[dim])[1]
                if (num % group.size and self.styles[row.name] != Style.VOCABULARY) or count == 0:
                    kind = "columns" if dim else "rows"
                    raise not_divisible(f"{row.name} has {num:,} {kind}, which {group.size} ranks cannot divide")
                row = replace(row, shape=(*row.shape[:dim], count, *row.shape[dim + 1 :]))
            found.append(row)
        return tuple(found)


def not_divisible(what: str) -> ConfigError:
    """Return the error for a model that tensor parallelism cannot divide."""
    return ConfigError(
        what, where="parallel.tensor_parallel_size",
        hint="set parallel.tensor_parallel_size=1 and use data_parallel_size and fsdp_size",
    )  # fmt: skip
