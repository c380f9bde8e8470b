"""Rows of several documents, and their loss where the numpy decoder sees each document alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference_decoder import numpy_logits
from small_configurations import random_rows
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor

DOCUMENTS = ((5, 1, 11, 7), (24,), (3, 3, 3, 9), (20, 2))  # rows may end in padding


def packed(step: int = 0) -> Batch:
    """Rows of several documents, with labels inside of documents only."""
    tokens = random_rows(len(DOCUMENTS), step)[:, :-1].copy()
    labels, segments, positions = (np.zeros_like(tokens) for _ in range(3))
    labels[:] = IGNORED_LABEL
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for segment, length in enumerate(lengths, start=1):
            end = start + length
            labels[row, start : end - 1] = tokens[row, start + 1 : end]
            segments[row, start:end], positions[row, start:end] = segment, np.arange(length)
            start = end
    digests, count = np.zeros((1, len(tokens)), np.uint64), int((labels != IGNORED_LABEL).sum())
    cursor = DataCursor("", 0, step + 1, 0, 0)
    return Batch(step, tokens[None], labels[None], segments[None], positions[None], digests, count, cursor)


def loss_of_documents(spec: Any, weights: dict[str, np.ndarray], batch: Batch) -> float:
    """Mean loss per label where the numpy decoder sees every document alone."""
    total = 0.0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            tokens = batch.tokens_ABT[0, row, start : start + length]
            logits = numpy_logits(spec, weights, tokens[None])[0]
            logits = logits - logits.max(-1, keepdims=True)
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            total -= log_p[np.arange(length - 1), tokens[1:]].sum()
            start += length
    return total / batch.num_target_tokens
