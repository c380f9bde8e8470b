"""Range checks of token ids, labels, positions and lengths, before they reach a device."""

from __future__ import annotations

from vorox.core.batch import IGNORED_LABEL, Batch
from vorox.core.errors import ConfigError, DataError
from vorox.models.spec import ModelSpec


def check_tokens(batch: Batch, spec: ModelSpec) -> None:
    """Check that all ids and positions of a batch are in the model's range.

    Raises:
        DataError: A token, label or position is out of range.
    """
    where = f"step {batch.step}"
    if batch.tokens_ABT.shape[2] > spec.max_positions_tokens:
        raise DataError(
            f"Rows have {batch.tokens_ABT.shape[2]:,} positions; the model has {spec.max_positions_tokens:,}",
            where=where,
        )
    tokens, labels = batch.tokens_ABT, batch.labels_ABT
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise DataError(
            f"A token id is outside the vocabulary of {spec.vocab_size} (the highest is {int(tokens.max())})",
            where=where,
        )
    if int(labels.max()) >= spec.vocab_size or bool(((labels < 0) & (labels != IGNORED_LABEL)).any()):
        raise DataError(f"A label is outside the vocabulary of {spec.vocab_size}", where=where)
    positions = batch.position_ids_ABT
    if positions is not None and (int(positions.min()) < 0 or int(positions.max()) >= spec.max_positions_tokens):
        raise DataError(f"A position is outside the model's {spec.max_positions_tokens:,} positions", where=where)


def check_length(num_tokens: int, spec: ModelSpec) -> None:
    """Check that a sequence fits into the model.

    Raises:
        ConfigError: The sequence is longer than the model's positions.
    """
    if num_tokens > spec.max_positions_tokens:
        raise ConfigError(
            f"A sequence of {num_tokens:,} tokens exceeds the model's {spec.max_positions_tokens:,} positions",
            where="model.max_positions_tokens",
        )
