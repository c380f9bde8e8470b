"""The layers of ``model.layer_pattern``: Mamba-2, attention and MLP, each behind a norm.

A Mamba-2 layer is projections and a convolution around the scan of ``state_space.py``.

Shape legend: B rows, T positions, M = B x T, D width, I inner channels, E = I + 2 G S channels of the convolution,
N heads, H head width, G groups, S state size, K taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.model import (
    Attention,
    Linear,
    Mlp,
    Norm,
    Parts,
    ResidualBlock,
)
from vorox.backends.torch_engine.layers.state_space import MambaState, causal_convolution, gated_norm, scan, scan_step
from vorox.models.decoder.mamba import conv_channels, inner_channels


class Convolution(nn.Module):
    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight, self.bias = parts.parameters[f"{name}.weight"], parts.parameters.get(f"{name}.bias")

    def forward(self, x_BTE: Tensor, documents_BT: Tensor | None, before_BKE: Tensor | None) -> Tensor:
        weight_EK = self.weight[:, 0]
        return causal_convolution(x_BTE, weight_EK, self.bias, documents_BT=documents_BT, before_BKE=before_BKE)


class GatedNorm(nn.Module):
    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self._num_groups, self._eps = parts.spec.mamba_num_groups, parts.spec.norm_eps

    def forward(self, y_BTI: Tensor, gate_BTI: Tensor) -> Tensor:
        return gated_norm(y_BTI, gate_BTI, self.weight, self._num_groups, self._eps)


class Mamba(nn.Module):
    """See ``models/decoder/mamba.py`` for its parameters."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        spec, name = parts.spec, f"blocks.{layer}.mamba"
        assert spec.mamba_num_heads is not None
        self._layer, self._num_heads, self._num_groups = layer, spec.mamba_num_heads, spec.mamba_num_groups
        self._inner, self._channels = inner_channels(spec), conv_channels(spec)
        self._min_step, self._chunk_tokens = spec.mamba_time_step_min, spec.mamba_chunk_tokens
        self.input, self.output = Linear(parts, f"{name}.input"), Linear(parts, f"{name}.output")
        self.conv, self.norm = Convolution(parts, f"{name}.conv"), GatedNorm(parts, f"{name}.norm")
        self.dt_bias, self.A_log, self.D = (parts.parameters[f"{name}.{key}"] for key in ("dt_bias", "A_log", "D"))

    def forward(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        gate_BTI, inputs_BTE, dt_BTN = (
            self.input(x_MD).view(*context.shape_BT, -1).split((self._inner, self._channels, self._num_heads), dim=-1)
        )
        dt_BTN = F.softplus(dt_BTN.float() + self.dt_bias.float()).clamp(min=self._min_step)
        past = None if context.cache is None else context.cache.mamba(self._layer)
        before_BKE = None if past is None else past.inputs_BKE.to(inputs_BTE.dtype)
        mixed_BTE = self.conv(inputs_BTE, context.documents, before_BKE)
        if past is not None and before_BKE is not None:
            past.inputs_BKE = torch.cat([before_BKE, inputs_BTE], dim=1)[:, inputs_BTE.shape[1] :]
        y_BTNH = self._scan(mixed_BTE, dt_BTN, context.documents, past)
        return self.output(self.norm(y_BTNH.flatten(-2), gate_BTI).flatten(0, 1).to(x_MD.dtype))

    def _scan(self, mixed_BTE: Tensor, dt_BTN: Tensor, documents: Tensor | None, past: MambaState | None) -> Tensor:
        """Return the outputs of the heads, ``[B, T, N, H]``, and move the cached state behind them."""
        shared = (self._channels - self._inner) // 2
        x_BTI, b, c = mixed_BTE.split((self._inner, shared, shared), dim=-1)
        x_BTNH = x_BTI.unflatten(-1, (self._num_heads, -1))
        b_BTGS, c_BTGS = (part.unflatten(-1, (self._num_groups, -1)) for part in (b, c))
        a_N, d_N = -self.A_log.float().exp(), self.D.float()
        if past is None:
            return scan(
                x_BTNH, dt_BTN, a_N, b_BTGS, c_BTGS, d_N, chunk_tokens=self._chunk_tokens, documents_BT=documents
            )[0]
        if x_BTNH.shape[1] == 1:
            here = (x_BTNH[:, 0], dt_BTN[:, 0], a_N, b_BTGS[:, 0], c_BTGS[:, 0], d_N)
            y_BNH, past.state_BNHS = scan_step(past.state_BNHS, *here)
            return y_BNH[:, None]
        y_BTNH, past.state_BNHS = scan(
            x_BTNH, dt_BTN, a_N, b_BTGS, c_BTGS, d_N, chunk_tokens=self._chunk_tokens, initial_BNHS=past.state_BNHS
        )
        return y_BTNH


_MIXERS: dict[str, tuple[str, Callable[[Parts, int], nn.Module]]] = {
    "M": ("mamba", Mamba),
    "*": ("attention", Attention),
    "-": ("mlp", Mlp),
}
"""Name and class by the character of ``model.layer_pattern``."""


class MixerBlock(ResidualBlock):
    """A norm, and one of Mamba-2, attention and MLP."""

    stages = (("transform", "after_mlp"),)

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.norm = Norm(parts, f"blocks.{layer}.norm", kind=parts.spec.norm)
        self._name, make = _MIXERS[parts.spec.mixer(layer)]
        self.add_module(self._name, make(parts, layer))

    def transform(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        inputs = (self.norm(x_MD),) if self._name == "mlp" else (self.norm(x_MD), context)
        mixed_MD = self.get_submodule(self._name)(*inputs)
        return x_MD + context.drop(mixed_MD)
