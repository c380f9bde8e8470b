"""Mixture of experts in Flax NNX: router, dispatch, grouped products, losses and metrics of routers.

Computes what ``torch_engine/layers/experts.py`` does: every token reaches all experts that its router chose, positions
are sorted by expert and multiplied in contiguous segments. The gradient of the routers' losses is added where the
backward pass reaches the routers; the value of the objective does not change.

Shape legend: B rows, T positions, M = B x T, D width, F width of an expert, E experts, K experts per token, S = M x K
slots, A micro-batches, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig
from vorox.models.decoder.spec import DecoderSpec

Array = jax.Array


class Seen(NamedTuple):
    """What blocks measure: moments at the tap points, and load and losses of routers; ``None`` if not measured."""

    moments: Array | None
    routers: Array | None


@dataclass(frozen=True)
class RouterStep:
    """What routers need in the training of a micro-batch besides their input.

    Attributes:
        config: Weights of the losses.
        scale: One over the global number of targets.
        kept_BT: The positions with a target, which count.
    """

    config: LossConfig
    scale: Array
    kept_BT: Array


def router_step(spec: DecoderSpec, config: LossConfig, scale: Array, labels_BT: Array) -> RouterStep | None:
    """Return the routers' part of a micro-batch; ``None`` for a model without experts."""
    return None if spec.num_experts is None else RouterStep(config, scale, labels_BT != IGNORED_LABEL)


class _Stack(nnx.Module):
    """A matrix of every expert."""

    def __init__(self, num_experts: int, num_out: int, num_in: int) -> None:
        self.weight = nnx.Param(jnp.zeros((num_experts, num_out, num_in)))

    def __call__(self, x_SD: Array, load_E: Array) -> Array:
        weight_EOD = self.weight[...].astype(x_SD.dtype)
        return jax.lax.ragged_dot(x_SD, weight_EOD.swapaxes(1, 2), load_E)


class _Stacks(nnx.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        assert spec.num_experts is not None
        into = spec.num_experts, spec.intermediate_size, spec.hidden_size
        self.gate = _Stack(*into) if spec.is_gated else None
        self.up = _Stack(*into)
        self.down = _Stack(spec.num_experts, spec.hidden_size, spec.intermediate_size)


class _Router(nnx.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((num_experts, width)))


class Experts(nnx.Module):
    """Takes the place of the MLP in a block."""

    def __init__(self, spec: DecoderSpec, activate: Callable[[Array], Array]) -> None:
        assert spec.num_experts is not None
        assert spec.experts_per_token is not None
        self._num_experts, self._num_chosen = spec.num_experts, spec.experts_per_token
        self._normalizes, self._activate = spec.normalize_expert_weights, activate
        self.router, self.experts = _Router(spec.num_experts, spec.hidden_size), _Stacks(spec)

    def __call__(self, x_BTD: Array, step: RouterStep | None) -> tuple[Array, Array | None]:
        """Return the output, and load per expert, load-balancing loss and z-loss ``[E + 2]`` over the targets."""
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_MK, experts_MK, measured = self._route(x_MD, step)
        order_S = jnp.argsort(experts_MK.reshape(-1), stable=True)
        load_E = (experts_MK.reshape(-1, 1) == jnp.arange(self._num_experts)).sum(0).astype(jnp.int32)
        slots_SD = jnp.repeat(x_MD, self._num_chosen, axis=0)
        y_SD = self._compute(slots_SD.at[order_S].get(unique_indices=True), load_E)
        y_SD = y_SD.at[jnp.argsort(order_S)].get(unique_indices=True)
        y_MKD = y_SD.reshape(*experts_MK.shape, -1)
        return (y_MKD * weights_MK[..., None].astype(y_MKD.dtype)).sum(1).reshape(x_BTD.shape), measured

    def _compute(self, x_SD: Array, load_E: Array) -> Array:
        hidden_SF = self.experts.up(x_SD, load_E)
        if self.experts.gate is None:
            return self.experts.down(self._activate(hidden_SF), load_E)
        return self.experts.down(self._activate(self.experts.gate(x_SD, load_E)) * hidden_SF, load_E)

    def _route(self, x_MD: Array, step: RouterStep | None) -> tuple[Array, Array, Array | None]:
        """Return weights and indices of the chosen experts, in fp32, and what the router measures in training."""
        logits_ME = x_MD.astype(jnp.float32) @ self.router.weight[...].T
        probabilities_ME = jax.nn.softmax(logits_ME)
        weights_MK, experts_MK = jax.lax.top_k(probabilities_ME, self._num_chosen)
        measured = None
        if step is not None:
            losses, measured = self._losses(logits_ME, probabilities_ME, experts_MK, step)
            weights_MK = _add_gradient(weights_MK, losses, step.scale)
        if self._normalizes:
            weights_MK = weights_MK / weights_MK.sum(-1, keepdims=True)
        return weights_MK, experts_MK, measured

    def _losses(
        self, logits_ME: Array, probabilities_ME: Array, experts_MK: Array, step: RouterStep
    ) -> tuple[Array, Array]:
        kept_M1 = step.kept_BT.reshape(-1, 1)
        chosen_ME = (experts_MK[..., None] == jnp.arange(self._num_experts)).sum(1)
        load_E = jnp.where(kept_M1, chosen_ME, 0).sum(0).astype(jnp.float32)
        share_E = load_E / jnp.maximum(load_E.sum(), 1)
        balance = self._num_experts * (share_E * jnp.where(kept_M1, probabilities_ME, 0.0).sum(0)).sum()
        square = jnp.where(kept_M1[:, 0], jnp.square(jax.nn.logsumexp(logits_ME, axis=-1)), 0.0).sum()
        measured = jnp.concatenate([load_E, jnp.stack([balance, square])])
        losses = step.config.load_balancing_weight * balance + step.config.router_z_loss_weight * square
        return losses, jax.lax.stop_gradient(measured)


@jax.custom_vjp
def _add_gradient(x: Array, losses: Array, scale: Array) -> Array:
    """Return ``x``, and add the gradient of ``scale * losses`` to the backward pass."""
    del losses, scale
    return x


def _forward(x: Array, losses: Array, scale: Array) -> tuple[Array, Array]:
    del losses
    return x, scale


def _backward(scale: Array, d_x: Array) -> tuple[Array, Array, Array]:
    return d_x, scale, jnp.zeros_like(scale)


_add_gradient.defvjp(_forward, _backward)


def metrics(seen_ALX: Array | None, spec: DecoderSpec, config: LossConfig, scale: Array) -> dict[str, Array]:
    """Return the metrics of the routers of a step by name; ``scale`` is one over the number of targets."""
    if seen_ALX is None:
        return {}
    assert spec.num_experts is not None
    assert spec.experts_per_token is not None
    load_LE, losses_L2 = jnp.split(seen_ALX.sum(0), [spec.num_experts], axis=1)
    share_LE = load_LE / jnp.maximum(load_LE.sum(1, keepdims=True), 1)
    busiest_L, entropy_L = share_LE.max(1), -jax.scipy.special.xlogy(share_LE, share_LE).sum(1)
    losses_2 = losses_L2.mean(0) * scale
    found = {
        "router/load_balancing_loss": losses_2[0],
        "router/load_max_to_mean": busiest_L.mean() * spec.num_experts,
        "router/load_entropy_fraction": entropy_L.mean() / math.log(spec.num_experts),
        "router/busiest_expert_fraction": busiest_L.max() * spec.experts_per_token,
    }
    return found | ({"router/z_loss": losses_2[1]} if config.router_z_loss_weight else {})
