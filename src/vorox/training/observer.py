"""What a run tells the world: metrics, progress and events. Reads everything, decides nothing.

In: settled steps, saves and validations, in the order in which they happen. Out: a line of metrics and a view for the
display per logged step, and events for what is rare. With every observation switched off, the run has the same bits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.counted import counted
from vorox.core.engine import Engine
from vorox.core.log import RunLog
from vorox.core.records import Progress, StepValues
from vorox.experiments.tracking import Tracker
from vorox.runtime.memory import HostMemory
from vorox.runtime.throughput import Reading, Throughput, Work, eta_seconds
from vorox.training.display import Display, StepView
from vorox.training.evaluate import Evaluation
from vorox.training.ledger import StartedStep
from vorox.training.provenance import Provenance
from vorox.training.schedule import Horizon


@dataclass(frozen=True, slots=True)
class Queue:
    """What the loader says of itself.

    Attributes:
        wait_seconds: How long the loop has waited for batches in all.
        depth: Batches that are ready.
        capacity: Batches that are kept ready at most.
        building: Metrics of what builds the rows while they are read.
    """

    wait_seconds: Callable[[], float]
    depth: Callable[[], int]
    capacity: int
    building: Callable[[], Mapping[str, float]] = dict[str, float]


Complete = Callable[[Engine], Sequence[tuple[str, str]]]
"""Continues the configured prompts: pairs of prompt and completion."""


_MAX_REMEASURED = 3


class Observer:
    """Everything that looks at one running process.

    Args:
        log: Takes events.
        tracker: Takes metrics.
        display: Shows steps and samples.
        throughput: Measures.
        work: Gives the arithmetic of a step from its positions and the positions of its rows.
        provenance: Takes note of which steps were done.
        horizon: Length of the run.
        every_steps: Steps between two logged ones; the first and the last are logged too.
        rows_per_epoch: Rows of one pass over all sources.
        vocab_size: Of the model; ln of it is where the loss of an untrained model starts.
        engine: Its device numbers are read.
        queue: The loader's numbers.
        complete: Continues the fixed prompts.
        seconds_since_save: Age of the newest checkpoint.
        planned_memory_bytes: What the plan says the device will need.
        measure_ceiling: Measures the matmul rate that speeds are held against once more.
        mirror: Metrics of the copying of checkpoints to a store.
    """

    def __init__(
        self,
        *,
        log: RunLog,
        tracker: Tracker,
        display: Display,
        throughput: Throughput,
        work: Callable[[int, int], Work],
        provenance: Provenance,
        horizon: Horizon,
        every_steps: int,
        rows_per_epoch: int,
        vocab_size: int,
        engine: Engine,
        queue: Queue,
        complete: Complete,
        seconds_since_save: Callable[[], float | None],
        planned_memory_bytes: float | None = None,
        measure_ceiling: Callable[[], float] | None = None,
        mirror: Callable[[], Mapping[str, float]] = dict[str, float],
    ) -> None:
        self._log, self._tracker, self._display = log, tracker, display
        self._throughput, self._horizon, self._every_steps = throughput, horizon, every_steps
        self._provenance, self._work = provenance, work
        self._num_tokens = 0  # after the last step; the first one of a process only starts the clock
        self._rows_per_epoch, self._vocab_size = rows_per_epoch, vocab_size
        self._engine, self._queue, self._complete = engine, queue, complete
        self._memory, self._mirror = HostMemory(), mirror
        self._seconds_since_save, self._planned_memory_bytes = seconds_since_save, planned_memory_bytes
        self._measure_ceiling, self._remeasured, self._impossible_said = measure_ceiling, 0, False

    def started(self, step: StartedStep) -> None:
        """A step was started. Counted here and not when it is settled, one step later but for saves."""
        self._provenance.started(step.progress)
        work = self._work(step.progress.num_tokens - self._num_tokens, step.row_tokens)
        self._num_tokens = step.progress.num_tokens
        self._throughput.count(work, waited_seconds=self._queue.wait_seconds())

    def step(self, step: StartedStep, values: StepValues) -> None:
        """A settled step."""
        progress = step.progress
        self._tracker.observe({**values.extra, "nonfinite_steps": float(not values.finite)})
        if progress.step == 1:
            entropy = math.log(self._vocab_size)
            text = f"Loss of step 1: {values.loss:.3f}; a model that knows nothing has ln(vocabulary) = {entropy:.3f}"
            self._log.event("first_step", text, loss=values.loss, ln_vocabulary=entropy)
        if not values.finite:
            text = f"Step {progress.step:,} was skipped: loss {values.loss}, gradient norm {values.grad_norm}"
            self._log.event("nonfinite_step", text, level="warning", step=progress.step)
            self._provenance.skipped(progress, "nonfinite_step", text)
        last = progress.step == self._horizon.total_steps
        if progress.step == 1 or last or progress.step % self._every_steps == 0:
            self._log_step(step, values)

    def _log_step(self, step: StartedStep, values: StepValues) -> None:
        reading = self._throughput.read()
        if reading.impossible:
            self._doubt(reading.impossible)
        progress, memory = step.progress, self._memory.read()
        device = dict(self._engine.device_stats())
        epoch = progress.cursor.position / self._rows_per_epoch
        age = self._seconds_since_save()
        numbers = {
            "loss": values.loss,
            "perplexity": math.exp(values.loss) if values.loss < 700 else math.inf,
            "grad_norm": values.grad_norm,
            "learning_rate": step.lr,
            "weight_decay": step.weight_decay,
            "tokens_total": float(progress.num_tokens),
            "epoch": epoch,
            "queue_depth": float(self._queue.depth()),
            **({} if age is None else {"seconds_since_save": age}),
            **reading.metrics(),
            **memory,
            **device,
            **self._queue.building(),
            **self._mirror(),
        }
        self._tracker.log(progress.step, numbers)
        self._display.step(self._view(step, values, reading, epoch, age, {**memory, **device}))

    def _doubt(self, impossible: str) -> None:
        """The hardware is not this fast, or its ceiling was measured in a busy moment: measure again, then say so."""
        if self._measure_ceiling is not None and self._remeasured < _MAX_REMEASURED:
            self._remeasured += 1
            with self._throughput.pause("eval"):
                self._throughput.raise_ceiling(self._measure_ceiling())
        elif not self._impossible_said:
            self._impossible_said = True
            self._log.event("impossible_speed", impossible, level="warning")

    def _view(
        self,
        step: StartedStep,
        values: StepValues,
        reading: Reading,
        epoch: float,
        age: float | None,
        memory: Mapping[str, float],
    ) -> StepView:
        total_steps = self._horizon.total_steps
        used = {"host": memory.get("memory/host_bytes"), "device": memory.get("memory/device_bytes")}
        return StepView(
            step=step.progress.step,
            total_steps=total_steps,
            loss=values.loss,
            num_tokens=step.progress.num_tokens,
            total_tokens=total_steps * self._horizon.tokens_per_step,
            learning_rate=step.lr,
            grad_norm=values.grad_norm,
            epoch=epoch,
            tokens_per_second=reading.tokens_per_second,
            mfu_fraction=reading.mfu_fraction,
            ceiling_fraction=reading.ceiling_fraction,
            eta_seconds=eta_seconds(self._throughput.total(), total_steps - step.progress.step),
            time_fractions=reading.time_fractions,
            memory_bytes={name: value for name, value in used.items() if value is not None},
            planned_memory_bytes=self._planned_memory_bytes,
            queue_depth=self._queue.depth(),
            queue_capacity=self._queue.capacity,
            seconds_since_save=age,
        )

    @contextlib.contextmanager
    def saving(self, progress: Progress) -> Generator[Callable[[Path], None]]:
        """While inside, time counts as saving. Call what it gives (any thread) once the checkpoint is committed."""

        def report(path: Path) -> None:
            self._provenance.saved(progress)
            seconds = time.perf_counter() - started
            self._tracker.observe({"checkpoint_write_seconds": seconds})
            text = f"Saved {path.name} in {seconds:.2f} s"
            self._log.event("checkpoint_saved", text, step=progress.step, chain=progress.chain, seconds=seconds)

        started = time.perf_counter()
        with self.waiting_for_save():
            self._tracker.flush()
            yield report

    @contextlib.contextmanager
    def waiting_for_save(self) -> Generator[None]:
        """While inside, training stands still for a checkpoint."""
        started = time.perf_counter()
        with self._throughput.pause("save"):
            yield
        self._tracker.observe({"checkpoint_seconds": time.perf_counter() - started})

    @contextlib.contextmanager
    def validating(self, progress: Progress) -> Generator[Callable[[Evaluation], None]]:
        """While inside, time counts as validation. Call what it gives with the result."""

        def report(found: Evaluation) -> None:
            bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
            text = (
                f"Validation at step {progress.step:,}: loss {found.loss:.4f}{bits}, "
                f"accuracy {found.accuracy:.1%} of {counted(found.num_target_tokens, 'token')}"
            )
            self._log.event("validation", text, step=progress.step, loss=found.loss)
            for prompt, completion in self._complete(self._engine):
                self._display.sample(prompt, completion)
                self._log.quiet(f"Sample at step {progress.step:,}: {prompt!r} -> {completion!r}")
            numbers: dict[str, float | None] = {
                "eval/loss": found.loss,
                "eval/perplexity": found.perplexity,
                "eval/bits_per_byte": found.bits_per_byte,
                "eval/accuracy": found.accuracy,
                "eval/tokens": float(found.num_target_tokens),
                "eval_seconds": time.perf_counter() - started,
                **found.custom,
            }
            self._tracker.log(progress.step, {name: value for name, value in numbers.items() if value is not None})

        started = time.perf_counter()
        with self._throughput.pause("eval"):
            yield report

    def finish(self, progress: Progress) -> Reading:
        """Write what is left; returns the speed of the whole process."""
        self._tracker.log(progress.step, {})
        return self._throughput.total()
