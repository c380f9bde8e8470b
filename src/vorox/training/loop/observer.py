"""Report metrics, throughput, progress and events of a run. Never affects training.

In: settled steps, saves and validations, in order. Out: a line of metrics and a display update per logged step, and
events. Without any of it, the run has the same bits. Throughput is compared with the data-sheet peak of the device and
with a measured matmul rate, which is measured again a few times before a reading above it is reported as impossible.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vorox.core.batch import Progress
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.pluralize import pluralize
from vorox.data.order.loader import BatchStream
from vorox.experiments.task_results import task_metrics
from vorox.experiments.tracking import Tracker
from vorox.models.spec import ModelSpec
from vorox.planning import flops
from vorox.planning.memory_estimate import memory_per_device
from vorox.records.log import SAVED
from vorox.records.run_lookup import short_path
from vorox.runtime.device_peaks import peak_of_environment
from vorox.runtime.heartbeat import Heartbeat
from vorox.runtime.matmul_peak import (
    MAX_ELEMENTS,
    MAX_ELEMENTS_ACCELERATOR,
    measure_matmul_peak,
    training_shapes,
)
from vorox.runtime.throughput import Limits, Reading, Throughput, Work, eta_seconds, host_memory, slow_cause
from vorox.training.checkpoints.preemption_notice import MeasuredTimes, PreemptionNotice
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.loop.display import Display, StepView
from vorox.training.loop.scheduled_tasks import TasksReport, log_report
from vorox.training.loop.startup import TrainingSetup
from vorox.training.steps.evaluate import Evaluation
from vorox.training.steps.pending_steps import SettledStep
from vorox.training.steps.run_plan import dataset_size
from vorox.training.steps.workload import Workload

_MAX_MEASURED_POSITIONS, _MAX_MEASURED_POSITIONS_CPU = 1 << 15, 1 << 10
"""Larger products run at the same rate and would delay the first step."""
_MEASURED_SECONDS = 0.25
"""No further round of products is timed after this; a first one always is."""
_LONG_STEP_SECONDS = 30
"""Longer steps are announced, because nothing is shown before the first one is finished."""
_MAX_REMEASURED = 3


class Observer:
    """Reports the progress of one process of a run.

    Args:
        setup: Configuration, corpus, engine and length of the run.
        tracker: Records metrics.
        display: Shows steps and samples.
        speed: Measures throughput.
        batches: The loader.
        checkpoints: Know whether the run has a checkpoint.
        rank_metrics: Metrics of all ranks: ``RankStatistics.metrics``, which stays current; empty with one rank.

    Attributes:
        notice: Compares the notice before a preemption, if there is one, with the time of steps and saves.
    """

    def __init__(
        self, setup: TrainingSetup, tracker: Tracker, display: Display, speed: SpeedMeter, batches: BatchStream,
        checkpoints: CheckpointWriter, rank_metrics: Mapping[str, float],
    ) -> None:  # fmt: skip
        workload, self._mirror = setup.workload, setup.mirror
        self._engine, self._streams = workload.engine, workload.corpus.streams
        self._batches, self._rank_metrics = batches, rank_metrics
        self._saved_at = time.monotonic() if checkpoints.has_saved else None  # the state that a kill would go back to
        self._config = config = workload.config
        self._log, self._tracker, self._display, self._speed = workload.log, tracker, display, speed
        mirrored = f", mirrored to {setup.mirror.uri}" if setup.mirror.uri else ""
        self._where = f"Run directory: {short_path(setup.run.directory)}{mirrored}"
        self._is_dpo = config.loss.name == "dpo"
        self._total_steps, self._total_tokens = setup.state.horizon.total_steps, setup.state.horizon.total_tokens
        self._every_steps = config.log.every_steps
        num_rows = dataset_size(config, workload.corpus).rows * config.train.epoch_dataset_fraction
        self._rows_per_epoch, self._vocab_size = max(1, round(num_rows)), workload.spec.vocab_size
        self._queue_capacity = config.data.loader.prefetch_batches if config.data.loader.num_threads else 0
        facts = workload.engine.environment()
        device_kind, num_devices = str(facts.get("device_kind", "")), int(facts.get("num_devices", 1))
        planned = memory_per_device(workload.spec, config, device_kind, num_devices)
        self.notice: PreemptionNotice | None = None
        if (seconds := config.checkpoint.notice_seconds) is not None:
            earlier = MeasuredTimes.of_run(setup.run.directory)
            self.notice = PreemptionNotice(seconds, workload.log, earlier, workload.distributed)
        self._planned_memory_bytes = float(planned.total_bytes_on(device_kind))

    def settled(self, settled: SettledStep) -> None:
        """Report the first loss, steps without an update, and the metrics of a logged step."""
        values = settled.values
        spikes = {"spike_steps": float(settled.is_spike)} if self._config.train.spike_policy != "off" else {}
        self._tracker.observe({**values.extra, "nonfinite_steps": float(not values.finite), **spikes})
        if settled.number == 1:
            self._report_first_loss(values.loss)
        if not values.finite:
            self._log.event("nonfinite_step", settled.skipped, level="warning", step=settled.number)
        if settled.is_spike:
            limit = settled.step.max_loss
            self._log.event("loss_spike", settled.skipped, level="warning", step=settled.number, max_loss=limit)
        if settled.is_planned_skip:
            self._log.quiet_event("planned_skip", settled.skipped, step=settled.number)
        if is_logged_step(self._every_steps, self._total_steps, settled.number):
            self._log_step(settled)

    def _report_first_loss(self, loss: float) -> None:
        """Report the first loss beside that of an untrained model; of DPO, beside that of its reference."""
        if self._is_dpo:
            self._log.event("first_step", f"Step 1 loss {loss:.3f} (ln 2 = {math.log(2):.3f})", loss=loss)
            return
        entropy = math.log(self._vocab_size)
        text = f"Step 1 loss {loss:.3f} (ln vocab = {entropy:.3f})"
        self._log.event("first_step", text, loss=loss, ln_vocabulary=entropy)

    def _log_step(self, settled: SettledStep) -> None:
        """Record the metrics of a step and show it."""
        step, values = settled.step, settled.values
        reading, status = self._speed.read(), self._status()
        if self.notice is not None:
            self.notice.step(reading.step_seconds)
        epoch = step.progress.cursor.position / self._rows_per_epoch
        numbers = {
            "loss": values.loss,
            **({} if self._is_dpo else {"perplexity": math.exp(values.loss) if values.loss < 700 else math.inf}),
            "grad_norm": values.grad_norm,
            "learning_rate": step.lr,
            "weight_decay": step.weight_decay,
            "tokens_total": float(step.progress.num_tokens),
            "epoch": epoch,
            **reading.metrics(),
            **status,
        }
        self._tracker.log(settled.number, numbers)
        if settled.number == 1:
            self._display.message(self._where, "info")  # before this step, an error removes a new run
        self._display.step(self._view(settled, reading, epoch, status))

    def _status(self) -> dict[str, float]:
        """Return the current metrics of memory (of all ranks), loader, checkpoints and mirror."""
        saved_at, uploader = self._saved_at, self._mirror.uploader
        return {
            **host_memory(),
            "queue_depth": float(self._batches.queue_depth),
            **({} if saved_at is None else {"seconds_since_save": time.monotonic() - saved_at}),
            **self._engine.device_stats(),
            **self._rank_metrics,
            **({} if self._streams is None else self._streams.metrics()),
            **({} if uploader is None else uploader.metrics()),
        }

    def _view(self, settled: SettledStep, reading: Reading, epoch: float, status: Mapping[str, float]) -> StepView:
        step, total_steps = settled.step, self._total_steps
        used = {"host": status.get("memory/host_bytes"), "device": status.get("memory/device_bytes")}
        return StepView(
            step=settled.number,
            total_steps=total_steps,
            loss=settled.values.loss,
            num_tokens=step.progress.num_tokens,
            total_tokens=self._total_tokens,
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
            slow_cause=slow_cause(reading.seconds, self._config),
        )

    def saved(self, path: Path, progress: Progress, seconds: float) -> None:
        """Report a committed checkpoint, whose state is ``seconds`` old; on the main rank, from any thread."""
        self._saved_at = time.monotonic() - seconds
        self._tracker.observe({"checkpoint_write_seconds": seconds})
        if self.notice is not None:
            self.notice.saved(seconds)
        text = f"Saved {path.name} in {seconds:.2f} s"
        self._log.event(SAVED, text, step=progress.step, chain=progress.chain, seconds=seconds)

    def validating(self, progress: Progress) -> Callable[[Evaluation, Sequence[tuple[str, str]]], None]:
        """Return a function that reports the result, the completions and the time since this call."""
        started = time.perf_counter()

        def report(found: Evaluation, completions: Sequence[tuple[str, str]]) -> None:
            unit = "pair" if self._is_dpo else "token"
            bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
            text = (
                f"Validation at step {progress.step:,}: loss {found.loss:.4f}{bits}, "
                f"accuracy {found.accuracy:.1%} of {pluralize(found.num_target_tokens, unit)}"
            )
            self._log.event("validation", text + _losses_by_source(found), step=progress.step, loss=found.loss)
            for prompt, completion in completions:
                self._display.sample(prompt, completion)
                text = f"Sample at step {progress.step:,}: {prompt!r} -> {completion!r}"
                self._log.quiet_event("sample", text, step=progress.step, prompt=prompt, completion=completion)
            numbers: dict[str, float | None] = {
                "eval/loss": found.loss,
                "eval/perplexity": found.perplexity,
                "eval/bits_per_byte": found.bits_per_byte,
                "eval/accuracy": found.accuracy,
                f"eval/{unit}s": float(found.num_target_tokens),
                "eval_seconds": time.perf_counter() - started,
                **found.custom,
            }
            self._tracker.log(progress.step, {name: value for name, value in numbers.items() if value is not None})

        return report

    def evaluating_tasks(self, progress: Progress) -> Callable[[TasksReport], None]:
        """Return a function that reports the results and the time since this call."""
        started = time.perf_counter()

        def report(found: TasksReport) -> None:
            seconds = time.perf_counter() - started
            log_report(found, progress, seconds, self._log)
            self._tracker.log(progress.step, {"tasks_seconds": seconds, **task_metrics(found.results)})

        return report

    def finish(self, progress: Progress) -> Reading:
        """Flush the last metrics; return the throughput of the whole process."""
        self._tracker.log(progress.step, {})
        return self._speed.total()


def is_logged_step(every_steps: int, total_steps: int, step: int) -> bool:
    """Whether the metrics of a step are recorded: the first, the last, and every ``every_steps``."""
    return step in {1, total_steps} or step % every_steps == 0


def _losses_by_source(found: Evaluation) -> str:
    parts = [(name.split("/"), value) for name, value in found.custom.items()]
    losses = [f"{part[2]} {value:.4f}" for part, value in parts if part[1] == "sources" and part[-1] == "loss"]
    return f"; by source: {', '.join(losses)}" if losses else ""


class SpeedMeter:
    """Measures the throughput of one process.

    Args:
        workload: The model whose FLOPs are counted, and the engine whose matmul rate is measured.
        heartbeat: Knows the time that the loop waits for data, saves and validates.
    """

    def __init__(self, workload: Workload, heartbeat: Heartbeat) -> None:
        self._workload = workload
        config = workload.config
        self._work = functools.cache(functools.partial(_work, workload.spec, config.data.document_mask))
        self._measures = config.log.matmul_peak and workload.distributed.is_main
        self._remeasured, self._reported_impossible = 0, False
        self._num_tokens = 0  # after the last step; the first step of a process only starts the clock
        self._throughput = Throughput(heartbeat.seconds, self._limits())
        self.total = self._throughput.total

    def count(self, num_tokens: int, row_tokens: int) -> None:
        """Count a step when it has started; a save settles a step early, so settled ones would distort the speed.

        Args:
            num_tokens: Positions that the run has processed after this step.
            row_tokens: Positions per row.
        """
        work = self._work(num_tokens - self._num_tokens, row_tokens)
        self._num_tokens = num_tokens
        self._throughput.count(work)

    def read(self) -> Reading:
        """Return the speed since the last reading."""
        reading = self._throughput.read()
        return self._checked(reading) if reading.impossible else reading

    def _checked(self, reading: Reading) -> Reading:
        """Measure the matmul rate again, because the device may have been busy; report what stays impossible."""
        if self._measures and self._remeasured < _MAX_REMEASURED:
            self._remeasured += 1
            self._workload.engine.synchronize()  # the step in flight counts as training
            with self._throughput.excluded(), contextlib.suppress(RuntimeError, MemoryError):  # too little memory
                self._throughput.raise_matmul_peak(_matmul_rate(self._workload, is_first=False))
            return self._throughput.rated_again()
        if not self._reported_impossible:
            self._reported_impossible = True
            self._workload.log.event("impossible_speed", reading.impossible, level="warning")
        return reading

    def _limits(self) -> Limits:
        """Return the data-sheet peak and the measured matmul rate, over all devices."""
        config, facts = self._workload.config, self._workload.engine.environment()
        rate = _matmul_rate(self._workload) if self._measures else None
        if rate is not None:
            row_tokens = config.data.sequence_length_tokens
            num_tokens = batch_sizes_of(config).largest * row_tokens
            seconds = self._work(num_tokens, row_tokens).least_flops / rate
            if seconds > _LONG_STEP_SECONDS:
                text = f"Step of {pluralize(num_tokens, 'token')}: at least {seconds:,.0f} s at this rate"
                self._workload.log.info(text)
        return Limits(
            peak_flops_per_second=peak_of_environment(facts, config.precision),
            matmul_peak_flops_per_second=rate,
        )


def _work(spec: ModelSpec, document_mask: bool, num_tokens: int, row_tokens: int) -> Work:
    """Return the FLOPs of a step of ``num_tokens`` positions in rows of ``row_tokens``."""
    # A document mask lets kernels skip most of the attention, but never the matrix products.
    least = 6.0 * spec.num_matmul_weights if document_mask else flops.causal_flops_per_token(spec, row_tokens)
    return Work(num_tokens, num_tokens * flops.flops_per_token(spec, row_tokens), num_tokens * least)


def _matmul_rate(workload: Workload, *, is_first: bool = True) -> float:
    """Measure the matmul FLOP/s of all devices of the run, at the shapes of its model; report the first measurement."""
    config, spec = workload.config, workload.spec
    weights = [shape for row in spec.parameters for shape in row.matrix_shapes] + [(spec.vocab_size, spec.hidden_size)]
    facts = workload.engine.environment()
    on_cpu = facts.get("device_kind") == "cpu"
    most = _MAX_MEASURED_POSITIONS_CPU if on_cpu else _MAX_MEASURED_POSITIONS
    positions = min(config.train.micro_batch_rows * config.data.sequence_length_tokens, most)
    measured = measure_matmul_peak(
        training_shapes(weights, positions), workload.engine.matmul_seconds,
        warmup_seconds=0.0, repeats=3, enough_seconds=_MEASURED_SECONDS,
        max_elements=MAX_ELEMENTS if on_cpu else MAX_ELEMENTS_ACCELERATOR,
    )  # fmt: skip
    if is_first:
        rate = measured.flops_per_second / 1e9
        workload.log.info(
            f"Measured matmul peak: {rate:,.0f} GFLOP/s" if rate >= 10 else f"Measured matmul peak: {rate:.2g} GFLOP/s"
        )
    # One device is measured. CPU devices of one process share its cores.
    num_devices = int(facts.get("num_devices", 1))
    return measured.flops_per_second * (workload.distributed.world_size if on_cpu else num_devices)
