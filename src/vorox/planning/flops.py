"""FLOPs of a training step.

``flops_per_token`` is the convention of published MFU figures (PaLM, arXiv 2204.02311, appendix B): ``6 N + 12 L W T``
with N matmul weights (all blocks, and the head once; no embedding look-up, norms or biases), L layers, W the attention
width over all heads and T positions per row. It includes attention to the future, which causal kernels skip;
``causal_flops_per_token`` excludes it, and is a lower bound for any implementation. In a layer with a sliding window or
chunks, T is their size; W may differ by layer. A frozen weight counts 4 instead of 6, because it has no gradient. Of
experts, those count that a token reaches. A Mamba layer with I inner channels and S columns of state adds 21 I S for
its recurrence, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence

from vorox.models.spec import ModelSpec


def flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """Return the FLOPs of forward and backward pass per position: 6 N + 12 L W T."""
    length = sequence_length_tokens
    keys = [length if window is None else min(window, length) for window in spec.layer_windows]
    return _matmul_flops(spec) + _attention_flops(spec, keys)


def causal_flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """Return the same with causal attention only: on average (T + 1) / 2 of the T positions, less behind a window."""
    length = sequence_length_tokens
    windows = [length if window is None else min(window, length) for window in spec.layer_windows]
    visible = _visible_in_chunk if spec.has_chunks else _visible_behind_window
    return _matmul_flops(spec) + _attention_flops(spec, [visible(window, length) for window in windows])


def _matmul_flops(spec: ModelSpec) -> float:
    """Return 2 FLOPs per weight in the forward pass, and 4 in the backward pass, of which 2 are for its gradient."""
    return 6.0 * spec.num_matmul_weights - 2.0 * spec.num_frozen_matmul_weights + spec.scan_flops_per_position


def _attention_flops(spec: ModelSpec, keys: Sequence[float]) -> float:
    """Return the FLOPs of all layers for one query and the keys that it reads in each."""
    widths = spec.attention_widths or (spec.attention_width,) * len(keys)
    return 12.0 * sum(width * count for width, count in zip(widths, keys, strict=True))


def _visible_behind_window(window: int, length: int) -> float:
    """Return the mean number of keys up to a query, within the window."""
    return window - window * (window - 1) / (2 * length)


def _visible_in_chunk(chunk: int, length: int) -> float:
    """Return the mean number of keys up to a query, within its chunk."""
    whole, rest = divmod(length, chunk)
    return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * length)
