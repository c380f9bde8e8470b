"""Blocks of the user (``model.block``) in the native decoder."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from vorox.backends.torch_engine.foreign.module_table import parameters_on_meta
from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.model import Parts, ResidualBlock
from vorox.core.errors import ConfigError
from vorox.core.files.atomic import canonical_json
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.user_layer import load_block


class UserBlock(ResidualBlock):
    """A module of the user (``model.block``) over the parameters of a layer."""

    stages = (("transform", "after_mlp"),)

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        path = parts.spec.block
        assert path is not None
        self._is_sliding = parts.spec.has_window(layer)
        with parameters_on_meta():
            self.module: nn.Module = load_block(path)(parts.spec, layer)
        for name in dict(self.module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._parameters[leaf] = parts.parameters[f"blocks.{layer}.module.{name}"]
        for name, buffer in dict(self.module.named_buffers()).items():
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = buffer.to(parts.device)

    def transform(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        mask = context.attention_mask
        if self._is_sliding:
            mask = mask.sliding or mask
        x_BTD = x_MD.view(*context.shape_BT, -1)
        y_BTD: object = self.module(x_BTD, positions=context.positions, attn_mask=mask.dense)
        if not isinstance(y_BTD, Tensor) or y_BTD.shape != x_BTD.shape:
            found = list(y_BTD.shape) if isinstance(y_BTD, Tensor) else type(y_BTD).__name__
            raise ConfigError(
                f"{type(self.module).__name__} returns {found} for a residual stream {list(x_BTD.shape)}",
                where="model.block", hint="return the new residual stream, of the same shape",
            )  # fmt: skip
        return y_BTD.reshape(x_MD.shape)


def block_values(spec: DecoderSpec, path: str, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the initial parameters of user blocks by canonical name, a function of the seed."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    for layer in range(spec.num_layers):
        key = xxhash.xxh3_64_intdigest(canonical_json(["user block weights", 1, seed, layer])) >> 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            module: nn.Module = load_block(path)(spec, layer)
        for name, parameter in module.named_parameters():
            found[f"blocks.{layer}.module.{name}"] = parameter.detach().float().numpy()
    return found
