"""Count the gradients that exist at a time with optimizer.in_backward, for the memory estimate.

Parameters outside the blocks are updated one by one. All gradients of a block are counted: a compiled block returns
them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from vorox.models.spec import ModelSpec


def gradient_elements(spec: ModelSpec, frozen: Container[str] = ()) -> int:
    """Return the elements of the gradients that exist at a time, at most.

    A matrix that is embedding and head gets its gradient from the loss on, and is complete at the end.

    Args:
        spec: The model.
        frozen: Parameters without gradient.
    """
    parts = Counter[str]()
    for row in spec.parameters:
        if row.name not in frozen:
            parts[_block(row.name)] += row.num_elements
    vocabulary = [row for row in spec.parameters if len(row.shape) == 2 and row.shape[0] == spec.vocab_size]
    tied = 0
    if len(vocabulary) == 1:
        tied = parts.pop(vocabulary[0].name, 0)
    return tied + max(parts.values(), default=0)


def _block(name: str) -> str:
    """Return the start of a canonical name up to the number of its block; the name of a parameter outside of them."""
    parts = name.split(".")
    ends = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else name
