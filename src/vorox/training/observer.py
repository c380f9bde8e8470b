"""What a run reports: metrics, progress and events. Reads everything, decides nothing.

In: settled steps, saves and validations, in the order in which they happen. Out: a line of metrics and a view for the
display per logged step, and events for what is rare. With every observation switched off, the run has the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from vorox.core.batch import Progress
from vorox.core.pluralize import pluralize
from vorox.experiments.tracking import Tracker
from vorox.models import flops
from vorox.models.memory_estimate import planned_memory
from vorox.models.spec import ModelSpec
from vorox.runtime.device_peaks import peak_flops_per_second
from vorox.runtime.host_memory import HostMemory
from vorox.runtime.matmul_peak import measure_matmul_peak, training_shapes
from vorox.runtime.throughput import Limits, Reading, Throughput, Work, eta_seconds
from vorox.training.display import Display, StepView
from vorox.training.evaluate import Evaluation
from vorox.training.pending_steps import SettledStep
from vorox.training.run_plan import dataset_size
from vorox.training.startup import TrainingSetup
from vorox.training.workload import Workload

_MAX_MEASURED_POSITIONS = 1 << 15
"""Longer products run at the same rate and would hold up the first step."""
_LONG_STEP_SECONDS = 30
"""A step that cannot be faster is announced, because nothing is shown before the first one is done."""
_MAX_REMEASURED = 3


class Observer:
    """Reports what one process of a run does.

    Args:
        setup: What the run is made of.
        tracker: Records metrics.
        display: Shows steps and samples.
        speed: Measures throughput.
    """

    def __init__(self, setup: TrainingSetup, tracker: Tracker, display: Display, speed: SpeedMeter) -> None:
        workload = setup.workload
        config = workload.config
        self._log, self._tracker, self._display, self._speed = workload.log, tracker, display, speed
        self._horizon, self._every_steps = setup.state.horizon, config.log.every_steps
        num_rows = dataset_size(config, workload.corpus).rows * config.train.epoch_dataset_fraction
        self._rows_per_epoch, self._vocab_size = max(1, round(num_rows)), workload.spec.vocab_size
        self._queue_capacity = config.data.loader.prefetch_batches if config.data.loader.num_threads else 0
        device_kind = str(workload.engine.environment().get("device_kind", ""))
        planned = planned_memory(workload.spec, config)
        self._memory, self._planned_memory_bytes = HostMemory(), float(planned.total_bytes_on(device_kind))

    def started(self, progress: Progress, row_tokens: int, waited_seconds: float) -> None:
        """Count a step that was started: now, and not when it is settled, one step later but for saves."""
        self._speed.count(progress.num_tokens, row_tokens, waited_seconds)

    def settled(self, settled: SettledStep) -> None:
        """Report what is rare about a settled step: the first loss, and numbers that are not finite."""
        values = settled.values
        self._tracker.observe({**values.extra, "nonfinite_steps": float(not values.finite)})
        if settled.number == 1:
            entropy = math.log(self._vocab_size)
            text = f"Loss of step 1: {values.loss:.3f}; a model that knows nothing has ln(vocabulary) = {entropy:.3f}"
            self._log.event("first_step", text, loss=values.loss, ln_vocabulary=entropy)
        if not values.finite:
            self._log.event("nonfinite_step", settled.skipped, level="warning", step=settled.number)

    def is_logged(self, step: int) -> bool:
        """Whether the metrics of a step are recorded: the first, the last, and every so many between."""
        return step in {1, self._horizon.total_steps} or step % self._every_steps == 0

    def log(self, settled: SettledStep, status: Mapping[str, float]) -> None:
        """Record the metrics of a step and show it.

        Args:
            settled: The step.
            status: Numbers of the loader, device, checkpoints and mirror at this moment, by registered name.
        """
        step, values = settled.step, settled.values
        reading, memory = self._speed.read(), self._memory.read()
        epoch = step.progress.cursor.position / self._rows_per_epoch
        numbers = {
            "loss": values.loss,
            "perplexity": math.exp(values.loss) if values.loss < 700 else math.inf,
            "grad_norm": values.grad_norm,
            "learning_rate": step.lr,
            "weight_decay": step.weight_decay,
            "tokens_total": float(step.progress.num_tokens),
            "epoch": epoch,
            **reading.metrics(),
            **memory,
            **status,
        }
        self._tracker.log(settled.number, numbers)
        self._display.step(self._view(settled, reading, epoch, {**memory, **status}))

    def _view(self, settled: SettledStep, reading: Reading, epoch: float, status: Mapping[str, float]) -> StepView:
        step, total_steps = settled.step, self._horizon.total_steps
        used = {"host": status.get("memory/host_bytes"), "device": status.get("memory/device_bytes")}
        return StepView(
            step=settled.number,
            total_steps=total_steps,
            loss=settled.values.loss,
            num_tokens=step.progress.num_tokens,
            total_tokens=total_steps * self._horizon.tokens_per_step,
            learning_rate=step.lr,
            grad_norm=settled.values.grad_norm,
            epoch=epoch,
            tokens_per_second=reading.tokens_per_second,
            mfu_fraction=reading.mfu_fraction,
            matmul_peak_fraction=reading.matmul_peak_fraction,
            eta_seconds=eta_seconds(self._speed.total(), total_steps - settled.number),
            time_fractions=reading.time_fractions,
            memory_bytes={name: value for name, value in used.items() if value is not None},
            planned_memory_bytes=self._planned_memory_bytes,
            queue_depth=int(status["queue_depth"]),
            queue_capacity=self._queue_capacity,
            seconds_since_save=status.get("seconds_since_save"),
        )

    @contextlib.contextmanager
    def saving(self) -> Generator[None]:
        """Count the time inside as saving; what was measured so far is durable first."""
        with self.waiting_for_save():
            self._tracker.flush()
            yield

    @contextlib.contextmanager
    def waiting_for_save(self) -> Generator[None]:
        """Count the time inside as waiting for a checkpoint."""
        started = time.perf_counter()
        with self._speed.pause("save"):
            yield
        self._tracker.observe({"checkpoint_seconds": time.perf_counter() - started})

    def saved(self, path: Path, progress: Progress, seconds: float) -> None:
        """Report a committed checkpoint; from any thread."""
        self._tracker.observe({"checkpoint_write_seconds": seconds})
        text = f"Saved {path.name} in {seconds:.2f} s"
        self._log.event("checkpoint_saved", text, step=progress.step, chain=progress.chain, seconds=seconds)

    @contextlib.contextmanager
    def validating(self, progress: Progress) -> Generator[Callable[[Evaluation, Sequence[tuple[str, str]]], None]]:
        """Count the time inside as validation; yields what reports the result and the completions of the prompts."""

        def report(found: Evaluation, completions: Sequence[tuple[str, str]]) -> None:
            bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
            text = (
                f"Validation at step {progress.step:,}: loss {found.loss:.4f}{bits}, "
                f"accuracy {found.accuracy:.1%} of {pluralize(found.num_target_tokens, 'token')}"
            )
            self._log.event("validation", text, step=progress.step, loss=found.loss)
            for prompt, completion in completions:
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
        with self._speed.pause("eval"):
            yield report

    def finish(self, progress: Progress) -> Reading:
        """Record what is left; return the speed of the whole process."""
        self._tracker.log(progress.step, {})
        return self._speed.total()


class SpeedMeter:
    """Measures the throughput of one process.

    Args:
        workload: The model and configuration whose arithmetic is counted, and the engine that is measured.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        config = workload.config
        self._work = functools.cache(functools.partial(_work, workload.spec, config.data.document_mask))
        self._measures = config.log.matmul_peak and workload.distributed.is_main
        self._remeasured, self._reported_impossible = 0, False
        self._num_tokens = 0  # after the last step; the first one of a process only starts the clock
        throughput = Throughput(self._limits())
        self.pause, self.total, self._throughput = throughput.pause, throughput.total, throughput

    def count(self, num_tokens: int, row_tokens: int, waited_seconds: float) -> None:
        """Count a step that was started.

        Args:
            num_tokens: Positions that the run has processed after it.
            row_tokens: Positions of each of its rows.
            waited_seconds: How long the loop has waited for batches in all.
        """
        work = self._work(num_tokens - self._num_tokens, row_tokens)
        self._num_tokens = num_tokens
        self._throughput.count(work, waited_seconds=waited_seconds)

    def read(self) -> Reading:
        """Return the speed since the last reading."""
        reading = self._throughput.read()
        if reading.impossible:
            self._check_limits(reading.impossible)
        return reading

    def _check_limits(self, impossible: str) -> None:
        """Measure the matmul rate again: it may have been measured in a busy moment. Then report."""
        if self._measures and self._remeasured < _MAX_REMEASURED:
            self._remeasured += 1
            with self.pause("eval"):
                self._throughput.raise_matmul_peak(_matmul_rate(self._workload))
        elif not self._reported_impossible:
            self._reported_impossible = True
            self._workload.log.event("impossible_speed", impossible, level="warning")

    def _limits(self) -> Limits:
        """Return the data-sheet peak and the measured matmul rate, over all devices."""
        config, facts = self._workload.config, self._workload.engine.environment()
        dtype = config.precision.dtype
        arithmetic = "tf32" if dtype == "fp32" and config.precision.matmul == "tf32" else dtype
        peak = peak_flops_per_second(str(facts.get("device", "")), arithmetic)
        rate = _matmul_rate(self._workload) if self._measures else None
        if rate is not None:
            row_tokens = config.data.sequence_length_tokens
            num_tokens = config.train.global_batch_sequences * row_tokens
            seconds = self._work(num_tokens, row_tokens).least_flops / rate
            if seconds > _LONG_STEP_SECONDS:
                text = f"A step of {pluralize(num_tokens, 'token')} takes at least {seconds:,.0f} s at this rate"
                self._workload.log.info(text)
        return Limits(
            peak_flops_per_second=None if peak is None else peak * config.parallel.num_devices,
            matmul_peak_flops_per_second=rate,
        )


