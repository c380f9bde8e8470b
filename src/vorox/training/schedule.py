"""How long a run is, and the learning rate and weight decay of every step.

In: the configuration and how much text there is. Out: a ``Horizon`` (total and warm-up steps) and a ``Schedule``, a
pure function of the step index. Nothing here has state, so there is nothing to save. The horizon is fixed once and
recorded in every checkpoint, so that a cache that grows cannot bend the learning rate of a run that resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.extensions import is_extension, load_function
from vorox.core.pluralize import pluralize
from vorox.core.schema import OptimizerConfig, RunConfig, ScheduleConfig

Shape = Callable[[int, int, int], float]
"""Share of the peak at a step (from 0), of so many steps in all and in the warm-up."""

_MANY_PASSES = 16
"""Repeated text is worth next to nothing from here on (Muennighoff et al., 2023, arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of a run in optimizer steps.

    Attributes:
        total_steps: Steps of the whole run.
        warmup_steps: Steps over which the learning rate rises; may exceed ``total_steps`` (see ``warning``).
        tokens_per_step: Positions of a global batch.
        dataset_tokens: Tokens of one pass over the full dataset, as estimated when this was fixed.
        dataset_error_fraction: Standard error of that estimate; ``None`` where it was exact or cannot be known.
    """

    total_steps: int
    warmup_steps: int
    tokens_per_step: int
    dataset_tokens: int | None = None
    dataset_error_fraction: float | None = None

    @property
    def warning(self) -> str | None:
        """What a user should know about this length, if anything."""
        if self.warmup_steps < self.total_steps or self.warmup_steps == 0:
            return None
        return (
            f"the warm-up takes {pluralize(self.warmup_steps, 'step')} and the run only {self.total_steps:,}: "
            "the learning rate never comes down and may never reach its peak"
        )

    def repetition_warning(self, dataset_tokens: float) -> str | None:
        """What a user should know about a run that reads its text over and over, if it does."""
        passes = self.total_steps * self.tokens_per_step / max(1.0, dataset_tokens)
        if passes <= _MANY_PASSES:
            return None
        return (
            f"the run passes over its text {passes:,.0f} times: after some {_MANY_PASSES} a model recites it and "
            "learns little more; give it more text in data.sources, or a shorter train.num_tokens or train.num_steps"
        )

    def warnings(self, dataset_tokens: float) -> list[str]:
        """What a user should know about this length and so much text, before anything is cached."""
        found = (self.warning, self.step_warning(dataset_tokens), self.repetition_warning(dataset_tokens))
        return [text for text in found if text is not None]

    def step_warning(self, dataset_tokens: float) -> str | None:
        """What a user should know about steps that are larger than the text, if they are."""
        if self.tokens_per_step <= dataset_tokens:
            return None
        return (
            f"a step has {pluralize(self.tokens_per_step, 'token')} and the text only {dataset_tokens:,.0f}: "
            "every step reads all of it; lower data.sequence_length_tokens or train.global_batch_sequences"
        )

    def cache_warning(self, cached_rows: int, global_batch_sequences: int) -> str | None:
        """What a user should know about a warm-up that is longer than what is cached by now, if only a part is."""
        steps = cached_rows // global_batch_sequences
        if self.dataset_tokens is None or self.warmup_steps <= steps:
            return None
        if cached_rows * self.tokens_per_step >= self.dataset_tokens * global_batch_sequences:
            return None
        return (
            f"the warm-up of {pluralize(self.warmup_steps, 'step')} was fixed by the full dataset of about "
            f"{self.dataset_tokens:,} tokens; {pluralize(cached_rows, 'row')} cached, {pluralize(steps, 'step')} of "
            "the run: the rate would still rise when they have all been read"
        )

    def to_json(self) -> dict[str, int | float]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Horizon:
        tokens, error = value.get("dataset_tokens"), value.get("dataset_error_fraction")
        return cls(
            int(value["total_steps"]), int(value["warmup_steps"]), int(value["tokens_per_step"]),
            None if tokens is None else int(tokens), None if error is None else float(error),
        )  # fmt: skip


def horizon(config: RunConfig, *, num_train_rows: int, full_dataset_tokens: int) -> Horizon:
    """Turn the configured lengths into steps, rounding up.

    Args:
        config: The run; exactly one of the three lengths of ``train`` and at most one warm-up are given.
        num_train_rows: Rows of one pass over all sources.
        full_dataset_tokens: Estimated tokens of one pass over the *full* dataset, whatever part of it is cached by now.

    Raises:
        ConfigError: No length or several, or several warm-ups.
    """
    train, batch_rows = config.train, config.train.global_batch_sequences
    tokens_per_step = batch_rows * config.data.sequence_length_tokens
    lengths = {
        "train.num_steps": train.num_steps,
        "train.num_tokens": None if train.num_tokens is None else -(-train.num_tokens // tokens_per_step),
        "train.num_epochs": None
        if train.num_epochs is None
        else math.ceil(
            Fraction(str(train.num_epochs)) * Fraction(str(train.epoch_dataset_fraction)) * num_train_rows / batch_rows
        ),
    }
    given = {key: steps for key, steps in lengths.items() if steps is not None}
    if len(given) != 1:
        raise ConfigError(
            f"a run needs exactly one length, this one has {len(given)}",
            where=", ".join(given or lengths),
            hint="set one of train.num_steps, train.num_tokens, train.num_epochs",
        )
    warmup_steps = _warmup_steps(config.schedule, tokens_per_step, full_dataset_tokens)
    return Horizon(max(1, *given.values()), warmup_steps, tokens_per_step)


def _warmup_steps(config: ScheduleConfig, tokens_per_step: int, full_dataset_tokens: int) -> int:
    choices = {
        "schedule.warmup_steps": config.warmup_steps,
        "schedule.warmup_tokens": None if config.warmup_tokens is None else -(-config.warmup_tokens // tokens_per_step),
        "schedule.warmup_fraction": None
        if config.warmup_fraction is None
        else math.ceil(Fraction(str(config.warmup_fraction)) * full_dataset_tokens / tokens_per_step),
    }
    given = {key: steps for key, steps in choices.items() if steps is not None}
    if len(given) > 1:
        raise ConfigError("more than one warm-up is given", where=", ".join(given), hint="keep one of them")
    return next(iter(given.values()), 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate and weight decay as functions of the step index (from 0)."""

    config: ScheduleConfig
    peak_lr: float
    peak_weight_decay: float
    total_steps: int
    warmup_steps: int
    lr_function: Shape | None = None
    weight_decay_function: Shape | None = None

    @classmethod
    def of(cls, config: ScheduleConfig, optimizer: OptimizerConfig, horizon: Horizon) -> Schedule:
        """Return the schedule of a run.

        Raises:
            ConfigError: A function that the configuration names cannot be imported.
        """
        return cls(
            config, optimizer.lr, optimizer.weight_decay, horizon.total_steps, horizon.warmup_steps,
            _function(config.name, "schedule.name"), _function(config.weight_decay, "schedule.weight_decay"),
        )  # fmt: skip

    def lr(self, step: int) -> float:
        """Learning rate of a step. Reaches the peak with the last step of the warm-up and the final value with the
        last step of the run."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        return self.peak_lr * self._fraction(step)

    def _fraction(self, step: int) -> float:
        """Share of the peak after the warm-up."""
        config, final = self.config, self.config.min_lr_fraction
        if self.lr_function is not None:
            return self._share_of(self.lr_function, step, "schedule.name")
        if config.name == "constant":
            return 1.0
        if config.name == "wsd":
            decay_steps = round(config.decay_fraction * self.total_steps)
            into_decay = step + 1 - (self.total_steps - decay_steps)
            return 1.0 if into_decay <= 0 else _linear(min(into_decay, decay_steps) / decay_steps, final)
        shape = _cosine if config.name == "cosine" else _linear
        return shape(_share(step - self.warmup_steps, self.total_steps - self.warmup_steps), final)

    def weight_decay(self, step: int) -> float:
        """Weight decay of a step, over the whole run and without warm-up."""
        name, final = self.config.weight_decay, self.config.final_weight_decay_fraction
        if self.weight_decay_function is not None:
            return self.peak_weight_decay * self._share_of(self.weight_decay_function, step, "schedule.weight_decay")
        if name == "constant":
            return self.peak_weight_decay
        shape = _cosine if name == "cosine" else _linear
        return self.peak_weight_decay * shape(_share(step, self.total_steps), final)

    def _share_of(self, function: Shape, step: int, where: str) -> float:
        """Return what a function of the user says, refused if it is no share of a peak."""
        value = float(function(step, self.total_steps, self.warmup_steps))
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"the schedule returned {value} for step {step:,} of {self.total_steps:,}", where=where,
                hint="return the share of the peak: a finite number from 0 up",
            )  # fmt: skip
        return value


def _function(name: str, where: str) -> Shape | None:
    return load_function(name, kind="schedule", where=where) if is_extension(name) else None


def _share(index: int, count: int) -> float:
    """0 at the first of ``count`` steps, 1 at the last and after it."""
    return min(1.0, index / (count - 1)) if count > 1 else 0.0


def _linear(share: float, final: float) -> float:
    return 1.0 + (final - 1.0) * share


def _cosine(share: float, final: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * share))
