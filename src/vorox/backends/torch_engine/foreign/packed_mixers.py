"""Mamba layers in transformers in packed rows: state and convolution start at zero in every document.

The layers in transformers ignore documents in PyTorch. ``PackedMixers`` gives each Mamba-2 or Mamba-1 mixer another
forward pass over the same parameters, which applies when documents are set: the scans of ``layers/state_space.py``.
Without documents, as for decoding, transformers computes. Mixers are chosen by the name of their class; the rest of a
model (attention, experts, norms) is transformers' own.

Shape legend: B rows, T positions, D width, I inner channels, E channels of the convolution, N heads, H head width,
G groups, S state size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.layers.state_space import causal_convolution, scan, selective_scan


class PackedMixers:
    """The Mamba mixers of a model, with the documents of its current forward pass.

    Attributes:
        documents_BT: Document of each position; ``None`` if every row is one document. It stays set until the backward
            pass, which may repeat the forward pass of a block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.documents_BT: Tensor | None = None
        self._count = 0
        for child in module.modules():
            compute = _FORWARD.get(type(child).__name__)
            mixer: Any = child
            if compute is not None and mixer.activation in ("silu", "swish"):
                mixer.forward = partial(self._forward, mixer, compute, mixer.forward)
                self._count += 1

    def __bool__(self) -> bool:
        return self._count > 0

    def _forward(
        self, mixer: Any, compute: Callable[[Any, Tensor, Tensor], Tensor], original: Callable[..., Tensor],
        hidden_states: Tensor, *args: Any, **keywords: Any,
    ) -> Tensor:  # fmt: skip
        if self.documents_BT is None:
            return original(hidden_states, *args, **keywords)
        return compute(mixer, hidden_states, self.documents_BT)


def _mamba2(mixer: Any, x_BTD: Tensor, documents_BT: Tensor) -> Tensor:
    shared = mixer.n_groups * mixer.ssm_state_size
    sizes = (mixer.intermediate_size, mixer.intermediate_size + 2 * shared, mixer.num_heads)
    gate_BTI, mixed_BTE, dt_BTN = mixer.in_proj(x_BTD).split(sizes, dim=-1)
    mixed_BTE = _convolution(mixer, mixed_BTE, documents_BT)
    x_BTI, *b_and_c = mixed_BTE.split((mixer.intermediate_size, shared, shared), dim=-1)
    b_BTGS, c_BTGS = (part.unflatten(-1, (mixer.n_groups, -1)) for part in b_and_c)
    low, high = mixer.time_step_limit
    y_BTNH, _ = scan(
        x_BTI.unflatten(-1, (mixer.num_heads, -1)), F.softplus(dt_BTN.float() + mixer.dt_bias.float()).clamp(low, high),
        -mixer.A_log.float().exp(), b_BTGS, c_BTGS, mixer.D.float(),
        chunk_tokens=mixer.chunk_size, documents_BT=documents_BT, isolated=True,
    )  # fmt: skip
    return mixer.out_proj(mixer.norm(y_BTNH.flatten(-2), gate_BTI).to(x_BTD.dtype))


def _mamba1(mixer: Any, x_BTD: Tensor, documents_BT: Tensor) -> Tensor:
    x_BTI, gate_BTI = mixer.in_proj(x_BTD).chunk(2, dim=-1)
    x_BTI = _convolution(mixer, x_BTI, documents_BT)
    sizes = (mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size)
    parts = mixer.x_proj(x_BTI).split(sizes, dim=-1)
    norms = (getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "b", "c"))  # Jamba, Falcon-Mamba
    dt, b_BTS, c_BTS = (part if norm is None else norm(part) for norm, part in zip(norms, parts, strict=True))
    dt_BTI = F.softplus(F.linear(dt, mixer.dt_proj.weight).float() + mixer.dt_proj.bias.float())
    a_IS, d_I = -mixer.A_log.float().exp(), mixer.D.float()
    y_BTI = selective_scan(x_BTI, dt_BTI, a_IS, b_BTS, c_BTS, d_I, documents_BT)
    return mixer.out_proj((y_BTI * F.silu(gate_BTI)).to(x_BTD.dtype))


def _convolution(mixer: Any, x_BTE: Tensor, documents_BT: Tensor) -> Tensor:
    return causal_convolution(x_BTE, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, documents_BT=documents_BT)


_MAMBA2 = ("Mamba2Mixer", "NemotronHMamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "Zamba2MambaMixer")
_FORWARD: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(_MAMBA2, _mamba2),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _mamba1),
}
"""Forward pass in packed rows, by the class of a mixer in transformers."""
