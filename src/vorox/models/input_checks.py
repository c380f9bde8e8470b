"""Refuse what would read outside a table, before it reaches a device that cannot say so."""

from __future__ import annotations

from vorox.core.batch import IGNORED_LABEL, Batch
from vorox.core.errors import ConfigError, DataError
from vorox.models.spec import ModelSpec


def check_tokens(batch: Batch, spec: ModelSpec) -> None:
    """Make sure that every id and position of a batch exists in the model.

    Raises:
        DataError: A token, label or position is out of range.
    """
    where = f"step {batch.step}"
    if batch.tokens_ABT.shape[2] > spec.max_positions_tokens:
        raise DataError(
            f"rows have {batch.tokens_ABT.shape[2]:,} positions, the model {spec.max_positions_tokens:,}", where=where
        )
    tokens, labels = batch.tokens_ABT, batch.labels_ABT
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise DataError(
            f"a token id ({int(tokens.max())} is the highest) is outside the vocabulary of {spec.vocab_size}",
            where=where,
        )
    if int(labels.max()) >= spec.vocab_size or bool(((labels < 0) & (labels != IGNORED_LABEL)).any()):
        raise DataError(f"a label is outside the vocabulary of {spec.vocab_size}", where=where)
    positions = batch.position_ids_ABT
    if positions is not None and (int(positions.min()) < 0 or int(positions.max()) >= spec.max_positions_tokens):
        raise DataError(f"a position is outside the model's {spec.max_positions_tokens:,}", where=where)


def check_length(num_tokens: int, spec: ModelSpec) -> None:
    """Make sure that a sequence fits into the model.

    Raises:
        ConfigError: It has more tokens than the model has positions.
    """
    if num_tokens > spec.max_positions_tokens:
        raise ConfigError(
            f"{num_tokens:,} tokens are more than the {spec.max_positions_tokens:,} positions of the model",
            where="model.max_positions_tokens",
        )
