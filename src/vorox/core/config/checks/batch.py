"""Checks of the rows of a step: they divide into micro-batches on every rank, in every stage."""

from __future__ import annotations

from collections.abc import Iterator

from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config.layers.tree import Problem
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

STAGES = "train.batch_stages"
_PARTS = ("parallel.data_parallel_size", "parallel.fsdp_size")


def batch_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield batch sizes that do not divide into micro-batches, and stages that are not in order."""
    yield from _divides(config, config.train.global_batch_sequences, "train.global_batch_sequences")
    for index, stage in enumerate(config.train.batch_stages):
        key = f"{STAGES}.{index}"
        if (stage.start_step is None) == (stage.start_tokens is None):
            yield Problem(
                f"{key} needs exactly one start; set {key}.start_step or {key}.start_tokens",
                keys=(f"{key}.start_step", f"{key}.start_tokens"),
            )
            return
        yield from _divides(config, stage.global_batch_sequences, f"{key}.global_batch_sequences")
    try:
        batch_sizes_of(config)
    except ValueError as error:
        yield Problem(str(error), keys=(STAGES,))


def _divides(config: RunConfig, rows: int, key: str) -> Iterator[Problem]:
    micro = config.train.micro_batch_rows
    # Under auto, a run of several ranks takes smaller micro-batches.
    parts = 1 if config.parallel.data_parallel_size == "auto" else config.parallel.num_row_parts
    if rows < parts:
        yield Problem(fewer_rows(rows, parts, config.parallel.fsdp_size, key), keys=(key, *_PARTS))
    elif -(-rows // parts) % micro:  # shorter parts are filled up
        over = f" x {parts} (parallel.data_parallel_size x parallel.fsdp_size)" if parts > 1 else ""
        below, above = (rows // (micro * parts) * micro * parts + more for more in (0, micro * parts))
        fitting = [size for size in range(1, rows + 1) if rows % (size * parts) == 0]
        advice = f"global_batch_sequences={f'{below} or ' if below else ''}{above}"
        nearest = [*[size for size in fitting if size < micro][-1:], *[size for size in fitting if size > micro][:1]]
        if nearest:
            advice += f", or micro_batch_sequences={' or '.join(map(str, nearest))}"
        yield Problem(
            f"{key}={rows} is not a multiple of train.micro_batch_sequences={micro}{over}; {advice} would fit",
            keys=(key, "train.micro_batch_sequences", *_PARTS),
        )


def fewer_rows(rows: int, parts: int, fsdp_size: int, key: str = "train.global_batch_sequences") -> str:
    """Return why rows cannot be divided over more devices, and what would fit."""
    smaller = f" or parallel.data_parallel_size={rows // fsdp_size}" if rows >= fsdp_size else ""
    return (
        f"{key}={rows} is less than the {parts} devices that divide the rows of a step (parallel.data_parallel_size x "
        f"parallel.fsdp_size); {key}={parts}{smaller} would fit"
    )


def check_devices(config: RunConfig) -> None:
    """Check that the rows of every stage divide over the devices, whose number is resolved.

    Training, plans and the choice of a micro-batch share this check.

    Raises:
        ConfigError: They do not.
    """
    for problem in batch_problems(config):
        what, _, hint = problem.what.partition("; ")
        raise ConfigError(what, where=problem.keys[0], hint=hint)
