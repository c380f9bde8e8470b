"""Recompute sampled steps, to find devices that compute wrongly without an error (silent bit errors).

In: the steps of the loop. Out: their results. Every N-th step (``runtime.recompute_every_steps``) is computed twice
from the same state: first without its update, then as usual. Loss, gradient norm and a checksum over the bits of the
gradients must be equal. A sampled step takes twice as long; no bit of the run changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vorox.core.batch import Batch
from vorox.core.engine import Engine, StepResult, StepValues
from vorox.core.errors import ConfigError, NumericalError
from vorox.core.schema import RuntimeConfig
from vorox.records.replay_chain import bits
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.steps.loss_spikes import SKIP_STEP


@dataclass(frozen=True, slots=True)
class StepRecomputation:
    """Trains steps; see the module. ``every_steps`` of ``None`` recomputes none."""

    engine: Engine
    every_steps: int | None
    heartbeat: Heartbeat

    @classmethod
    def open(cls, config: RuntimeConfig, engine: Engine, heartbeat: Heartbeat) -> StepRecomputation:
        """Return the recomputation of a run.

        Raises:
            ConfigError: As ``check_recomputation``.
        """
        check_recomputation(config, engine)
        return cls(engine, config.recompute_every_steps, heartbeat)

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float, max_loss: float | None) -> StepResult:
        """Train a step (``Engine.train_step``), if it is sampled after computing it without the update.

        Raises:
            NumericalError: The two computations have different bits.
        """
        step = batch.step + 1
        if self.every_steps is None or step % self.every_steps:
            return self.engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss)
        first = self.engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=SKIP_STEP).fetch()
        self.heartbeat.progressed()
        result = self.engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss)
        difference = _difference(first, result.fetch())
        if difference:
            raise NumericalError(
                f"Silent bit error: a step computed twice from the same state differs in {difference}",
                where=f"step {step:,}",
                hint="a device computes wrongly without an error, now or permanently; the same command resumes from "
                "the newest checkpoint. If it happens again on the same machine, replace the device",
            )
        return result


def check_recomputation(config: RuntimeConfig, engine: Engine) -> None:
    """Check that the engine repeats steps, if any are to be recomputed.

    Raises:
        ConfigError: The engine does not repeat a step bit for bit.
    """
    determinism = str(engine.environment().get("determinism"))
    if config.recompute_every_steps is not None and not determinism.startswith("bitwise"):
        raise ConfigError(
            f"Steps cannot be recomputed: determinism is {determinism} on this device, so correct bits may differ",
            where="runtime.recompute_every_steps",
            hint="set runtime.determinism=bitwise, or runtime.recompute_every_steps=null",
        )


def _difference(first: StepValues, second: StepValues) -> str:
    """Describe the first difference between two computations of a step; empty if they have the same bits."""
    for name, one, two in (
        ("its loss", first.loss, second.loss),
        ("its gradient norm", first.grad_norm, second.grad_norm),
    ):
        if bits(one) != bits(two):
            return f"{name}: {one!r} and {two!r}"
    return "" if first.gradient_bits == second.gradient_bits else "its gradients, but not in their norm"
