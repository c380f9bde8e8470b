"""Resolve a transformers model, and check the settings of its run before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.networks import adapters
from vorox.backends.torch_engine.parallel import module_plan
from vorox.core.config.yaml.writer import write_overrides
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.huggingface.spec import KIND, HuggingFaceSpec


def resolve(
    config: RunConfig, values: Mapping[str, Any], *, revision: str | None, tokenizer_vocab_size: int
) -> HuggingFaceSpec:
    """Return the spec of a ``config.json``.

    Args:
        config: The run.
        values: Content of ``config.json``.
        revision: Commit of its repository.
        tokenizer_vocab_size: Vocabulary size of the tokenizer.

    Raises:
        ConfigError: The model contradicts the tokenizer or the data, or does not support a setting.
    """
    own, module = huggingface_model.describe(values, revision=revision)
    if config.parallel.tensor_parallel_size > 1:
        module_plan.tensor_plan(module)
    wanted = config.model.vocab_size
    if wanted is not None and wanted < own.vocab_size:
        raise ConfigError(
            f"vocab_size = {wanted:,} would drop rows of the model's embedding of {own.vocab_size:,}",
            where="model.vocab_size", hint="leave it out",
        )  # fmt: skip
    rows = own.vocab_size if wanted is None else wanted
    if rows < tokenizer_vocab_size:
        added = list(config.tokenizer.special_tokens)
        other = f"remove tokenizer.special_tokens={added}" if added else "use the tokenizer of the model"
        rows_added: dict[str, Any] = {"model.vocab_size": tokenizer_vocab_size}
        if config.adapter.kind != "none":  # it freezes the embedding
            rows_added = {"adapter.kind": "none", "model.kind": KIND, **rows_added}
        raise ConfigError(
            f"The tokenizer has {tokenizer_vocab_size:,} tokens, the model's embedding {rows:,} rows",
            where="tokenizer.special_tokens" if added else "model.vocab_size",
            hint=f"to add rows, set {write_overrides(rows_added)}; or {other}",
        )  # fmt: skip
    if config.data.sequence_length_tokens > own.max_positions_tokens:
        raise ConfigError(
            f"data.sequence_length_tokens = {config.data.sequence_length_tokens:,} is more than the model's "
            f"{own.max_positions_tokens:,} positions",
            where="data.sequence_length_tokens", hint=f"set it to at most {own.max_positions_tokens}",
        )  # fmt: skip
    if config.adapter.kind != "none":
        return adapters.describe(config, own, module)
    return own if wanted is None else huggingface_model.describe(values, revision=revision, vocab_size=wanted)[0]
