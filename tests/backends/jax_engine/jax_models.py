"""Tiny JAX engines for the tests of this folder, on the models and rows of the torch engine's tests."""

from __future__ import annotations

from typing import Any

from small_configurations import LLAMA, POSITIONS, VOCAB, configuration
from vorox.backends.jax_engine.engine import JaxEngine, create
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec


def jax_configuration(model: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
    """A run of tiny rows; ``section__key=value`` sets any other key."""
    return configuration(
        LLAMA if model is None else model, **{"backend": "jax", "runtime__num_threads": None, **overrides}
    )


def engine_of(config: RunConfig) -> JaxEngine:
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    return create(config, spec, DistributedContext())


def make(model: dict[str, Any] | None = None, **overrides: Any) -> JaxEngine:
    return engine_of(jax_configuration(model, **overrides))
