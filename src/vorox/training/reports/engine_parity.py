"""Engine parity: train two engines on the same weights and batches, and measure how far they diverge.

In: two engines, of any framework. Out: per step, the differences of logits (on a few rows, before the step), loss,
gradient norm and all parameters. Each engine keeps its own state, so training is compared, not single steps. The first
quantity beyond its tolerance is reported with its step; nothing is averaged.

Tolerances are for fp32. Logits and losses differ only by the order of summation. AdamW divides by the root of the
second moment, so a gradient that is all rounding error gives an update of the size of the learning rate and of any
sign: parameters are therefore compared with the sum of learning rates, not with rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vorox.core.batch import Batch
from vorox.core.engine import Engine

LOGIT_ROWS = 2
QUANTITIES = ("logits", "loss", "grad_norm", "parameters", "update")


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest differences that count as equal.

    Attributes:
        logits: Absolute, of any logit.
        loss: Relative.
        grad_norm: Relative.
        parameters: Of any parameter element, as a fraction of the sum of learning rates so far.
        update: Norm of the difference of all parameters, as a fraction of the norm of their change since the start.
    """

    logits: float = 1e-4
    loss: float = 1e-5
    grad_norm: float = 1e-5
    parameters: float = 0.1
    update: float = 1e-3


@dataclass(frozen=True, slots=True)
class StepParity:
    """The comparison of one step.

    Attributes:
        step: The step, from 0.
        losses: Losses of the first and the second engine.
        differences: Difference by quantity, in the units of its tolerance.
        worst_parameter: The parameter with the largest difference.
    """

    step: int
    losses: tuple[float, float]
    differences: dict[str, float]
    worst_parameter: str

    def exceeded(self, tolerances: Tolerances) -> str | None:
        """Return the first quantity beyond its tolerance; ``None`` if there is none."""
        for name in QUANTITIES:
            if not self.differences[name] <= getattr(tolerances, name):  # NaN exceeds it
                return name
        return None


def compare(
    first: Engine,
    second: Engine,
    batches: Iterable[Batch],
    num_steps: int,
    *,
    lr: Callable[[int], float],
    weight_decay: Callable[[int], float],
    on_step: Callable[[StepParity], None] | None = None,
) -> list[StepParity]:
    """Train both engines on the same batches and measure their differences.

    Args:
        first: An engine.
        second: Another engine of the same model; it imports the weights of the first.
        batches: At least ``num_steps`` batches.
        num_steps: Number of steps.
        lr: Learning rate of a step.
        weight_decay: Weight decay of a step.
        on_step: Called with each step's comparison.
    """
    start = {name: array.copy() for name, array in first.export_weights()}
    second.import_weights(start.items())
    found: list[StepParity] = []
    lr_sum = 0.0
    for step, batch in zip(range(num_steps), batches, strict=False):
        tokens = batch.tokens_ABT[0][:LOGIT_ROWS]
        logits = float(np.abs(first.logits(tokens) - second.logits(tokens)).max())
        left, right = (
            engine.train_step(batch, lr=lr(step), weight_decay=weight_decay(step)).fetch() for engine in (first, second)
        )
        lr_sum += lr(step)
        largest, worst, update = _distance(start, first, second)
        differences = {
            "logits": logits,
            "loss": _relative(left.loss, right.loss),
            "grad_norm": _relative(left.grad_norm, right.grad_norm),
            "parameters": largest / lr_sum if lr_sum else largest,
            "update": update,
        }
        found.append(StepParity(step, (left.loss, right.loss), differences, worst))
        if on_step is not None:
            on_step(found[-1])
    return found


def _relative(left: float, right: float) -> float:
    return abs(left - right) / max(abs(left), 1e-30)


def _distance(start: dict[str, np.ndarray], first: Engine, second: Engine) -> tuple[float, str, float]:
    """Return the largest element difference, its parameter, and the norm of all differences relative to the change."""
    largest, worst, apart, moved = 0.0, "", 0.0, 0.0
    for (name, left), (_, right) in zip(first.export_weights(), second.export_weights(), strict=True):
        difference = np.abs(left - right)
        apart += float(np.square(difference, dtype=np.float64).sum())
        moved += float(np.square(left - start[name], dtype=np.float64).sum())
        if not float(difference.max()) <= largest:
            largest, worst = float(difference.max()), name
    return largest, worst, float(np.sqrt(apart / moved)) if moved else apart
