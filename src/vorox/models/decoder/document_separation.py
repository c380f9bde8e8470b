"""How the documents of packed rows and sliding windows are separated: chosen here for the engine and for estimates.

``slices`` and ``varlen`` (``backends/torch_engine/device/document_attention.py``) have no mask; their memory grows
linearly with the length of a row. ``mask`` is a dense mask, a byte for every pair of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vorox.core.schema import RunConfig
from vorox.core.schema.setting import Engine
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.module_spec import ModuleSpec
from vorox.models.spec import ModelSpec

DocumentAttention = Literal["mask", "slices", "varlen"]


@dataclass(frozen=True, slots=True)
class EngineMasks:
    """How an engine treats masks, for estimates of its memory.

    Attributes:
        kernels: How it can separate documents without a mask, by kind of device.
        saves_masks: Whether it saves the mask of every layer as numbers.
    """

    kernels: Mapping[str, DocumentAttention]
    saves_masks: bool


ENGINE_MASKS: Mapping[Engine, EngineMasks] = {
    "torch": EngineMasks({"cpu": "slices", "cuda": "varlen"}, saves_masks=True),
    "jax": EngineMasks({}, saves_masks=False),
}
FUSED_KERNELS = frozenset({"auto", "sdpa"})
"""Values of ``model.attention_kernel`` that separate documents without a mask."""


def separation(
    spec: DecoderSpec, config: RunConfig, available: DocumentAttention, *, compiled: bool
) -> DocumentAttention:
    """Return how the PyTorch engine separates documents and windows in the native decoder.

    Args:
        spec: The model.
        config: The run.
        available: What the device's kernels support.
        compiled: Whether the model is compiled; slices cannot be, since their number changes.
    """
    is_fused = config.model.attention_kernel in FUSED_KERNELS and spec.block is None
    is_possible = is_fused and spec.dropout_fraction == 0
    return available if is_possible and not (available == "slices" and compiled) else "mask"


def expected_attention(config: RunConfig, device_kind: str) -> DocumentAttention:
    """Return what an engine's kernels support; a GPU is taken to have the one of half precision."""
    found = ENGINE_MASKS[config.backend].kernels.get(device_kind, "mask")
    return "mask" if found == "varlen" and config.precision.dtype == "fp32" else found


def attention_matrix_bytes(spec: ModelSpec, config: RunConfig, device_kind: str, dtype_bytes: int) -> int:
    """Return the bytes of all matrices with an element for every pair of positions, for each row.

    A dense mask is made once for each kind of layer, as booleans. PyTorch's kernel converts it to numbers in every
    layer, and saves those for the backward pass. The plain formula saves the attention weights of every head instead.
    Measured on a CPU, to within a third (``tests/planning/test_memory_estimate.py``).

    Args:
        spec: The model.
        config: The run.
        device_kind: Kind of the device.
        dtype_bytes: Bytes per element of the compute precision.
    """
    pairs = config.data.sequence_length_tokens**2
    windows = _windows_with_mask(spec, config, device_kind)
    if not ENGINE_MASKS[config.backend].saves_masks:
        return pairs * len(set(windows)) * (1 + dtype_bytes)
    recomputes = config.train.activation_checkpointing == "block"
    if config.model.attention_kernel == "reference":
        num_layers = len(spec.layer_windows)
        saved = 3 * (min(num_layers, 1) if recomputes else num_layers) + 3  # those of a layer while it computes
        return pairs * (len(set(windows)) + _num_heads(spec) * saved * dtype_bytes)
    num_converted = min(len(windows), _RECOMPUTED_MASKS) if recomputes or _has_dropout(spec) else len(windows)
    return pairs * (len(set(windows)) + num_converted * dtype_bytes)


_RECOMPUTED_MASKS = 3
"""Converted masks that exist at a time where a layer's are not kept."""


def _windows_with_mask(spec: ModelSpec, config: RunConfig, device_kind: str) -> list[int | None]:
    """Return the window of every layer with a dense mask; ``None`` for full attention."""
    if config.parallel.context_parallel_size > 1 and config.parallel.context_parallel_kind == "ring":
        return []
    if isinstance(spec, DecoderSpec):
        available = expected_attention(config, device_kind)
        if separation(spec, config, available, compiled=config.runtime.compile) != "mask":
            return []
    length = config.data.sequence_length_tokens
    windows = [None if window is None or window >= length else window for window in spec.layer_windows]
    return windows if config.data.document_mask else [window for window in windows if window is not None]


def _has_dropout(spec: ModelSpec) -> bool:
    """Whether the weights of attention are saved in place of the mask (``cpu_memory.dropout_elements``)."""
    return isinstance(spec, DecoderSpec) and spec.dropout_fraction > 0


def _num_heads(spec: ModelSpec) -> int:
    if isinstance(spec, DecoderSpec):
        return spec.num_heads
    config = spec.config if isinstance(spec, ModuleSpec) else {}
    text = config.get("text_config") or config
    return int(next((text[key] for key in ("num_attention_heads", "n_head", "num_heads") if text.get(key)), 1))
