"""A model by import path (``model.kind``): a class or function that returns an ``nn.Module``, on this rank.

It is called with the section ``model``, whose vocabulary and maximum length are resolved. The module maps token ids
``[B, T]`` to logits ``[B, T, V]``, or to a pair of logits and a loss that is added per target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vorox.backends.torch_engine.foreign.module_table import check_modules, named_tensors, parameters_on_meta, rows
from vorox.backends.torch_engine.foreign.separation_probe import Separation, check_causal, measure_separation, randomise
from vorox.backends.torch_engine.networks.module_network import ModuleNetwork, blocks
from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import canonical_json
from vorox.core.schema import RunConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.user_code.extensions import call_error, load_function
from vorox.models.module_spec import UserSpec

_KEY = "model.kind"
_PROBE_TOKENS = 256
"""Positions of a measured row at most: lengths at which the model changes are not known."""


def resolve(config: RunConfig, *, tokenizer_vocab_size: int) -> UserSpec:
    """Return the spec of the model that a configuration names.

    Raises:
        ConfigError: The model cannot be built, contradicts the tokenizer or the data, or does not support a setting.
    """
    model, length = config.model, config.data.sequence_length_tokens
    vocab_size = tokenizer_vocab_size if model.vocab_size is None else model.vocab_size
    longest = length if model.max_positions_tokens is None else model.max_positions_tokens
    if vocab_size < tokenizer_vocab_size or longest < length:
        key, found, needed = (
            ("vocab_size", vocab_size, tokenizer_vocab_size) if vocab_size < tokenizer_vocab_size
            else ("max_positions_tokens", longest, length)
        )  # fmt: skip
        raise ConfigError(
            f"model.{key} = {found:,}, but the data needs {needed:,}", where=f"model.{key}", hint="leave it out"
        )
    sized = model.model_copy(update={"vocab_size": vocab_size, "max_positions_tokens": longest})
    with parameters_on_meta():
        module = build(sized)
    check_modules(module, where=_KEY)
    head = _head(module, vocab_size)
    embedding = next((child for child in module.modules() if isinstance(child, nn.Embedding)), None)
    return UserSpec(
        config=sized.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "preset", "family"}),
        rows=tuple(rows(module, head)),
        num_layers=len(blocks(module)),
        hidden_size=model.hidden_size if embedding is None else embedding.embedding_dim,
        vocab_size=vocab_size,
        max_positions_tokens=longest,
        attention_width=model.num_heads * model.head_dim if model.head_dim else model.hidden_size,
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
        function=model.kind,
    )


def build(model: ModelConfig) -> nn.Module:
    """Call the function of ``model.kind``.

    Raises:
        ConfigError: It fails, or returns no module with parameters.
    """
    function: Callable[[ModelConfig], Any] = load_function(model.kind, kind="model", where=_KEY)
    try:
        module = function(model)
    except Exception as error:  # a user's function can raise anything
        raise ConfigError(f"{model.kind} failed with {type(error).__name__}: {error}", where=_KEY) from error
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is None:
        raise ConfigError(
            f"{model.kind} returned {type(module).__name__}, not a torch.nn.Module with parameters", where=_KEY,
            hint="it is called as f(config), where config is the section model",
        )  # fmt: skip
    return module


def _head(module: nn.Module, vocab_size: int) -> nn.Linear | None:
    """Return the last linear layer whose outputs are logits."""
    found = [child for child in module.modules() if isinstance(child, nn.Linear) and child.out_features == vocab_size]
    return found[-1] if found else None


class UserNetwork(ModuleNetwork):
    """See ``ModuleNetwork``."""

    setting = _KEY
    _spec: UserSpec

    def _build(self) -> nn.Module:
        with parameters_on_meta():
            return build(self._sized)

    @property
    def _sized(self) -> ModelConfig:
        sizes = {"vocab_size": self._spec.vocab_size, "max_positions_tokens": self._spec.max_positions_tokens}
        return self._config.model.model_copy(update=sizes)

    def _recompute_blocks(self) -> None:
        found = blocks(self.module)
        if not found:
            raise ConfigError(
                f"{self._spec.label} has no blocks to recompute", where="train.activation_checkpointing",
                hint="keep them in a torch.nn.ModuleList, or set it to none",
            )  # fmt: skip
        for block in found:
            block.forward = partial(_recomputed, block.forward)

    def _call(
        self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None,
        **images: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert not images, "refused with the configuration"
        del is_token, documents  # the model is causal and padding is at the end; position ids separate documents
        return self._output(self._run, tokens, positions)

    def _output(
        self, run: Callable[..., Any], tokens: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions if self._takes_positions else None
        try:
            output = run(tokens) if positions is None else run(tokens, position_ids=positions)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or torch.is_grad_enabled():
                raise
            raise call_error(
                self._spec.function, error, where=_KEY, signature="module(tokens)", arguments="tokens [B, T]; with a "
                "parameter position_ids also the position of each token in its document, [B, T]",
                returns="logits [B, T, V]",
            ) from error  # fmt: skip
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        expected = (*tokens.shape, self._spec.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"{self._spec.label} returns {found} for tokens {list(tokens.shape)}, not logits {list(expected)}",
                where=_KEY, hint="return logits [rows, positions, vocabulary], or a pair of logits and a loss",
            )  # fmt: skip
        return logits, auxiliary

    def _probe(self) -> Separation:
        """Measure a copy with random weights.

        Raises:
            ConfigError: A token changes earlier logits, or the model cannot run.
        """
        device, length = self._compute.device, min(self._config.data.sequence_length_tokens, _PROBE_TOKENS)
        with torch.random.fork_rng(devices=[]):
            copy = build(self._sized).to(device).eval()
        randomise(copy)

        def run(tokens: Tensor, positions: Tensor | None, is_token: Tensor | None, documents: Tensor | None) -> Tensor:
            del is_token, documents
            return self._output(copy, tokens, positions)[0]

        vocab_size, name = self._spec.vocab_size, self._spec.function
        check_causal(run, vocab_size=vocab_size, length=length, device=device, name=name, where=_KEY)
        can_pack = self._takes_positions
        return measure_separation(run, can_pack=can_pack, vocab_size=vocab_size, length=length, device=device)

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield the weights that the model starts with, a function of the seed."""
        key = xxhash.xxh3_64_intdigest(canonical_json(["user model weights", 1, seed])) >> 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            module = build(self._sized)
        for name, tensor in named_tensors(module):
            yield name, tensor.detach().float().numpy()


def _recomputed(forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, **keywords)
