"""Clipping, the finite check and the update, as one pure function of gradients and state.

AdamW's directions are optax's ``scale_by_adam``; decay and learning rate are arguments of the step, from the stateless
schedule. Muon's are momentum whose matrices are brought near their closest orthogonal ones by five Newton-Schulz steps
(the quintic of Keller Jordan's Muon), every canonical matrix for itself. A step is finite when its loss and gradient
norm are; if it is not, no bit of the state changes.

State: ``params``, first and second moments (``exp_avg``, ``exp_avg_sq``) of the AdamW leaves, Muon's ``momentum``,
and ``updates``, the number of updates.

Shape legend: O rows (outputs), I columns (inputs) of a matrix, possibly behind an axis of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vorox.backends.jax_engine.layout import DECAYED, ORTHOGONAL, Layout, Tree
from vorox.core.schema import OptimizerConfig

Array = jax.Array
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7

KINDS = ("exp_avg", "exp_avg_sq", "momentum")


class State(NamedTuple):
    """Everything that training changes: a tree of arrays, fp32."""

    params: Tree
    exp_avg: Tree
    exp_avg_sq: Tree
    momentum: Tree
    updates: Array

    @property
    def moments(self) -> dict[str, Tree]:
        """Kinds of optimizer state that there are, for checkpoints and fingerprints."""
        return {kind: tree for kind in KINDS if (tree := getattr(self, kind))}


class Optimizer:
    """The update rule."""

    def __init__(self, config: OptimizerConfig, layout: Layout) -> None:
        self._config = config
        muon = config.name == "muon"
        self.groups = {
            leaf: layout.group(leaf, muon=muon, decay_embeddings=config.decay_embeddings) for leaf in layout.leaves
        }
        self._adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)

    def init(self, params: Tree) -> State:
        """Nothing learned about the gradients yet."""
        adaptive = {leaf: array for leaf, array in params.items() if self.groups[leaf] != ORTHOGONAL}
        orthogonal = {leaf: array for leaf, array in params.items() if self.groups[leaf] == ORTHOGONAL}
        zeros = jax.tree.map(jnp.zeros_like, adaptive)
        return State(
            params, zeros, jax.tree.map(jnp.zeros_like, adaptive), jax.tree.map(jnp.zeros_like, orthogonal),
            jnp.zeros((), jnp.float32),
        )  # fmt: skip

    def step(
        self, state: State, gradients: Mapping[str, Array], *, lr: Array, weight_decay: Array, loss: Array
    ) -> tuple[State, Array, Array]:
        """Update from the accumulated gradients.

        Args:
            state: Before the step.
            gradients: Of the mean loss, one per leaf.
            lr: Learning rate of AdamW; Muon's follows it in proportion to the two peaks.
            weight_decay: Of the decayed leaves, per unit of learning rate.
            loss: Must be finite too.

        Returns:
            The state after it, the gradient's norm before clipping, and whether all was finite.
        """
        config = self._config
        grad_norm = optax.tree.norm(dict(gradients))
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        if config.clip_norm is not None:
            divisor = jnp.maximum((grad_norm + 1e-6) / config.clip_norm, 1.0)
            gradients = {leaf: gradient / divisor for leaf, gradient in gradients.items()}
        adaptive = {leaf: gradients[leaf] for leaf in state.exp_avg}
        count = state.updates.astype(jnp.int32)
        before = optax.ScaleByAdamState(count, state.exp_avg, state.exp_avg_sq)
        directions: Any
        adam: Any
        directions, adam = self._adam.update(adaptive, before, state.params)
        params: dict[str, Array] = {}
        for leaf, direction in directions.items():
            decay = weight_decay if self.groups[leaf] == DECAYED else 0.0
            params[leaf] = state.params[leaf] * (1 - lr * decay) - lr * direction
        momentum: dict[str, Array] = {}
        muon_lr = config.muon_lr / config.lr * lr
        for leaf, old in state.momentum.items():
            gradient, beta = gradients[leaf], config.muon_momentum
            momentum[leaf] = old + (gradient - old) * (1 - beta)
            nesterov = gradient + (momentum[leaf] - gradient) * beta
            rows, columns = gradient.shape[-2:]
            rate = muon_lr * math.sqrt(max(1.0, rows / columns))
            params[leaf] = state.params[leaf] * (1 - muon_lr * weight_decay) - rate * orthogonalise(nesterov)
        params = {leaf: params[leaf] for leaf in state.params}
        after = State(params, dict(adam.mu), dict(adam.nu), momentum, state.updates + 1)
        kept: Any = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        return kept, grad_norm, finite


def orthogonalise(matrices_OI: Array) -> Array:
    """Bring all singular values near 1. In bf16 on accelerators, where it is many times faster, else in fp32."""
    x = matrices_OI if jax.default_backend() == "cpu" else matrices_OI.astype(jnp.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).astype(matrices_OI.dtype)
