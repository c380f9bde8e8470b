"""What a training step takes on a CPU besides state and saved activations.

On a CPU, the memory of a process counts, and the PyTorch engine keeps what it has freed. A tensor that is larger
than those around it needs room of its own, and what it leaves is seldom filled by others.

In fp32, products add to the gradients of weights in place. What remains are the places that freed tensors leave between
saved ones: 0.1 to 0.3 of the saved activations with MKL's products and 0.2 to 0.5 with oneDNN's, for vocabularies of
8,000 to 60,000 and models of 14M to 124M parameters. Elsewhere, the largest temporary tensors are added, with the
gradient of the largest matrix twice: the chunks of the loss seldom find the place of the one before. JAX's compiler
plans a step as a whole and takes more than this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.optimizer_groups import ORTHOGONAL, Group, optimizer_groups
from vorox.models.spec import ModelSpec

_FP32_BYTES = 4
_PROCESS_BYTES = 48 << 20
"""Libraries that are loaded late, threads, batches that are read."""
_HOLES_OF_SAVED = 0.25
"""Freed places between saved activations, as a fraction of them."""


def cpu_workspace(spec: ModelSpec, config: RunConfig) -> int:
    """Return the bytes of the largest temporary tensors of a step, and of libraries."""
    positions = config.train.micro_batch_rows * config.data.sequence_length_tokens
    largest = max((row.num_elements for row in spec.parameters if len(row.shape) > 1), default=0)
    if not spec.has_whole_logits:
        largest = max(largest, spec.vocab_size * spec.hidden_size)
    update = max((_update_elements(shapes) + _holes(shapes) for shapes in _muon_shapes(spec, config)), default=0)
    length, recomputes = config.data.sequence_length_tokens, config.train.activation_checkpointing
    dropout = dropout_elements(spec, length) if isinstance(spec, DecoderSpec) else 0
    if _adds_in_place(spec, config) and recomputes == "none":
        saved = config.train.micro_batch_rows * spec.saved_activations(length, 1).all_blocks_bytes
        saved += positions * spec.num_layers * dropout
        elements = max(round(_HOLES_OF_SAVED * saved), update)
    else:  # a product, and its place in the chunk before; Muon's update may take one of them
        elements = largest + max(largest, update)
        if isinstance(spec, DecoderSpec):
            elements += positions * _block_elements(spec, recomputes=recomputes == "block")
    if isinstance(spec, DecoderSpec):
        num_sliding = sum(window is not None and window < length for window in spec.layer_windows)
        num_copies, num_kept = (num_sliding, spec.num_layers) if recomputes == "none" else (min(1, num_sliding), 1)
        elements += positions * (window_copy_elements(spec) * num_copies + dropout * num_kept)
    return _PROCESS_BYTES + _FP32_BYTES * elements


def _adds_in_place(spec: ModelSpec, config: RunConfig) -> bool:
    """Whether products add to the gradients of weights in place: in fp32, for the native decoder, not compiled."""
    return isinstance(spec, DecoderSpec) and config.precision.dtype == "fp32" and not config.runtime.compile


def dropout_elements(spec: DecoderSpec, length: int) -> int:
    """Return elements per position that a layer saves for dropout: no fused kernel for attention has it on a CPU.

    These are the attention weights, their mask and their product, the mask of both branches of the residual stream;
    the statistics of the fused kernel do not exist.

    Args:
        spec: The model.
        length: Positions of a row.
    """
    return (3 * length - 1) * spec.num_heads + 2 * spec.hidden_size if spec.dropout_fraction else 0


def window_copy_elements(spec: DecoderSpec) -> int:
    """Return elements per position that a layer with a sliding window saves for documents longer than the window.

    The PyTorch engine attends window by window, each with copies of the keys and values of two windows.
    """
    return 4 * spec.num_kv_heads * spec.head_dim


def _block_elements(spec: DecoderSpec, *, recomputes: bool) -> int:
    """Return elements per position: projections before they are rotated, and gradients of a recomputed block."""
    rotated = spec.attention_width + 2 * spec.num_kv_heads * spec.head_dim if spec.positions == "rope" else 0
    if not recomputes:
        return rotated * spec.num_layers
    return rotated + (4 if spec.is_gated else 2) * spec.intermediate_size


def _update_elements(shapes: Sequence[tuple[int, int]]) -> int:
    """Return elements of an update: directions and new momentum, or directions and what one shape's matrices take.

    Of every matrix of a shape, there are a stacked direction, the normalised one and its product, and two Gram matrices
    of its smaller dimension.
    """
    by_shape = Counter[tuple[int, ...]]()
    for shape in shapes:
        by_shape[shape] += 3 * prod(shape) + 2 * min(shape, default=0) ** 2
    total = sum(map(prod, shapes))
    return max(2 * total, total + max(by_shape.values(), default=0))


def _holes(shapes: Sequence[tuple[int, int]]) -> int:
    """Return elements that an update leaves free, and that its later tensors do not fill.

    These are the place of the new momentum, and one of a product: glibc aligns a tensor inside a larger chunk, so a new
    product does not fit into the place of the one before.
    """
    by_shape = Counter[tuple[int, ...]]()
    for shape in shapes:
        by_shape[shape] += prod(shape)
    return sum(by_shape.values()) + max(by_shape.values(), default=0)


def _muon_shapes(spec: ModelSpec, config: RunConfig) -> list[list[tuple[int, int]]]:
    """Return the shapes of the matrices that Muon updates together, by optimizer group."""
    by_group: dict[Group, list[list[tuple[int, int]]]] = {}
    groups = optimizer_groups(spec, config.optimizer)
    for row in spec.parameters:
        if groups[row.name].rule == ORTHOGONAL.rule:
            by_group.setdefault(groups[row.name], []).append(row.matrix_shapes)
    if config.optimizer.in_backward:  # one parameter of the modules at a time: at most two of these
        return [2 * max(rows, key=lambda shapes: sum(map(prod, shapes))) for rows in by_group.values()]
    return [[shape for shapes in rows for shape in shapes] for rows in by_group.values()]
