"""Two engines side by side: the same weights, the same batches, and how far their numbers drift apart.

``compare`` takes engines, so it knows no framework. Before each step it compares the logits of a few rows, after it the
loss, the norm of the gradient and every parameter. Both engines keep their own state throughout: what is compared is
training, not single steps. The first quantity beyond its tolerance is named with its step; nothing is averaged away.

Tolerances are for fp32. Logits and losses differ by the order of sums alone. AdamW divides by the root of the second
moment, so where a gradient is all rounding the update has the size of the learning rate and any sign: parameters are
held to a fraction of the way that the learning rate allows, not to rounding.
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
        parameters: Of any element of any parameter, as a fraction of the sum of learning rates so far.
        update: Norm of the difference of all parameters, as a fraction of the norm of what training changed.
    """

    logits: float = 1e-4
    loss: float = 1e-5
    grad_norm: float = 1e-5
    parameters: float = 0.1
    update: float = 1e-3


@dataclass(frozen=True, slots=True)
class StepParity:
    """One step of both.

    Attributes:
        step: From 0.
        losses: Of the first and the second engine.
        differences: By quantity, in the units of its tolerance.
        worst_parameter: The one that ``parameters`` is about.
    """

    step: int
    losses: tuple[float, float]
    differences: dict[str, float]
    worst_parameter: str

    def exceeded(self, tolerances: Tolerances) -> str | None:
        """The first quantity that is not equal, if there is one."""
        for name in QUANTITIES:
            if not self.differences[name] <= getattr(tolerances, name):  # also where it is not a number
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
    """Train both on the same batches and measure how far apart they are.

    Args:
        first: An engine.
        second: Another one of the same model; it takes over the weights of the first.
        batches: At least ``num_steps``.
        num_steps: Steps.
        lr: Learning rate of a step.
        weight_decay: Of a step.
        on_step: Told each as it is done.
    """
    start = {name: array.copy() for name, array in first.export_weights()}
    second.import_weights(start.items())
    found: list[StepParity] = []
    way = 0.0
    for step, batch in zip(range(num_steps), batches, strict=False):
        tokens = batch.tokens_ABT[0][:LOGIT_ROWS]
        logits = float(np.abs(first.logits(tokens) - second.logits(tokens)).max())
        left, right = (
            engine.train_step(batch, lr=lr(step), weight_decay=weight_decay(step)).fetch() for engine in (first, second)
        )
        way += lr(step)
        largest, worst, update = _distance(start, first, second)
        differences = {
            "logits": logits,
            "loss": _relative(left.loss, right.loss),
            "grad_norm": _relative(left.grad_norm, right.grad_norm),
            "parameters": largest / way if way else largest,
            "update": update,
        }
        found.append(StepParity(step, (left.loss, right.loss), differences, worst))
        if on_step is not None:
            on_step(found[-1])
    return found


def _relative(left: float, right: float) -> float:
    return abs(left - right) / max(abs(left), 1e-30)


def _distance(start: dict[str, np.ndarray], first: Engine, second: Engine) -> tuple[float, str, float]:
    """Largest difference of an element, whose it is, and the norm of all relative to that of the whole way."""
    largest, worst, apart, moved = 0.0, "", 0.0, 0.0
    for (name, left), (_, right) in zip(first.export_weights(), second.export_weights(), strict=True):
        difference = np.abs(left - right)
        apart += float(np.square(difference, dtype=np.float64).sum())
        moved += float(np.square(left - start[name], dtype=np.float64).sum())
        if not float(difference.max()) <= largest:
            largest, worst = float(difference.max()), name
    return largest, worst, float(np.sqrt(apart / moved)) if moved else apart
