"""One line about how a run trains: learning rate, schedule, length and batch, each with the place that set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vorox.cli.terminal import humanize
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config.schema_fields import WARM_UPS
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig

OriginOf = Callable[[str], str]
"""Returns the place that set a key: a line of a file, an override, a preset, ``default for LoRA``."""


def training_settings(config: RunConfig, origin: OriginOf | None = None, *, warmup_steps: int | None = None) -> str:
    """Return the line; settings from one place are named together.

    Args:
        config: The run.
        origin: The places of its settings; ``None`` for a recorded configuration, whose places are not known.
        warmup_steps: Length of the warm-up in steps, if it is known.
    """
    if origin is None:
        return ", ".join(text for text, _ in _settings(config, warmup_steps))
    by_place: dict[str, list[str]] = {}
    for text, keys in _settings(config, warmup_steps):
        places = dict.fromkeys(origin(key) for key in keys)
        place = next((found for found in places if found != "default"), "default")
        by_place.setdefault(place, []).append(text)
    return "; ".join(f"{', '.join(texts)} ({place})" for place, texts in by_place.items())


def _settings(config: RunConfig, warmup_steps: int | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each setting as text, with its keys; the first key that is not a default names the place."""
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    share = schedule.top_fraction
    yield f"learning rate {share * optimizer.lr:.2g}", ("optimizer.lr",)
    if optimizer.facts.orthogonalises:
        yield f"{share * optimizer.muon_lr:.2g} for matrices", ("optimizer.muon_lr", "optimizer.name")
    shape = schedule.name
    if schedule.facts.falls:
        shape += f" to {100 * schedule.min_lr_fraction:g}%"
    elif schedule.facts.starts_low:
        shape += f" at {100 * share:g}% of {optimizer.lr:.2g}"
    yield shape, ("schedule.name", "schedule.min_lr_fraction")
    yield _warmup(config, warmup_steps), WARM_UPS
    if train.num_steps is not None:
        yield pluralize(train.num_steps, "step"), ("train.num_steps",)
    elif train.num_tokens is not None:
        yield f"{humanize.count(train.num_tokens)} tokens", ("train.num_tokens",)
    elif train.num_epochs is not None:
        yield f"{train.num_epochs:g} {'epoch' if train.num_epochs == 1 else 'epochs'}", ("train.num_epochs",)
    *earlier, last = (stage.rows for stage in batch_sizes_of(config).stages)
    rows = "".join(f"{rows:,} to " for rows in earlier) + pluralize(last, "row")
    yield f"{rows} a step", ("train.global_batch_sequences",)
    yield f"rows of {config.data.sequence_length_tokens:,} tokens", ("data.sequence_length_tokens",)
    if config.model.num_experts is not None:
        weight = config.loss.load_balancing_weight
        loss = f"load-balancing loss {weight:.3g}" if weight else "no load-balancing loss"
        yield loss, ("loss.load_balancing_weight",)


def _warmup(config: RunConfig, steps: int | None) -> str:
    schedule = config.schedule
    steps = schedule.warmup_steps if steps is None else steps
    if steps is not None:
        return f"warm-up {pluralize(steps, 'step')}" if steps else "no warm-up"
    if schedule.warmup_tokens:
        return f"warm-up {humanize.count(schedule.warmup_tokens)} tokens"
    if schedule.warmup_fraction:
        return f"warm-up {100 * schedule.warmup_fraction:.3g}% of an epoch"
    return "no warm-up"
