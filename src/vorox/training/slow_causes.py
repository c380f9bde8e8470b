"""Name the setting to change if a run spends much of its time on anything but training."""

from __future__ import annotations

from collections.abc import Mapping

from vorox.core.schema import RunConfig

MAX_FRACTION = 0.2
"""Share of the time from which on a cause is named."""
MIN_SECONDS = 5.0
"""Shorter measurements name none."""
_MAX_READER_THREADS = 8


def slow_cause(seconds: Mapping[str, float], config: RunConfig) -> str | None:
    """Return the largest loss of time and its remedy on one line; ``None`` if no loss is large.

    Args:
        seconds: Time by use since the last logged step (compute, data, save, eval).
        config: The run.
    """
    total = sum(seconds.values())
    losses = {use: spent / total for use, spent in seconds.items() if use != "compute"} if total else {}
    use = max(losses, key=losses.__getitem__, default="")
    if total < MIN_SECONDS or not use or losses[use] < MAX_FRACTION:
        return None
    remedy = {"data": _data_remedy, "save": _save_remedy, "eval": _eval_remedy}[use](config)
    return f"{use} {losses[use]:.0%} of the time: {remedy}"


def _data_remedy(config: RunConfig) -> str:
    threads = config.data.loader.num_threads
    if config.data.mode == "streaming" or config.data.growth.mode != "complete":
        return "training waits for text to be built; add builders with `vorox data build`"
    if threads >= _MAX_READER_THREADS:
        return "move the caches to a faster disk (data.cache.directory)"
    return f"raise data.loader.num_threads {threads} -> {max(1, 2 * threads)}"


def _save_remedy(config: RunConfig) -> str:
    save = config.checkpoint
    if not save.asynchronous:
        return "set checkpoint.asynchronous=true"
    if save.every_steps:
        return f"raise checkpoint.every_steps {save.every_steps:,} -> {4 * save.every_steps:,}"
    return "raise checkpoint.every_seconds, or set run.directory to a faster disk"


def _eval_remedy(config: RunConfig) -> str:
    every = config.eval.every_steps
    return f"raise eval.every_steps {every:,} -> {4 * every:,}" if every else "lower eval.num_sequences"
