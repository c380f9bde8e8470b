"""A causal language model of transformers on this rank (see ``module_network.py``)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from vorox.backends.torch_engine import huggingface_model
from vorox.backends.torch_engine.inputs import add_noise
from vorox.backends.torch_engine.module_network import ModuleNetwork
from vorox.core.engine import NamedArray
from vorox.core.errors import ConfigError
from vorox.models.huggingface_spec import HuggingFaceSpec

ATTENTION = {"auto": None, "sdpa": "sdpa", "reference": "eager"}
"""``model.attention_kernel`` to the name in transformers; ``None`` for its choice."""


class HuggingFaceNetwork(ModuleNetwork):
    """See ``ModuleNetwork``."""

    setting = "model.name_or_path"
    _spec: HuggingFaceSpec

    def _build(self) -> nn.Module:
        module = huggingface_model.build(self._spec.config, attention=ATTENTION[self._config.model.attention_kernel])
        alpha = self._config.train.embedding_noise
        if alpha is not None:

            def hook(layer: nn.Module, _: Any, x_BTD: Tensor) -> Tensor:
                return add_noise(x_BTD, alpha, x_BTD.shape[1]) if layer.training else x_BTD

            module.get_input_embeddings().register_forward_hook(hook)
        return module

    def _recompute_blocks(self) -> None:
        if not self.module.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(self.module).__name__} does not support activation checkpointing",
                where="train.activation_checkpointing", hint="set it to none",
            )  # fmt: skip
        enable = getattr(self.module, "activation_checkpointing_enable", None)  # named differently before 5.23
        (enable or self.module.gradient_checkpointing_enable)({"use_reentrant": False})

    @cached_property
    def _takes_positions(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "position_ids" in inspect.signature(self.module.forward).parameters

    @cached_property
    def _auxiliary_weight(self) -> float:
        text: Any = self.module.config.get_text_config()
        return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)

    def _call(self, tokens: Tensor, positions: Tensor | None, is_token: Tensor | None) -> tuple[Tensor, Tensor | None]:
        given = {"input_ids": tokens, "attention_mask": is_token, "position_ids": positions}
        inputs = {name: value for name, value in given.items() if value is not None}
        output = self._run(**inputs, use_cache=False)
        auxiliary = output.get("aux_loss")
        return output.logits, None if auxiliary is None else self._auxiliary_weight * auxiliary

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield random weights; zeros if pretrained ones are imported before step 1."""
        if self._config.model.pretrained:
            return ((row.name, np.zeros(row.shape, np.float32)) for row in self._spec.rows)
        return huggingface_model.random_weights(self._spec, seed)

    def pretrained_weights(self, directory: Path) -> Iterator[NamedArray]:
        """Yield the weights of a directory of transformers."""
        return huggingface_model.pretrained_weights(self._spec, directory)