def _work(spec: ModelSpec, document_mask: bool, num_tokens: int, row_tokens: int) -> Work:
    """Return the arithmetic of a step of ``num_tokens`` positions in rows of ``row_tokens``."""
    # Where documents are kept apart, most of the attention may be skipped; the matrices never.
    least = 6.0 * flops.num_matmul_weights(spec) if document_mask else flops.causal_flops_per_token(spec, row_tokens)
    return Work(num_tokens, num_tokens * flops.flops_per_token(spec, row_tokens), num_tokens * least)


def _matmul_rate(workload: Workload) -> float:
    """Measure the FLOP/s of all devices of the run on the matrix products of its model."""
    config, spec = workload.config, workload.spec
    weights = [row.shape for row in spec.parameters if row.kind == "matrix"] + [(spec.vocab_size, spec.hidden_size)]
    positions = min(config.train.micro_batch_sequences * config.data.sequence_length_tokens, _MAX_MEASURED_POSITIONS)
    shapes = training_shapes([(shape[0], shape[1]) for shape in weights], positions)
    measured = measure_matmul_peak(shapes, workload.engine.matmul_seconds, warmup_seconds=0.0, repeats=3)
    workload.log.info(f"Matrix products of this model run at {measured.flops_per_second / 1e9:,.0f} GFLOP/s here")
    # One device was measured. The devices of one process on the CPU share its cores.
    on_cpu = workload.engine.environment().get("device_kind") == "cpu"
    return measured.flops_per_second * (workload.distributed.process_count if on_cpu else config.parallel.num_devices)
