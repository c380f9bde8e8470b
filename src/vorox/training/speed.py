"""The speed of a run, compared with the data sheet of its device and a measured matmul rate.

In: the tokens of every step and the time that the loop waited for data. Out: readings per window. A reading above the
measured rate has the rate measured again, a few times, before it is reported as impossible.
"""

from __future__ import annotations

import functools

from vorox.core.pluralize import pluralize
from vorox.models import flops
from vorox.models.spec import ModelSpec
from vorox.runtime.device_peaks import peak_flops_per_second
from vorox.runtime.matmul_peak import measure_matmul_peak, training_shapes
from vorox.runtime.throughput import Limits, Reading, Throughput, Work
from vorox.training.setup import Workload

_MAX_MEASURED_POSITIONS = 1 << 15
"""Longer products run at the same rate and would hold up the first step."""
_LONG_STEP_SECONDS = 30
"""A step that cannot be faster is announced, because nothing is shown before the first one is done."""
_MAX_REMEASURED = 3


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
