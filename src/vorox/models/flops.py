"""What a training step costs in arithmetic, by one definition each.

``flops_per_token`` is the convention that published MFU figures use: ``6 N + 12 L W T``, with N the weights that are
multiplied by (all blocks and the head once; no embedding look-up, no norms or biases), W the width of attention over
all heads and T the positions of a row (PaLM, arXiv 2204.02311, appendix B). It counts attention to the future, which
causal kernels skip; ``causal_flops_per_token`` does not, and is what no implementation gets around.
"""

from __future__ import annotations

from vorox.models.spec import ModelSpec


def num_matmul_weights(spec: ModelSpec) -> int:
    """Elements of all matrices that every token is multiplied by; a tied embedding counts once, as the head."""
    matrices = sum(parameter.num_elements for parameter in spec.parameters if parameter.kind == "matrix")
    return matrices + spec.vocab_size * spec.hidden_size


def flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """FLOPs of forward and backward pass per position: 6 N + 12 L W T."""
    return 6.0 * num_matmul_weights(spec) + _attention_flops(spec, sequence_length_tokens)


def causal_flops_per_token(spec: ModelSpec, sequence_length_tokens: int) -> float:
    """The same with attention to the past only: on average (T + 1) / 2 of the T positions."""
    visible_fraction = (sequence_length_tokens + 1) / (2 * sequence_length_tokens)
    return 6.0 * num_matmul_weights(spec) + visible_fraction * _attention_flops(spec, sequence_length_tokens)


def _attention_flops(spec: ModelSpec, sequence_length_tokens: int) -> float:
    width = spec.num_heads * spec.head_dim
    return 12.0 * spec.num_layers * width * sequence_length_tokens
