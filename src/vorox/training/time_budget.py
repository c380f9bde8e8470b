"""Time budget (``--minutes``): measure how many steps fit into a given time.

In: a configuration, its corpus and a throwaway engine, which runs a few real steps. Out: a number of steps, which
becomes ``train.num_steps`` before the run starts. The clock decides once, and the run is as replayable as any other.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vorox.core.batch import Batch
from vorox.core.engine import Engine
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus
from vorox.records.log import RunLog
from vorox.training.steps.dataloading import num_validation_rows, preview_batches, validation_set
from vorox.training.steps.run_plan import dataset_size
from vorox.training.steps.schedule import horizon
from vorox.training.steps.workload import Workload

WARMUP_SECONDS = 0.5
MIN_TIMED_STEPS = 2
MAX_TIMED_STEPS = 20
TIMED_SECONDS = 2.0
MAX_STEPS = 64
"""Steps that the temporary plan covers; the warm-up stays below it."""
MAX_EVALUATION_BATCHES = 2
MARGIN_FRACTION = 0.04
"""Share of the time reserved for saves, logging and thermal throttling."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured time of a run's parts on this machine.

    Attributes:
        startup_seconds: Extra time of the first step (compilation, allocation).
        step_seconds: Median time of a training step with its data.
        evaluation_seconds: Time of one validation.
    """

    startup_seconds: float
    step_seconds: float
    evaluation_seconds: float

    def __str__(self) -> str:
        return f"{self.step_seconds:.3f} s per step, {self.evaluation_seconds:.1f} s per validation"


def measure(
    engine: Engine,
    batches: Iterator[Batch],
    evaluation_batches: list[Batch],
    num_evaluation_batches: int,
    *,
    lr: float,
    clock: Callable[[], float] = time.perf_counter,
    dist: DistributedContext | None = None,
) -> Costs:
    """Time a few steps of a throwaway engine.

    All ranks take the same steps, because the main rank's times decide when the measurement ends.

    Args:
        engine: A new engine; its state changes.
        batches: Real training batches.
        evaluation_batches: One or two validation batches; empty without a validation set.
        num_evaluation_batches: Batches of a whole validation.
        lr: Any learning rate.
        clock: A monotonic clock, in seconds.
        dist: This process's rank.
    """
    dist = dist or DistributedContext()

    def step() -> float:
        started = clock()
        engine.train_step(next(batches), lr=lr, weight_decay=0.0).fetch()
        engine.synchronize()
        return dist.broadcast("step seconds", clock() - started)

    warmup = [step()]
    while sum(warmup[1:]) < WARMUP_SECONDS and len(warmup) + MAX_TIMED_STEPS < MAX_STEPS:
        warmup.append(step())
    timed: list[float] = []
    while len(timed) < MIN_TIMED_STEPS or (sum(timed) < TIMED_SECONDS and len(timed) < MAX_TIMED_STEPS):
        timed.append(step())
    step_seconds = statistics.median(timed)
    evaluation_seconds = 0.0
    if evaluation_batches:
        engine.eval_step(evaluation_batches[0])  # the first one may compile
        started = clock()
        for batch in evaluation_batches:
            engine.eval_step(batch)
        evaluation_seconds = (clock() - started) / len(evaluation_batches) * num_evaluation_batches
    return Costs(max(0.0, warmup[0] - step_seconds), step_seconds, evaluation_seconds)


def measure_run(config: RunConfig, corpus: Corpus, engine: Engine, dist: DistributedContext) -> Costs:
    """Measure the costs of a run on its first batches, under a temporary plan."""
    validation = validation_set(config, corpus)
    held_out = [] if validation is None else list(itertools.islice(validation(), MAX_EVALUATION_BATCHES))
    num_batches = 0
    if held_out:
        num_batches = -(-num_validation_rows(config, corpus) // config.train.micro_batch_rows)
    with preview_batches(config, corpus, engine.data_shard, MAX_STEPS) as batches:
        return measure(engine, batches, held_out, num_batches, lr=config.optimizer.lr, dist=dist)


def steps_within(seconds: float, costs: Costs, config: RunConfig) -> int:
    """Return the number of steps, including their validations, that fit into some seconds; at least 1."""
    left_seconds = seconds * (1 - MARGIN_FRACTION) - costs.startup_seconds
    every = config.eval.every_steps
    left_seconds -= costs.evaluation_seconds * (config.eval.at_start + config.eval.at_end)
    seconds_per_step = costs.step_seconds + (costs.evaluation_seconds / every if every else 0.0)
    return max(1, int(left_seconds / seconds_per_step))


def with_num_steps(config: RunConfig, num_steps: int) -> RunConfig:
    """Return the configuration with this length instead of its own."""
    values = config.model_dump(mode="json")
    values["train"] |= {"num_steps": num_steps, "num_tokens": None, "num_epochs": None}
    values["train"] |= {"epoch_dataset_fraction": 1.0, "follow_growth": False}  # meaningful with epochs only
    return RunConfig.model_validate(values)


def fit_warmup(config: RunConfig, full_dataset_tokens: int) -> tuple[RunConfig, str | None]:
    """Shorten a warm-up that takes more than half of the steps to a tenth of them; also return a note about it.

    Args:
        config: The run; its length is a number of steps.
        full_dataset_tokens: Tokens of one pass over the dataset, of which ``schedule.warmup_fraction`` is a fraction.
    """
    length = horizon(config, num_train_rows=0, full_dataset_tokens=full_dataset_tokens)
    if 2 * length.warmup_steps <= length.total_steps:
        return config, None
    short_steps = length.total_steps // 10
    warmup = {"warmup_steps": short_steps, "warmup_tokens": None, "warmup_fraction": None}
    note = (
        f"Warm-up of {pluralize(length.warmup_steps, 'step')} would take more than half of the run: shortened to "
        f"{pluralize(short_steps, 'step')}"
    )
    return config.model_copy(update={"schedule": config.schedule.model_copy(update=warmup)}), note


def fit_to_time(
    config: RunConfig, seconds: float, dist: DistributedContext, log: RunLog, open_workload: Callable[[], Workload]
) -> RunConfig:
    """Set the number of steps to what fits into ``seconds`` from now, as measured with a throwaway engine.

    The main rank's clock decides.

    Args:
        config: The run.
        seconds: The time.
        dist: This process's rank.
        log: Reports the decision.
        open_workload: Opens corpus, model and engine of the run, with a length of one step.
    """
    started = time.perf_counter()
    with contextlib.closing(open_workload()) as workload:
        costs = measure_run(workload.config, workload.corpus, workload.engine, dist)
        dataset_tokens = dataset_size(config, workload.corpus).tokens
    left_seconds = seconds - (time.perf_counter() - started)
    num_steps = dist.broadcast("minutes", steps_within(left_seconds, costs, config))
    log.info(f"Fitting {pluralize(num_steps, 'step')} into {seconds / 60:g} min ({costs})")
    fitted, note = fit_warmup(with_num_steps(config, num_steps), dataset_tokens)
    if note is not None:
        log.info(note)
    return fitted
