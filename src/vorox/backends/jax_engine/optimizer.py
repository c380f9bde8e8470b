"""AdamW and Muon with gradient clipping and a finite check, as one pure function.

AdamW uses optax's moments and bias correction; learning rate and weight decay are arguments of the step. Muon
orthogonalises the momentum of every canonical matrix by five Newton-Schulz iterations (Keller Jordan's quintic). If the
loss or the gradient norm is not finite, no bit of the state changes.

State: ``params``, first and second moments (``exp_avg``, ``exp_avg_sq``) of the AdamW leaves, Muon's ``momentum``,
``weights_ema``, the moving average of the parameters (``train.ema_decay``), and ``updates``, the number of updates.

Shape legend: O rows (outputs), I columns (inputs) of a matrix, possibly behind an axis of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vorox.backends.jax_engine.parameters import ParameterLayout, Tree
from vorox.core.schema import OptimizerConfig, TrainConfig
from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL
from vorox.models.pruning import pruned_matrices
from vorox.models.stored.engine_state import AVERAGE

Array = jax.Array
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7

Select = Callable[[Any, Any], Any]
"""(new tree, old tree) -> the new one if the step is applied, else the old one."""

KINDS = ("exp_avg", "exp_avg_sq", "momentum", AVERAGE)


class State(NamedTuple):
    """The training state: parameters and optimizer state, fp32."""

    params: Tree
    exp_avg: Tree
    exp_avg_sq: Tree
    momentum: Tree
    weights_ema: Tree
    updates: Array

    @property
    def moments(self) -> dict[str, Tree]:
        """The non-empty kinds of optimizer state, for checkpoints and fingerprints."""
        return {kind: tree for kind in KINDS if (tree := getattr(self, kind))}


class Optimizer:
    """The update rule."""

    def __init__(self, config: OptimizerConfig, train: TrainConfig, layout: ParameterLayout) -> None:
        self._config, self._ema_decay, self._ema_warmup = config, train.ema_decay, train.ema_warmup
        self.groups = layout.groups(config)
        pruned = {matrix.name for matrix in pruned_matrices(layout.spec)} if train.keep_zeros else set[str]()
        self._kept_zeros = frozenset(map(layout.leaf_of, pruned))

    def trained(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Return the leaves that are not frozen."""
        return {leaf: array for leaf, array in params.items() if not self.groups[leaf].is_frozen}

    def init(self, params: Tree) -> State:
        """Return the state with zeroed moments; the average starts at the parameters."""
        trained = self.trained(params)
        adaptive = {leaf: array for leaf, array in trained.items() if self.groups[leaf].rule != ORTHOGONAL.rule}
        orthogonal = {leaf: array for leaf, array in trained.items() if leaf not in adaptive}
        zeros = jax.tree.map(jnp.zeros_like, adaptive)
        return State(
            params, zeros, jax.tree.map(jnp.zeros_like, adaptive), jax.tree.map(jnp.zeros_like, orthogonal),
            {} if self._ema_decay is None else trained, jnp.zeros((), jnp.float32),
        )  # fmt: skip

    def step(
        self,
        state: State,
        gradients: Mapping[str, Array],
        *,
        lr: Array,
        weight_decay: Array,
        loss: Array,
        max_loss: Array,
    ) -> tuple[State, Array, Array]:
        """Update from the accumulated gradients.

        Args:
            state: The state before the step.
            gradients: Gradients of the mean loss, one per leaf that is trained.
            lr: Learning rate of AdamW; Muon's is scaled by ``muon_lr / lr`` of the configuration, and each leaf's by
                the factor of its group.
            weight_decay: Decoupled weight decay of the decayed leaves.
            loss: The mean loss.
            max_loss: Change nothing if the loss is larger.

        Returns:
            The new state, the gradient norm before clipping, and whether loss and norm are finite.
        """
        gradients = self._keep_zeros(state.params, gradients)
        grad_norm = optax.tree.norm(dict(gradients))
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        applied = finite & (loss <= max_loss)
        if self._config.clip_norm is not None:
            divisor = jnp.maximum((grad_norm + 1e-6) / self._config.clip_norm, 1.0)
            gradients = {leaf: gradient / divisor for leaf, gradient in gradients.items()}

        def select(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda after, before: jnp.where(applied, after, before), new, old)

        # Selecting the moments before the parameters are computed from them lets XLA update every buffer in place;
        # selecting everything at the end costs 4% of a small model's step.
        updates = select(state.updates + 1, state.updates)
        exp_avg, exp_avg_sq, new_params = self._adam(state, gradients, updates, lr, weight_decay, select)
        momentum, muon_params = self._muon(state, gradients, lr, weight_decay, select)
        new_params = self._keep_zeros(state.params, new_params | muon_params)
        params = {
            leaf: select(new_params[leaf], old) if leaf in new_params else old for leaf, old in state.params.items()
        }
        average = self._average(state.weights_ema, params, updates, select)
        return State(params, exp_avg, exp_avg_sq, momentum, average, updates), grad_norm, finite

    def _keep_zeros(self, params: Tree, changed: Mapping[str, Array]) -> dict[str, Array]:
        """Return gradients or new parameters with zeros where pruned parameters are zero (``train.keep_zeros``)."""
        return {
            leaf: jnp.where(params[leaf] == 0, 0.0, array) if leaf in self._kept_zeros else array
            for leaf, array in changed.items()
        }

    def _average(self, before: Tree, params: Tree, updates: Array, select: Select) -> Tree:
        """Return the moving average after an update; an empty tree without one."""
        if self._ema_decay is None:
            return before
        decay = jnp.float32(self._ema_decay)
        if self._ema_warmup:
            decay = jnp.minimum(decay, (1 + updates) / (10 + updates))
        return {leaf: select(old + (params[leaf] - old) * (1 - decay), old) for leaf, old in before.items()}

    def _adam(
        self, state: State, gradients: Mapping[str, Array], updates: Array, lr: Array, weight_decay: Array,
        select: Select,
    ) -> tuple[Tree, Tree, dict[str, Array]]:  # fmt: skip
        """Return AdamW's moments and the updated parameters of its leaves."""
        config, adaptive = self._config, {leaf: gradients[leaf] for leaf in state.exp_avg}
        exp_avg = select(optax.tree.update_moment(adaptive, state.exp_avg, config.beta1, 1), state.exp_avg)
        squares = optax.tree.update_moment_per_elem_norm(adaptive, state.exp_avg_sq, config.beta2, 2)
        exp_avg_sq = select(squares, state.exp_avg_sq)
        count = updates.astype(jnp.int32)
        mean: Any = optax.tree.bias_correction(exp_avg, config.beta1, count)
        mean_square: Any = optax.tree.bias_correction(exp_avg_sq, config.beta2, count)
        params: dict[str, Array] = {}
        for leaf in exp_avg:
            direction = mean[leaf] / (jnp.sqrt(mean_square[leaf]) + config.eps)
            group, rate = self.groups[leaf], self._rate(lr, leaf)
            decay = weight_decay if group.rule == DECAYED.rule else 0.0
            params[leaf] = state.params[leaf] * (1 - rate * decay) - rate * direction
        return exp_avg, exp_avg_sq, params

    def _rate(self, lr: Array, leaf: str) -> Array:
        scale = self.groups[leaf].lr_scale
        return lr if scale == 1 else lr * scale

    def _muon(
        self, state: State, gradients: Mapping[str, Array], lr: Array, weight_decay: Array, select: Select
    ) -> tuple[Tree, dict[str, Array]]:
        """Return Muon's momentum and the updated parameters of its leaves."""
        config = self._config
        momentum: dict[str, Array] = {}
        params: dict[str, Array] = {}
        for leaf, old in state.momentum.items():
            muon_lr = self._rate(config.muon_lr / config.lr * lr, leaf)
            gradient, beta = gradients[leaf], config.muon_momentum
            momentum[leaf] = select(old + (gradient - old) * (1 - beta), old)
            nesterov = gradient + (momentum[leaf] - gradient) * beta
            rows, columns = gradient.shape[-2:]
            rate = muon_lr * math.sqrt(max(1.0, rows / columns))
            params[leaf] = state.params[leaf] * (1 - muon_lr * weight_decay) - rate * orthogonalise(nesterov)
        return momentum, params


def orthogonalise(matrices_OI: Array) -> Array:
    """Bring all singular values of a matrix near 1; in bf16 on accelerators, where it is much faster, else in fp32."""
    x = matrices_OI if jax.default_backend() == "cpu" else matrices_OI.astype(jnp.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).astype(matrices_OI.dtype)
