"""Optimizer groups: the update rule and learning rate of every parameter, for both engines.

In: the parameter table and ``optimizer.groups``. Out: a ``Group`` by canonical name. Parameters of one group share a
rule (AdamW with or without weight decay, or Muon) and a factor of the learning rate. Frozen parameters are constants:
without gradient and optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema import OptimizerConfig
from vorox.models.spec import ModelSpec, ParameterSpec

_EXAMPLES = 3
"""Names in the error about a pattern that matches nothing."""


class Group(NamedTuple):
    """Parameters that are updated alike.

    Attributes:
        rule: ``decayed`` or ``plain`` (AdamW with or without weight decay), ``orthogonal`` (Muon) or ``frozen``.
        lr_scale: Factor of the learning rate.
    """

    rule: str
    lr_scale: float = 1.0

    @property
    def is_frozen(self) -> bool:
        return self.rule == FROZEN.rule


DECAYED, PLAIN, ORTHOGONAL, FROZEN = (Group(rule) for rule in ("decayed", "plain", "orthogonal", "frozen"))
_ORDER = [group.rule for group in (DECAYED, PLAIN, ORTHOGONAL, FROZEN)]


def optimizer_groups(spec: ModelSpec, config: OptimizerConfig) -> dict[str, Group]:
    """Return the group of every parameter by name, in table order.

    Matrices of the blocks and the head learn at 1 / ``width_factor`` of the rate, embeddings, norms and biases at the
    whole rate (maximal update parametrisation, arXiv 2203.03466, table 3). The first entry of ``optimizer.groups``
    whose pattern matches a name applies. ``optimizer.layer_lr_decay`` d scales block l of L by d^(L - l) and embeddings
    by d^(L + 1).

    Raises:
        ConfigError: A pattern matches no parameter, or no parameter is left to train.
    """
    groups: dict[str, Group] = {}
    num_matches = [0] * len(config.groups)
    for parameter in spec.parameters:
        group = _rule(parameter, config)
        scale = config.layer_lr_decay ** _layers_above(parameter, spec.num_layers)
        scale /= spec.width_factor if parameter.kind in ("matrix", "head") else 1.0
        index = next((i for i, one in enumerate(config.groups) if fnmatchcase(parameter.name, one.match)), None)
        if index is not None:
            num_matches[index] += 1
            group = FROZEN if config.groups[index].frozen else group
            scale *= config.groups[index].lr_scale
        groups[parameter.name] = group if group.is_frozen else group._replace(lr_scale=scale)
    if 0 in num_matches:
        raise _unmatched(config, num_matches.index(0), spec)
    if all(group.is_frozen for group in groups.values()):
        raise ConfigError("Every parameter is frozen", where="optimizer.groups", hint="leave some parameters to train")
    return groups


def in_order(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the distinct groups in the order of their rules, then of their first appearance."""
    return tuple(sorted(dict.fromkeys(groups), key=lambda group: _ORDER.index(group.rule)))


def common_group(names: Iterable[str], groups: Mapping[str, Group], *, hint: str) -> Group:
    """Return the group of parameters that an engine stores as one.

    Raises:
        ConfigError: They have different groups.
    """
    first, *others = names
    differing = [name for name in others if groups[name] != groups[first]]
    if differing:
        what = f"{first} and {differing[0]} are stored as one and need the same learning rate"
        raise ConfigError(what, where="optimizer.groups", hint=hint)
    return groups[first]


def _rule(parameter: ParameterSpec, config: OptimizerConfig) -> Group:
    """Return the group of a parameter by its role.

    Norms and biases are never decayed (``ParameterSpec.decay``), embeddings only if ``optimizer.decay_embeddings`` is
    set. Muon updates the matrices of the blocks, embeddings and head excluded (``ParameterSpec.kind``).
    """
    if not parameter.trainable:
        return FROZEN
    if config.facts.orthogonalises and parameter.kind == "matrix":
        return ORTHOGONAL
    exempt = parameter.kind == "embedding" and not config.decay_embeddings
    return DECAYED if parameter.decay and not exempt else PLAIN


def _layers_above(parameter: ParameterSpec, num_layers: int) -> int:
    """Return the exponent of the layer-wise decay: 0 for final norm and head, L + 1 for embeddings."""
    if parameter.kind == "embedding":
        return num_layers + 1
    layer = re.search(r"\.(\d+)\.", parameter.name)  # blocks.3.*, model.layers.3.*, h.3.*
    return num_layers - int(layer[1]) if layer is not None else 0


def _unmatched(config: OptimizerConfig, index: int, spec: ModelSpec) -> ConfigError:
    pattern = config.groups[index].match
    names = [parameter.name for parameter in spec.parameters]
    shadowed = any(fnmatchcase(name, pattern) for name in names)
    shown = ", ".join([*names[:_EXAMPLES], "...", *names[-_EXAMPLES:]] if len(names) > 2 * _EXAMPLES else names)
    return ConfigError(
        f"match={pattern} matches no parameter" + (" that earlier groups do not match" if shadowed else ""),
        where=f"optimizer.groups.{index}.match",
        hint="move it before them" if shadowed else f"the {pluralize(len(names), 'parameter')} are {shown}",
    )
