"""The length of a run, and the learning rate and weight decay of every step.

In: the configuration and the size of the dataset. Out: a ``Horizon`` (total and warm-up steps) and a ``Schedule``, a
pure function of the step index; neither has state to save. The horizon is decided at the start and recorded in every
checkpoint, so a growing cache does not change the learning rate of a resumed run, unless `follow_growth` asks for it; a
resume may set another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from vorox.core.batch_sizes import BatchSizes, BatchStage, batch_sizes, batch_sizes_of
from vorox.core.config.schema_fields import LENGTHS, WARM_UPS, given_keys
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema import OptimizerConfig, RunConfig, ScheduleConfig
from vorox.core.user_code.extensions import is_extension, load_function

Shape = Callable[[int, int, int], float]
"""Maps (step from 0, total steps, warm-up steps) to a share of the peak."""

_LEAST_FRACTION = 0.1
"""Share of the peak for a run that is extended after its schedule has ended at zero, where nothing would change."""

_MANY_PASSES = 16
"""Further passes over the same text have almost no value (Muennighoff et al., 2023, arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The length of a run in optimizer steps.

    Attributes:
        total_steps: Steps of the whole run.
        warmup_steps: Steps over which the learning rate rises; may exceed ``total_steps`` (see ``warning``).
        tokens_per_step: Positions per global batch, before the first of the batch stages.
        dataset_tokens: Tokens of one pass over the full dataset, as estimated when the horizon was fixed.
        dataset_error_fraction: Standard error of that estimate; ``None`` if it is exact or unknown.
        batch_stages: First step, from 0, and positions per step of every later stage of the batch size.
    """

    total_steps: int
    warmup_steps: int
    tokens_per_step: int
    dataset_tokens: int | None = None
    dataset_error_fraction: float | None = None
    batch_stages: tuple[BatchStage, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Positions of the whole run."""
        return batch_sizes(self.tokens_per_step, self.batch_stages).position_of(self.total_steps)

    @property
    def warning(self) -> str | None:
        """The warning about a warm-up that is as long as the run; ``None`` if it is shorter."""
        if self.warmup_steps < self.total_steps or self.warmup_steps == 0:
            return None
        return (
            f"Warm-up takes {pluralize(self.warmup_steps, 'step')}, the run only {self.total_steps:,}: "
            "the learning rate never decays and may not reach its peak"
        )

    def repetition_warning(self, dataset_tokens: float) -> str | None:
        """Return the warning about too many passes over the same text; ``None`` if there are few."""
        passes = self.total_tokens / max(1.0, dataset_tokens)
        if passes <= _MANY_PASSES:
            return None
        return (
            f"Run passes over its text {passes:,.0f} times: after about {_MANY_PASSES} a model memorises it and learns "
            "little more; add text to data.sources, or lower train.num_tokens or train.num_steps"
        )

    def warnings(self, dataset_tokens: float) -> list[str]:
        """Return all warnings about this length and dataset size, before anything is cached."""
        found = (self.warning, self.step_warning(dataset_tokens), self.repetition_warning(dataset_tokens))
        return [text for text in found if text is not None]

    def step_warning(self, dataset_tokens: float) -> str | None:
        """Return the warning about steps larger than the dataset; ``None`` if they are not."""
        largest = batch_sizes(self.tokens_per_step, self.batch_stages).largest
        if largest <= dataset_tokens:
            return None
        return (
            f"Step has {pluralize(largest, 'token')}, the whole text only {dataset_tokens:,.0f}: "
            "every step reads all of it; lower data.sequence_length_tokens or train.global_batch_sequences"
        )

    def cache_warning(self, cached_rows: int, sizes: BatchSizes) -> str | None:
        """Return the warning about a warm-up longer than the cached part of the dataset; ``None`` if it is not."""
        steps = sizes.step_at(cached_rows)
        if self.dataset_tokens is None or self.warmup_steps <= steps:
            return None
        if cached_rows * self.tokens_per_step >= self.dataset_tokens * sizes.rows_of(0):
            return None
        return (
            f"Warm-up of {pluralize(self.warmup_steps, 'step')} is computed from the full dataset of about "
            f"{self.dataset_tokens:,} tokens; the cache has {pluralize(cached_rows, 'row')} for "
            f"{pluralize(steps, 'step')}, so the learning rate is still rising when all of them are read"
        )

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"batch_stages": [list(stage) for stage in self.batch_stages]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Horizon:
        tokens, error = value["dataset_tokens"], value["dataset_error_fraction"]
        return cls(
            int(value["total_steps"]), int(value["warmup_steps"]), int(value["tokens_per_step"]),
            None if tokens is None else int(tokens), None if error is None else float(error),
            tuple(BatchStage(int(step), int(size)) for step, size in value["batch_stages"]),
        )  # fmt: skip


def horizon(config: RunConfig, *, num_train_rows: int, full_dataset_tokens: int) -> Horizon:
    """Turn the configured lengths into steps, rounding up.

    Args:
        config: The run; it sets exactly one of the three lengths in ``train`` and at most one warm-up.
        num_train_rows: Rows of one pass over all sources.
        full_dataset_tokens: Estimated tokens of one pass over the *full* dataset, not only its cached part.

    Raises:
        ConfigError: No length or several, or several warm-ups.
    """
    train, rows, row_tokens = config.train, batch_sizes_of(config), config.data.sequence_length_tokens
    tokens = batch_sizes(
        train.global_batch_sequences * row_tokens,
        tuple(BatchStage(stage.start_step, stage.rows * row_tokens) for stage in rows.stages[1:]),
    )
    given = given_keys(config, LENGTHS)
    if len(given) != 1:
        raise ConfigError(
            f"A run needs exactly one length; {len(given)} are set",
            where=", ".join(given or LENGTHS),
            hint=f"set one of {', '.join(LENGTHS)}",
        )
    if train.num_steps is not None:
        total_steps = train.num_steps
    elif train.num_tokens is not None:
        total_steps = tokens.num_steps(train.num_tokens)
    else:
        epochs = Fraction(str(train.num_epochs)) * Fraction(str(train.epoch_dataset_fraction))
        total_steps = rows.num_steps(math.ceil(epochs * num_train_rows))
    warmup_steps = _warmup_steps(config, tokens, full_dataset_tokens)
    return Horizon(max(1, total_steps), warmup_steps, tokens.rows_of(0), batch_stages=tokens.stages[1:])


def learning_rate_warnings(config: OptimizerConfig) -> list[str]:
    """Return warnings about learning rates above 1, each with what it is likely a slip for: 2e-5 for 2e5."""
    warnings: list[str] = []
    for name in config.facts.rates:
        key, rate = f"optimizer.{name}", float(getattr(config, name))
        if rate > 1:
            mantissa, _, exponent = f"{rate:e}".partition("e")
            meant = f"{float(mantissa):g}e-{int(exponent) or 4}"
            what = f"{key}={rate:g} is above 1, where training usually diverges"
            warnings.append(f"{what}; if it is a slip for {meant}, set {key}={meant}")
    return warnings


def _warmup_steps(config: RunConfig, tokens: BatchSizes, full_dataset_tokens: int) -> int:
    given, schedule = given_keys(config, WARM_UPS), config.schedule
    if len(given) > 1:
        raise ConfigError("More than one warm-up is set", where=", ".join(given), hint="keep one of them")
    if schedule.warmup_tokens is not None:
        return tokens.num_steps(schedule.warmup_tokens)
    if schedule.warmup_fraction is not None:
        return tokens.num_steps(math.ceil(Fraction(str(schedule.warmup_fraction)) * full_dataset_tokens))
    return schedule.warmup_steps or 0


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
    def from_config(cls, config: ScheduleConfig, optimizer: OptimizerConfig, horizon: Horizon) -> Schedule:
        """Return the schedule of a run.

        Raises:
            ConfigError: A schedule function cannot be imported.
        """
        return cls(
            config, optimizer.lr, optimizer.weight_decay, horizon.total_steps, horizon.warmup_steps,
            _function(config.name, "schedule.name"), _function(config.weight_decay, "schedule.weight_decay"),
        )  # fmt: skip

    def lr(self, step: int) -> float:
        """Return the learning rate of a step: the peak at the last warm-up step, the final value at the last step."""
        if step < self.warmup_steps:
            return self.peak_lr * self.config.top_fraction * (step + 1) / self.warmup_steps
        return self.peak_lr * self._fraction(step)

    def _fraction(self, step: int) -> float:
        """Return the share of the peak after the warm-up."""
        config, final = self.config, self.config.min_lr_fraction
        if self.lr_function is not None:
            return self._share_of(self.lr_function, step, "schedule.name")
        if not config.facts.falls:
            return config.top_fraction
        if config.name == "wsd":
            decay_steps = round(config.decay_fraction * self.total_steps)
            into_decay = step + 1 - (self.total_steps - decay_steps)
            return 1.0 if into_decay <= 0 else _linear(min(into_decay, decay_steps) / decay_steps, final)
        return _SHAPES[config.name](_share(step - self.warmup_steps, self.total_steps - self.warmup_steps), final)

    def weight_decay(self, step: int) -> float:
        """Return the weight decay of a step; it has no warm-up."""
        name, final = self.config.weight_decay, self.config.final_weight_decay_fraction
        if self.weight_decay_function is not None:
            return self.peak_weight_decay * self._share_of(self.weight_decay_function, step, "schedule.weight_decay")
        if name == "constant":
            return self.peak_weight_decay
        return self.peak_weight_decay * _SHAPES[name](_share(step, self.total_steps), final)

    def _share_of(self, function: Shape, step: int, where: str) -> float:
        """Call a user function; refuse a result that is not a share of the peak."""
        value = float(function(step, self.total_steps, self.warmup_steps))
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"Schedule returned {value} for step {step:,} of {self.total_steps:,}", where=where,
                hint="return the share of the peak: a finite number from 0 up",
            )  # fmt: skip
        return value


def holding_overrides(config: ScheduleConfig, length: Horizon) -> str:
    """Return the overrides under which a finished run is extended without a jump of its learning rate; empty if none.

    Most schedules stretch with the length, so a longer run has a higher rate at the same step. A run that stopped
    during its warm-up continues the warm-up, which needs no override.
    """
    is_warm = length.total_steps > length.warmup_steps
    if not config.facts.falls or not is_warm:
        return ""
    floor = "" if config.min_lr_fraction > 0 else f" schedule.min_lr_fraction={_LEAST_FRACTION:g}"
    return f"schedule.name=hold{floor}"


def _function(name: str, where: str) -> Shape | None:
    return load_function(name, kind="schedule", where=where) if is_extension(name) else None


def _share(index: int, count: int) -> float:
    """Return 0 at the first of ``count`` steps and 1 at the last and later ones."""
    return min(1.0, index / (count - 1)) if count > 1 else 0.0


def _linear(share: float, final: float) -> float:
    return 1.0 + (final - 1.0) * share


def _cosine(share: float, final: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * share))


_SHAPES = {"linear": _linear, "cosine": _cosine}
