"""Throughput, MFU, use of time and memory of a process, and what slows it down.

In: the work of every step (tokens and FLOPs), and the time that the loop has spent in each phase. Out: a ``Reading``
per window and for the whole process. The clock starts at the end of the first step, so compilation and warm-up are
excluded.

    training seconds   = wall seconds - save seconds - eval seconds
    tokens_per_second  = positions processed / training seconds
    time fractions     = compute + data + save + eval = 1, of wall seconds
    mfu_fraction       = FLOPs of the steps / training seconds / data-sheet peak
    matmul_peak_fraction = FLOPs of the steps / training seconds / measured matmul peak

FLOPs are summed over the steps of a window, because row lengths may differ between steps. A speed above what the
hardware can do is never shown: ``check_possible`` refuses it, and a ``Reading`` omits it and states why. ``slow_cause``
names the setting to change if a run spends much of its time on anything but training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

import psutil

from vorox.core.errors import NumericalError
from vorox.core.schema import RunConfig
from vorox.records.step_times import Phase

MATMUL_PEAK_TOLERANCE = 1.15
"""Accepted ratio of a speed to the measured matmul peak; clocks and load differ between two measurements."""
_SLOW_FRACTION = 0.2
"""Share of the time from which on a cause is named."""
_SLOW_SECONDS = 5.0
"""Shorter measurements name none."""
_MAX_READER_THREADS = 8
_PHASES: Mapping[str, Phase] = {"data": "data", "save": "save", "eval": "validation"}
"""Uses of time that are not compute, and their phases of the loop."""


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic of one or more steps, over all ranks.

    Attributes:
        num_tokens: Positions processed.
        flops: By the usual convention for MFU, 6N + 12LDT per position.
        least_flops: A lower bound for any implementation (masked attention skipped).
    """

    num_tokens: int = 0
    flops: float = 0.0
    least_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_tokens + other.num_tokens, self.flops + other.flops, self.least_flops + other.least_flops)


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of the speed, over all devices of the run; ``None`` if unknown.

    Attributes:
        peak_flops_per_second: Data-sheet peak in the run's precision.
        matmul_peak_flops_per_second: Measured peak on the matrix shapes of the model (``runtime/matmul_peak.py``).
    """

    peak_flops_per_second: float | None = None
    matmul_peak_flops_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Throughput and time breakdown of one window; unknown or impossible values are ``None``.

    Attributes:
        num_steps: Steps in the window.
        num_tokens: Positions processed.
        seconds: Wall seconds by use: compute, data, save, eval.
        tokens_per_second: Positions per second of training.
        model_flops_per_second: FLOPs per second of training.
        mfu_fraction: Share of the data-sheet peak.
        matmul_peak_fraction: Share of the highest matmul rate seen: the measured one, or that of these steps.
        impossible: Why a value was refused; empty if none was.
    """

    num_steps: int
    num_tokens: int
    seconds: Mapping[str, float]
    tokens_per_second: float | None = None
    model_flops_per_second: float | None = None
    mfu_fraction: float | None = None
    matmul_peak_fraction: float | None = None
    impossible: str = ""

    @property
    def training_seconds(self) -> float:
        return self.seconds["compute"] + self.seconds["data"]

    @property
    def step_seconds(self) -> float | None:
        return self.training_seconds / self.num_steps if self.num_steps else None

    @property
    def time_fractions(self) -> dict[str, float]:
        """Share of the wall seconds by use; empty if no time has passed."""
        total = sum(self.seconds.values())
        return {use: spent / total for use, spent in self.seconds.items()} if total > 0 else {}

    def metrics(self) -> dict[str, float]:
        """Return the known values by metric name."""
        values: dict[str, float | None] = {
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "data_wait_seconds": self.seconds["data"] / self.num_steps if self.num_steps else None,
            "data_wait_fraction": self.seconds["data"] / self.training_seconds if self.training_seconds > 0 else None,
            "model_flops_per_second": self.model_flops_per_second,
            "mfu_fraction": self.mfu_fraction,
            "matmul_peak_fraction": self.matmul_peak_fraction,
            **{f"time/{use}_fraction": fraction for use, fraction in self.time_fractions.items()},
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True)
class _Window:
    """Sums since the start of a window, and the seconds by use at its start."""

    started_at: float
    spent_before: Mapping[str, float]
    num_steps: int = 0
    work: Work = Work()


