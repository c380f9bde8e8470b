"""Mamba-2 layers of the native decoder (Dao and Gu, arXiv 2405.21060): pattern, parameter table, cost.

With I = heads x head width inner channels, G groups and S columns of state, one projection gives the gate (I), the
inputs x (I), B and C (G S each) and a time step per head. A causal convolution mixes x, B and C; the engine's scan
follows, then an RMS norm of each group after the gate, and the output projection. A head decays by
``exp(-exp(A_log) softplus(dt + dt_bias))`` per position, and ``D`` is its skip connection.

``spec`` is a ``DecoderSpec``, whose module imports this one.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.schema.model import MAMBA_KEYS, ModelConfig
from vorox.models.spec import ParameterSpec

FREE_OF_MAMBA = frozenset({"mamba_chunk_tokens", "mamba_time_step_max"})
"""Fields that do not affect the meaning of stored weights."""
SCAN_FLOPS = 21
"""Per inner channel and column of state: 7 in the forward pass, 14 in the backward pass."""


def resolve_pattern(config: ModelConfig) -> dict[str, Any]:
    """Return the pattern with one character per layer, and the number of heads; defaults where there is no Mamba-2.

    Raises:
        ConfigError: The dimensions contradict each other.
    """
    if config.layer_pattern is None or "M" not in config.layer_pattern:
        return {
            "layer_pattern": _repeated(config),
            **{key: ModelConfig.model_fields[key].default for key in MAMBA_KEYS},
        }
    heads = config.mamba_num_heads
    if heads is None:
        heads, rest = divmod(2 * config.hidden_size, config.mamba_head_dim)
        if rest:
            raise ConfigError(
                f"2 x hidden_size = {2 * config.hidden_size} is not a multiple of mamba_head_dim = "
                f"{config.mamba_head_dim}", where="model", hint="or set model.mamba_num_heads",
            )  # fmt: skip
    if heads % config.mamba_num_groups:
        raise ConfigError(
            f"mamba_num_heads = {heads} is not a multiple of mamba_num_groups = {config.mamba_num_groups}",
            where="model",
        )
    return {"layer_pattern": _repeated(config), "mamba_num_heads": heads}


def _repeated(config: ModelConfig) -> str | None:
    pattern = config.layer_pattern
    return None if pattern is None else (pattern * config.num_layers)[: config.num_layers]


def inner_channels(spec: Any) -> int:
    """Return I, the width of x and of the gate."""
    assert spec.mamba_num_heads is not None
    return spec.mamba_num_heads * spec.mamba_head_dim


def conv_channels(spec: Any) -> int:
    """Return the channels of the convolution: x, B and C."""
    return inner_channels(spec) + 2 * spec.mamba_num_groups * spec.mamba_state_size


def mamba_parameters(spec: Any, prefix: str) -> list[ParameterSpec]:
    """Return the rows of one layer. The engine joins the first five matrices; A_log, D and dt_bias never decay."""
    width, inner, heads = spec.hidden_size, inner_channels(spec), spec.mamba_num_heads
    assert heads is not None
    shared = spec.mamba_num_groups * spec.mamba_state_size

    def matrix(name: str, shape: tuple[int, int], axes: tuple[str, str], std: float) -> list[ParameterSpec]:
        rows = [ParameterSpec(f"{prefix}{name}.weight", shape, "normal", std, True, "matrix", axes)]
        if spec.mamba_bias:
            rows.append(ParameterSpec(f"{prefix}{name}.bias", shape[:1], "zeros", 0.0, False, "bias", axes[:1]))
        return rows

    parts = {"gate": inner, "x": inner, "b": shared, "c": shared, "dt": heads}
    rows = [
        row for name, size in parts.items() for row in matrix(name, (size, width), ("mamba", "hidden"), spec.init_std)
    ]
    taps, channels = spec.mamba_conv_tokens, conv_channels(spec)
    std = 1 / sqrt(3 * taps)  # uniform within 1 / sqrt(taps), as Conv1d starts
    axes = ("mamba", "one", "taps")
    rows.append(ParameterSpec(f"{prefix}conv.weight", (channels, 1, taps), "uniform", std, True, "tensor", axes))
    if spec.mamba_conv_bias:
        rows.append(ParameterSpec(f"{prefix}conv.bias", (channels,), "uniform", std, False, "bias", axes[:1]))
    steps = (spec.mamba_time_step_min, max(spec.mamba_time_step_min, spec.mamba_time_step_max))
    by_head = ("state", ("mamba_heads",), True)
    rows.append(ParameterSpec(f"{prefix}dt_bias", (heads,), "time_step", 0.0, False, *by_head, bounds=steps))
    rows.append(ParameterSpec(f"{prefix}A_log", (heads,), "log_range", 0.0, False, *by_head))
    rows.append(ParameterSpec(f"{prefix}D", (heads,), "ones", 0.0, False, *by_head))
    rows.append(ParameterSpec(f"{prefix}norm.weight", (inner,), "ones", 0.0, False, "norm", ("mamba",)))
    return rows + matrix("output", (width, inner), ("hidden", "mamba"), spec.residual_std)


def mamba_scan_flops(spec: Any) -> float:
    """Return the FLOPs of the scans of all layers for one position, forward and backward."""
    count = (spec.layer_pattern or "").count("M")
    return float(count and count * SCAN_FLOPS * inner_channels(spec) * spec.mamba_state_size)


def mixer_saved_per_position(spec: Any) -> list[int]:
    """Return the elements per position that each layer of a pattern saves for its backward pass."""
    elements = {
        "*": 2 * (spec.attention_width + spec.num_kv_heads * spec.head_dim),
        "-": (3 if spec.is_gated else 2) * spec.intermediate_size,
    }
    if "M" in spec.layer_pattern:
        inner, channels, heads = inner_channels(spec), conv_channels(spec), spec.mamba_num_heads
        chunks = 2 * heads * spec.mamba_chunk_tokens  # decay and weights of the positions of a chunk
        elements["M"] = 7 * inner + 3 * channels + 6 * heads + chunks
    return [2 * spec.hidden_size + elements[mixer] for mixer in spec.layer_pattern]  # stream and norm
