"""Linear layers with 4-bit weights: torchao's form on disk, and PyTorch's kernel on the CPU.

On disk and on CUDA, a weight is torchao's ``Int4Tensor``: two values per byte, the even input in the low bits. Its
products need the kernels of mslk, which exist for CUDA alone. On the CPU, ``use_cpu_kernel`` therefore repacks the same
numbers for ``_weight_int4pack_mm_for_cpu`` of PyTorch; nothing is quantised a second time.

Shape legend: O outputs, I inputs, G groups of inputs, P outputs padded to a multiple of 16.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.low_precision.affine_quantization import GROUP_INPUTS, has_int4_groups, quantize_int4

_OUTPUT_MULTIPLE = 16
"""The CPU kernel computes so many outputs at a time."""


def block_linears(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a transformers model, by name; its head is none of them."""
    head = model.get_output_embeddings()
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}


def quantize_linears(model: Any) -> int:
    """Replace the weights of the linear layers by 4-bit ones, the rest of the model by bf16; return how many."""
    from torchao.quantization import Int4Tensor

    packed: dict[nn.Linear, Any] = {}
    for layer in block_linears(model).values():
        if not has_int4_groups(layer.weight):
            continue
        matrix = quantize_int4(layer.weight.detach())
        packed[layer] = Int4Tensor(
            _pack(matrix.values_OI), matrix.scale_OG.t().contiguous(), matrix.zero_OG.t().contiguous(),
            [1, GROUP_INPUTS], layer.weight.shape,
        )  # fmt: skip
    model.to(torch.bfloat16)
    for layer, weight in packed.items():
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return len(packed)


def use_cpu_kernel(model: nn.Module) -> None:
    """Replace the linear layers with an ``Int4Tensor`` by layers that PyTorch computes on a CPU."""
    from torchao.quantization import Int4Tensor

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and isinstance(layer.weight, Int4Tensor):
                setattr(parent, name, _CpuInt4Linear(layer))


class _CpuInt4Linear(nn.Module):
    """The product with a 4-bit weight on a CPU; activations are bf16."""

    packed: Tensor
    scale_and_zero_GP2: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight: Any = layer.weight
        self.out_features, self.in_features, self.bias = layer.out_features, layer.in_features, layer.bias
        padding = -self.out_features % _OUTPUT_MULTIPLE
        values_PI = F.pad(_unpack(weight.qdata), (0, 0, 0, padding))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_PI.int() + 8, 1)
        scale_and_zero_GO2 = torch.stack([weight.scale, weight.zero_point], -1)
        self.register_buffer("packed", packed, persistent=False)
        scale_and_zero_GP2 = F.pad(scale_and_zero_GO2, (0, 0, 0, padding)).contiguous()
        self.register_buffer("scale_and_zero_GP2", scale_and_zero_GP2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with inputs ``[..., I]``, ``[..., O]``."""
        x_MI = x.reshape(-1, self.in_features).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        y_MP = cast("Tensor", product(x_MI, self.packed, GROUP_INPUTS, self.scale_and_zero_GP2))
        y = y_MP[:, : self.out_features].reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def _pack(values_OI: Tensor) -> Tensor:
    """Return two int8 values from -8 to 7 per byte, ``[O, I / 2]``."""
    return ((values_OI[:, 1::2] << 4) | (values_OI[:, ::2] & 15)).contiguous()


def _unpack(packed: Tensor) -> Tensor:
    """Return the values of ``_pack``, ``[O, I]``."""
    low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts keep the sign
    return torch.stack([low, high], -1).flatten(-2)
