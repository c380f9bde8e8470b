"""A slow, obvious decoder in float64 numpy, written from the table of ``models/decoder/spec.py`` and nothing else.

The oracle for everything that claims to know what the canonical parameters mean: names, engines, exports.

Shape legend: B rows, T positions, N heads, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vorox.models.decoder.rotary import scale_frequencies


def _norm(spec: Any, x: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if spec.norm == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps)
    return x * (weights[f"{name}.weight"] + spec.norm_unit_offset) + weights.get(f"{name}.bias", 0)


def _activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name in ("silu", "swiglu"):
        return x / (1 + np.exp(-x))
    if name in ("gelu_tanh", "geglu_tanh"):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert name in ("gelu", "geglu")
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _rotate(spec: Any, x_BTNH: np.ndarray, is_sliding: bool) -> np.ndarray:
    """Scaled frequencies are compared with those of transformers in tests/huggingface/test_rotary.py."""
    width = int(spec.head_dim * spec.rotary_fraction)
    half = width // 2
    if is_sliding and spec.sliding_rope_theta is not None:
        scaled, factor = spec.sliding_rope_theta ** (-2 * np.arange(half) / width), 1.0
    else:
        frequencies = spec.rope_theta ** (-2 * np.arange(half) / width)
        scaled, factor = scale_frequencies(frequencies, spec.rope_theta, spec.rope_scaling)
    turn_TH = factor * np.exp(1j * np.outer(np.arange(x_BTNH.shape[1]), scaled))[None, :, None, :]
    turned = (x_BTNH[..., :half] + 1j * x_BTNH[..., half:width]) * turn_TH
    return np.concatenate([turned.real, turned.imag, x_BTNH[..., width:]], axis=-1)


def _mamba(spec: Any, h_BTD: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """One layer of Mamba-2, position by position."""

    def linear(x: np.ndarray, part: str) -> np.ndarray:
        return x @ weights[f"{name}.{part}.weight"].T + weights.get(f"{name}.{part}.bias", 0)

    rows, length, _ = h_BTD.shape
    inner = spec.mamba_num_heads * spec.mamba_head_dim
    mixed = np.concatenate([linear(h_BTD, part) for part in ("x", "b", "c")], axis=-1)
    taps = weights[f"{name}.conv.weight"][:, 0]
    past = np.pad(mixed, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    mixed = np.stack([past[:, tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])]).sum(0)
    mixed = _activation("silu", mixed + weights.get(f"{name}.conv.bias", 0))
    x, b, c = np.split(mixed, [inner, inner + (mixed.shape[-1] - inner) // 2], axis=-1)
    step = np.maximum(np.log1p(np.exp(linear(h_BTD, "dt") + weights[f"{name}.dt_bias"])), spec.mamba_time_step_min)
    y = np.zeros((rows, length, inner))
    for head in range(spec.mamba_num_heads):
        here = slice(head * spec.mamba_head_dim, (head + 1) * spec.mamba_head_dim)
        group = head * spec.mamba_num_groups // spec.mamba_num_heads
        shared = slice(group * spec.mamba_state_size, (group + 1) * spec.mamba_state_size)
        state = np.zeros((rows, spec.mamba_head_dim, spec.mamba_state_size))
        for t in range(length):
            dt = step[:, t, head, None, None]
            decay = np.exp(-np.exp(weights[f"{name}.A_log"][head]) * dt)
            state = state * decay + dt * x[:, t, here, None] * b[:, t, None, shared]
            y[:, t, here] = (state @ c[:, t, shared, None])[..., 0] + weights[f"{name}.D"][head] * x[:, t, here]
    gated = (y * _activation("silu", linear(h_BTD, "gate"))).reshape(rows, length, spec.mamba_num_groups, -1)
    gated = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + spec.norm_eps)
    return linear(gated.reshape(rows, length, inner) * weights[f"{name}.norm.weight"], "output")


def numpy_logits(spec: Any, parameters: Mapping[str, np.ndarray], tokens_BT: np.ndarray) -> np.ndarray:
    """The decoder in float64, as the parameter table of ``models/decoder/spec.py`` means it."""
    weights = {name: array.astype(np.float64) for name, array in parameters.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    batch, length = tokens_BT.shape
    x = weights["embedding.weight"][tokens_BT] * (math.sqrt(spec.hidden_size) if spec.scale_embeddings else 1)
    if spec.positions == "learned":
        x = x + weights["position_embedding.weight"][:length]
    ahead = np.arange(length)[None, :] - np.arange(length)[:, None]
    for index in range(spec.num_layers):
        block = f"blocks.{index}"
        window = spec.sliding_window_tokens if spec.has_window(index) else length
        hidden = (ahead > 0) | (ahead <= -window)

        def norm(y: np.ndarray, name: str, block: str = block) -> np.ndarray:
            return _norm(spec, y, weights, f"{block}.{name}") if f"{block}.{name}.weight" in weights else y

        def attend(h: np.ndarray, block: str = block, hidden: np.ndarray = hidden, index: int = index) -> np.ndarray:
            heads = [
                linear(h, f"{block}.attention.{part}").reshape(batch, length, -1, spec.head_dim)
                for part in ("query", "key", "value")
            ]
            for place, part in enumerate(("query", "key") if spec.qk_norm else ()):
                scale = weights[f"{block}.attention.{part}_norm.weight"] + spec.norm_unit_offset
                grouped = heads[place].reshape(batch, length, -1, len(scale))
                square = (grouped**2).mean(-1, keepdims=True)
                heads[place] = (grouped / np.sqrt(square + spec.norm_eps) * scale).reshape(heads[place].shape)
            if spec.positions == "rope":
                heads[0], heads[1] = (_rotate(spec, head, spec.has_window(index)) for head in heads[:2])
            groups = spec.num_heads // spec.num_kv_heads
            key, value = (np.repeat(head, groups, axis=2) for head in heads[1:])
            scores = np.einsum("bqnh,bknh->bnqk", heads[0], key) / math.sqrt(
                spec.query_pre_attn_scalar or spec.head_dim
            )
            scores = np.where(hidden, -np.inf, scores)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("bnqk,bknh->bqnh", scores / scores.sum(-1, keepdims=True), value)
            return linear(mixed.reshape(batch, length, -1), f"{block}.attention.output")

        def mlp(h: np.ndarray, name: str) -> np.ndarray:
            inner = linear(h, f"{name}.up")
            if f"{name}.gate.weight" in weights:
                inner = _activation(spec.activation, linear(h, f"{name}.gate")) * inner
            else:
                inner = _activation(spec.activation, inner)
            return linear(inner, f"{name}.down")

        def transform(h: np.ndarray, block: str = block) -> np.ndarray:
            if spec.num_experts is None:
                inner = mlp(h, f"{block}.mlp")
            else:
                inner = np.zeros_like(h)
                for row, place in np.ndindex(batch, length):  # one token after the other, all experts
                    scores = linear(h[row, place], f"{block}.mlp.router")
                    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                    chosen = sorted(range(spec.num_experts), key=lambda expert: -shares[expert])
                    chosen = chosen[: spec.experts_per_token]
                    divisor = sum(shares[chosen]) if spec.normalize_expert_weights else 1
                    for expert in chosen:
                        share = shares[expert] / divisor
                        inner[row, place] += share * mlp(h[row, place], f"{block}.mlp.experts.{expert}")
            return inner

        if spec.layer_pattern is None:
            x = x + norm(attend(norm(x, "attention_norm")), "attention_output_norm")
            x = x + norm(transform(norm(x, "mlp_norm")), "mlp_output_norm")
        elif spec.layer_pattern[index] == "M":
            x = x + _mamba(spec, norm(x, "norm"), weights, f"{block}.mamba")
        else:
            x = x + {"*": attend, "-": transform}[spec.layer_pattern[index]](norm(x, "norm"))
    head = weights.get("head.weight", weights["embedding.weight"])
    return _norm(spec, x, weights, "final_norm") @ head.T
