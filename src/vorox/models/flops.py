"""FLOPs of a training step.

``flops_per_token`` is the convention of published MFU figures (PaLM, arXiv 2204.02311, appendix B): ``6 N + 12 L W T``
with N matmul weights (all blocks, and the head once; no embedding look-up, norms or biases), L layers, W the attention
width over all heads and T positions per row. It includes attention to the future, which causal kernels skip;
``causal_flops_per_token`` excludes it, and is a lower bound for any implementation. In a layer with a sliding window, T
is the window. A frozen weight counts 4 instead of 6, because it has no gradient. A Mamba-2 layer with I inner channels
and S columns of state adds 21 I S for its recurrence, as in Megatron-LM.
"""

from __future__ import annotations

from vorox.models.spec import ModelSpec


def flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """Return the FLOPs of forward and backward pass per position: 6 N + 12 L W T."""
    length = sequence_length_tokens
    keys = sum(length if window is None else min(window, length) for window in spec.layer_windows)
    return _matmul_flops(spec) + _attention_flops_per_position(spec) * keys


def causal_flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """Return the same with causal attention only: on average (T + 1) / 2 of the T positions, less behind a window."""
    length = sequence_length_tokens
    windows = [length if window is None else min(window, length) for window in spec.layer_windows]
    visible = sum(window - window * (window - 1) / (2 * length) for window in windows)
    return _matmul_flops(spec) + _attention_flops_per_position(spec) * visible


def _matmul_flops(spec: ModelSpec) -> float:
    """Return 2 FLOPs per weight in the forward pass, and 4 in the backward pass, of which 2 are for its gradient."""
    return 6.0 * spec.num_matmul_weights - 2.0 * spec.num_frozen_matmul_weights + spec.scan_flops_per_position


def _attention_flops_per_position(spec: ModelSpec) -> float:
    """Return the FLOPs of one layer for one query and one key."""
    return 12.0 * spec.attention_width
