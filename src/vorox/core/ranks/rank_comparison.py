"""Comparison of facts that must be equal on all ranks, such as versions, settings and the model.

Ranks that differ would hang in a collective or train something else without notice. The error names the first rank that
differs from rank 0, and the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext

_MAX_SHOWN = 3


def compare_ranks(dist: DistributedContext, topic: str, facts: Mapping[str, Any], hint: str) -> None:
    """Check that all ranks have the same facts. A collective.

    Args:
        dist: This process's rank and its communication.
        topic: Name of the collective.
        facts: Field to plain JSON.
        hint: What to do if they differ.

    Raises:
        ConfigError: A rank differs from rank 0; raised on every rank.
    """
    raise_difference(dist.agree(topic, dict(facts), first_difference), hint)


def first_difference(reports: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the fields in which the first rank that differs from rank 0 does so.

    Args:
        reports: The facts of each rank.

    Returns:
        Per field: the rank, the field, the value of that rank and the value of rank 0; ``None`` for a missing field.
    """
    first = reports[0]
    for rank, report in enumerate(reports):
        names = [name for name in {**first, **report} if report.get(name) != first.get(name)]
        if names:
            return [[rank, name, report.get(name), first.get(name)] for name in names]
    return []


def raise_difference(found: Sequence[Sequence[Any]], hint: str) -> None:
    """Raise the error of a difference that ``first_difference`` found, if any.

    Raises:
        ConfigError: There is one.
    """
    if not found:
        return
    texts = [f"{name} is {_shown(value)}, on rank 0 {_shown(expected)}" for _, name, value, expected in found]
    more = f"; {len(texts) - _MAX_SHOWN} more differ" if len(texts) > _MAX_SHOWN else ""
    raise ConfigError(
        f"Rank {found[0][0]} differs from rank 0: {'; '.join(texts[:_MAX_SHOWN])}{more}",
        where=str(found[0][1]), hint=hint,
    )  # fmt: skip


def _shown(value: Any) -> str:
    return "missing" if value is None else str(value)
