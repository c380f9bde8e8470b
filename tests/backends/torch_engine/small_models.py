"""Tiny torch engines for the tests of this folder, on the models of ``small_configurations``."""

from __future__ import annotations

from typing import Any

from small_configurations import (
    GPT2,
    LLAMA,
    LR,
    MODELS,
    PATTERNS,
    POSITIONS,
    QWEN3,
    VOCAB,
    batch_of,
    configuration,
    random_rows,
    randomise,
)  # fmt: skip
from vorox.backends.torch_engine.engine import TorchEngine, create
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec

__all__ = [
    "GPT2", "LLAMA", "LR", "MODELS", "PATTERNS", "POSITIONS", "QWEN3", "VOCAB", "batch_of", "configuration",
    "engine_of", "make", "random_rows", "randomise", "train",
]  # fmt: skip


def engine_of(config: RunConfig) -> TorchEngine:
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    return create(config, spec, DistributedContext())


def make(model: dict[str, Any] | None = None, **overrides: Any) -> TorchEngine:
    return engine_of(configuration(model, **overrides))


def train(engine: TorchEngine, steps: int, *, start: int = 0, lr: float = LR) -> list[float]:
    """Losses of some steps on random rows."""
    found: list[float] = []
    for step in range(start, start + steps):
        values = engine.train_step(batch_of(random_rows(8, step), step=step), lr=lr, weight_decay=0.1).fetch()
        found.append(values.loss)
    return found