class Throughput:
    """Measures the throughput of one process.

    Invariant: no method is called during the phases data, save and validation, so a window contains each of them whole
    or not at all, and their seconds are at most its wall seconds.

    Args:
        phase_seconds: Time that the loop has spent in each phase so far: ``Heartbeat.seconds``, which stays current.
        limits: Upper bounds of the speed.
        clock: The monotonic clock of the phases, in seconds.
    """

    def __init__(
        self,
        phase_seconds: Mapping[Phase, float],
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits or Limits()
        self._phase_seconds, self._clock = phase_seconds, clock
        self._read: tuple[Reading, Work] | None = None
        self._window: _Window | None = None
        self._whole: _Window | None = None

    def count(self, work: Work) -> None:
        """Count the work of a step; call it at the same point of every step. The first call only starts the clock."""
        if self._window is None or self._whole is None:
            self._window, self._whole = self._open_window(), self._open_window()
            return
        for window in (self._window, self._whole):
            window.num_steps += 1
            window.work += work

    def _open_window(self) -> _Window:
        return _Window(self._clock(), self._spent())

    def _spent(self) -> dict[str, float]:
        """Return the total seconds of what is not compute."""
        return {use: self._phase_seconds[phase] for use, phase in _PHASES.items()}

    @contextlib.contextmanager
    def excluded(self) -> Generator[None]:
        """Leave the time inside out of every reading."""
        started_at = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started_at
            for window in (self._window, self._whole):
                if window is not None:
                    window.started_at += spent

    def raise_matmul_peak(self, flops_per_second: float) -> None:
        """Record a new measurement of the matmul peak; the highest counts."""
        highest = max(flops_per_second, self.limits.matmul_peak_flops_per_second or 0.0)
        self.limits = replace(self.limits, matmul_peak_flops_per_second=highest)

    def read(self) -> Reading:
        """Return the window since the last ``read`` and start the next one."""
        window = self._window
        if window is None:
            return Reading(0, 0, {"compute": 0.0, "data": 0.0, "save": 0.0, "eval": 0.0})
        self._window = self._open_window()
        reading = self._seconds_of(window, self._window.started_at)
        self._read = reading, window.work
        return _with_rates(reading, window.work, self.limits)

    def rated_again(self) -> Reading:
        """Return the last ``read`` under the limits of now."""
        assert self._read is not None, "there is no reading"
        return _with_rates(*self._read, self.limits)

    def total(self) -> Reading:
        """Return the reading of the whole process since the end of the first step."""
        whole = self._whole
        if whole is None:
            return self.read()
        return _with_rates(self._seconds_of(whole, self._clock()), whole.work, self.limits)

    def _seconds_of(self, window: _Window, now: float) -> Reading:
        """Return steps, tokens and seconds of a window, without rates."""
        spent = {use: seconds - window.spent_before[use] for use, seconds in self._spent().items()}
        rest = now - window.started_at - sum(spent.values())  # negative by rounding only
        seconds = {"compute": max(0.0, rest), **spent}
        return Reading(window.num_steps, window.work.num_tokens, seconds)


def _with_rates(reading: Reading, work: Work, limits: Limits) -> Reading:
    seconds = reading.training_seconds
    if not reading.num_steps or seconds <= 0:
        return reading
    try:
        check_possible(work, seconds, limits)
    except NumericalError as error:
        return replace(reading, impossible=error.what)
    tokens_per_second, rate = work.num_tokens / seconds, work.flops / seconds
    peak, matmul_peak = limits.peak_flops_per_second, limits.matmul_peak_flops_per_second
    mfu = rate / peak if peak else None
    matmul_peak_fraction = rate / matmul_peak if matmul_peak else None
    if (mfu or 0) > 1 or (matmul_peak_fraction or 0) > MATMUL_PEAK_TOLERANCE:
        impossible = (
            f"MFU is not shown: 6N + 12LDT includes masked attention and gives {rate / 1e12:,.3g} TFLOP/s, more than "
            "the hardware can do"
        )
        return replace(reading, tokens_per_second=tokens_per_second, impossible=impossible)
    return replace(
        reading,
        tokens_per_second=tokens_per_second,
        model_flops_per_second=rate,
        mfu_fraction=mfu,
        matmul_peak_fraction=None if matmul_peak_fraction is None else min(1.0, matmul_peak_fraction),
    )


def check_possible(work: Work, seconds: float, limits: Limits) -> None:
    """Refuse a speed above what the hardware can do.

    Raises:
        NumericalError: The speed exceeds the data-sheet peak, or the measured matmul peak by more than the tolerance.
    """
    rate = work.least_flops / seconds
    bounds = (
        ("the data-sheet peak", limits.peak_flops_per_second, 1.0),
        ("the measured matmul peak", limits.matmul_peak_flops_per_second, MATMUL_PEAK_TOLERANCE),
    )
    for name, bound, tolerance in bounds:
        if bound is not None and rate > bound * tolerance:
            per_token = work.least_flops / work.num_tokens
            raise NumericalError(
                f"{work.num_tokens / seconds:,.0f} tokens/s is impossible: at {per_token / 1e9:,.4g} GFLOP per token "
                f"it is {rate / 1e12:,.4g} TFLOP/s, {rate / bound:.1%} of {name} ({bound / 1e12:,.4g} TFLOP/s)",
                where="runtime/throughput.py",
                hint="the number of tokens, the clock, the FLOPs per token or the bound is wrong",
            )


def eta_seconds(reading: Reading, steps_left: int) -> float | None:
    """Return the remaining time at the speed of a reading, including checkpoints and validation."""
    total = sum(reading.seconds.values())
    return total / reading.num_steps * steps_left if reading.num_steps and total > 0 else None


def host_memory() -> dict[str, float]:
    """Return current and peak resident memory, and the memory available on the machine, by metric name."""
    now = psutil.Process().memory_info()
    if sys.platform == "win32":
        peak_bytes = now.peak_wset
    else:
        import resource

        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "memory/host_bytes": float(now.rss),
        "memory/host_peak_bytes": float(peak_bytes),
        "memory/host_available_bytes": float(psutil.virtual_memory().available),
    }


def slow_cause(seconds: Mapping[str, float], config: RunConfig) -> str | None:
    """Return the largest loss of time and its remedy on one line; ``None`` if no loss is large.

    Args:
        seconds: Time by use since the last logged step (compute, data, save, eval).
        config: The run.
    """
    total = sum(seconds.values())
    losses = {use: spent / total for use, spent in seconds.items() if use != "compute"} if total else {}
    use = max(losses, key=losses.__getitem__, default="")
    if total < _SLOW_SECONDS or not use or losses[use] < _SLOW_FRACTION:
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
