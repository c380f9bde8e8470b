"""Mixture of experts in the native decoder: its parameters, and how engines stack them.

A block with experts has a router, ``blocks.<i>.mlp.router.weight`` ``[experts, hidden]``, and the matrices of an MLP
for every expert, ``blocks.<i>.mlp.experts.<e>.{gate,up,down}.weight``. With ``p = softmax(router(x))`` over all
experts, an MLP layer is ``sum over the k experts with the largest p of w_e expert_e(x)``, where ``w_e`` is ``p_e``,
divided by the sum of the k largest with ``normalize_expert_weights``.

Canonical parameters belong to single experts, so that each is one matrix for Muon, pruning and exports. Engines
stack them: ``split_expert`` gives the name of the stack and the place in it.
"""

from __future__ import annotations

import re

from vorox.core.errors import ConfigError
from vorox.core.schema.model import ModelConfig
from vorox.models.spec import ParameterSpec

DEFAULT_EXPERTS_PER_TOKEN = 2
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(.+)")


def split_expert(name: str) -> tuple[str, int] | None:
    """Return the name of a parameter without its expert, and the expert; ``None`` if it belongs to none."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def resolve_experts(config: ModelConfig) -> int | None:
    """Check the settings of experts, and return how many a token uses; ``None`` without experts.

    Raises:
        ConfigError: The settings contradict each other.
    """
    if config.num_experts is None:
        return None
    per_token = DEFAULT_EXPERTS_PER_TOKEN if config.experts_per_token is None else config.experts_per_token
    if per_token > config.num_experts:
        raise ConfigError(
            f"experts_per_token = {per_token}, but num_experts = {config.num_experts}", where="model",
            hint=f"set it to {config.num_experts} or less",
        )  # fmt: skip
    return per_token


def expert_parameters(
    prefix: str, num_experts: int, width: int, inner: int, *, is_gated: bool, std: float, residual_std: float
) -> list[ParameterSpec]:
    """Return router and experts of a block.

    Args:
        prefix: Start of the canonical names, which ends in ``mlp.``.
        num_experts: Number of experts.
        width: Width of the residual stream.
        inner: Width of an expert.
        is_gated: Whether experts have a gate.
        std: Initial standard deviation.
        residual_std: That of the output projections.
    """
    shape = (num_experts, width)
    rows = [ParameterSpec(f"{prefix}router.weight", shape, "normal", std, True, "router", ("router", "hidden"))]
    into, out = ((inner, width), ("mlp", "hidden")), ((width, inner), ("hidden", "mlp"))
    for expert in range(num_experts):
        rows += [
            ParameterSpec(
                f"{prefix}experts.{expert}.{name}.weight", shape, "normal", std, True, "matrix", axes, is_routed=True
            )
            for name, (shape, axes), std in (
                *([("gate", into, std)] if is_gated else []),
                ("up", into, std),
                ("down", out, residual_std),
            )
        ]
    return rows
