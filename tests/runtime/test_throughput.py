"""Speed and time by hand-made clocks, numbers that physics forbids, and the memory of this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vorox.core.errors import NumericalError
from vorox.experiments.metrics import metric
from vorox.runtime.heartbeat import Phase
from vorox.runtime.throughput import Limits, Reading, Throughput, Work, check_possible, eta_seconds, host_memory

TAKES_MEMORY = """
import json, mmap
from vorox.runtime.throughput import host_memory
before = host_memory()
block = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    block[page] = 1
print(json.dumps([before, host_memory()]))
"""


def work(num_tokens: int, flops_per_token: float = 0.0, least_flops_per_token: float | None = None) -> Work:
    least = flops_per_token if least_flops_per_token is None else least_flops_per_token
    return Work(num_tokens, num_tokens * flops_per_token, num_tokens * least)


class Clock:
    """The time, and what the loop has spent of it in each phase."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.phase_seconds: dict[Phase, float] = {"data": 5.0, "save": 20.0, "validation": 30.0}  # before step 1

    def __call__(self) -> float:
        return self.now

    def spend(self, phase: Phase, seconds: float) -> None:
        self.now += seconds
        self.phase_seconds[phase] += seconds


def throughput(clock: Clock, limits: Limits | None = None) -> Throughput:
    return Throughput(clock.phase_seconds, limits, clock=clock)


def test_one_window_by_hand() -> None:
    clock = Clock()
    meter = throughput(clock, Limits(peak_flops_per_second=4e9))
    clock.now += 60  # compiling
    meter.count(work(1000, 1e6))  # the first step only starts the clock
    for _ in range(10):
        clock.now += 1.5
        clock.spend("data", 0.5)
        meter.count(work(1000, 1e6))
    clock.spend("save", 3.0)
    clock.spend("validation", 7.0)
    reading = meter.read()
    assert reading.num_steps == 10
    assert reading.num_tokens == 10_000
    assert reading.seconds == {"compute": 15.0, "data": 5.0, "save": 3.0, "eval": 7.0}
    assert reading.tokens_per_second == 500.0
    assert reading.step_seconds == 2.0
    assert reading.model_flops_per_second == 5e8
    assert reading.mfu_fraction == 0.125
    assert reading.matmul_peak_fraction is None
    assert reading.time_fractions == {"compute": 0.5, "data": 5 / 30, "save": 0.1, "eval": 7 / 30}
    assert reading.metrics()["data_wait_fraction"] == 0.25
    assert reading.metrics()["data_wait_seconds"] == 0.5
    assert reading.impossible == ""


def test_windows_are_separate_and_the_total_is_all_of_them() -> None:
    clock = Clock()
    meter = throughput(clock)
    meter.count(work(100))
    speeds = []
    for seconds in (1.0, 2.0, 4.0):
        clock.now += seconds
        meter.count(work(100))
        clock.spend("save", 1.0)
        speeds.append(meter.read().tokens_per_second)
    assert speeds == [100.0, 50.0, 25.0]
    total = meter.total()
    assert total.tokens_per_second == 300 / 7
    assert total.seconds["save"] == 3.0
    assert meter.read().tokens_per_second is None, "no step, no speed"


def test_a_measurement_is_part_of_no_reading() -> None:
    """A new measurement of the matmul rate between two steps is neither training nor validation."""
    clock = Clock()
    meter = throughput(clock)
    with meter.excluded():
        clock.now += 3.0
    meter.count(work(100))
    for measured_seconds in (0.0, 30.0):
        with meter.excluded():
            clock.now += measured_seconds
        clock.now += 1.75
        clock.spend("data", 0.25)
        meter.count(work(100))
    reading = meter.read()
    assert reading.seconds == {"compute": 3.5, "data": 0.5, "save": 0.0, "eval": 0.0}
    assert (reading.tokens_per_second, meter.total().tokens_per_second) == (50.0, 50.0)


def test_before_the_first_step_nothing_is_known() -> None:
    clock = Clock()
    meter = throughput(clock)
    clock.spend("validation", 1.0)
    assert meter.read().tokens_per_second is None
    assert meter.total().metrics() == {}
    assert eta_seconds(meter.read(), 10) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "save", "validation", "read"]), st.floats(0, 1e4), st.floats(0, 1e4)),
        max_size=30,
    )
)
def test_fractions_always_sum_to_one_and_seconds_to_the_time_that_passed(
    events: list[tuple[Literal["step", "save", "validation", "read"], float, float]],
) -> None:
    clock = Clock()
    meter = throughput(clock)
    started_at = last_read_at = None
    for kind, seconds, wait in events:
        if kind == "step":
            clock.now += seconds
            clock.spend("data", wait)
            meter.count(work(7))
            if started_at is None:
                started_at = last_read_at = clock.now
        elif kind == "read":
            meter.read()
            last_read_at = None if started_at is None else clock.now
        else:
            clock.spend(kind, seconds)
    for reading, since in ((meter.total(), started_at), (meter.read(), last_read_at)):
        passed = 0.0 if since is None else clock.now - since
        assert sum(reading.seconds.values()) == pytest.approx(passed, abs=1e-6)  # fp64, up to 6e5 s
        fractions = reading.time_fractions
        if fractions:
            assert sum(fractions.values()) == pytest.approx(1.0)
            assert all(0 <= fraction <= 1 + 1e-9 for fraction in fractions.values())


def test_every_number_is_registered() -> None:
    clock = Clock()
    meter = throughput(clock, Limits(1e12, 1e12))
    meter.count(work(1))
    clock.now += 1.0
    meter.count(work(1))
    names = meter.read().metrics()
    assert {"tokens_per_second", "mfu_fraction", "matmul_peak_fraction", "time/compute_fraction"} <= set(names)
    for name in names:
        metric(name)


# The claim of a published table: 415M parameters, 24 layers x 1536, T=512, 106,212 tokens/s on an RTX 4090 (165.2
# TFLOP/s dense bf16). 6 x 415e6 + 12 x 24 x 1536 x 512 = 2.7165 GFLOP per token -> 288.5 TFLOP/s = 174.7 %.
CLAIM_FLOPS = 6 * 415e6 + 12 * 24 * 1536 * 512


def test_the_impossible_claim_is_refused_with_its_numbers() -> None:
    with pytest.raises(NumericalError) as caught:
        check_possible(work(106_212, CLAIM_FLOPS), 1.0, Limits(165.2e12))
    for number in ("106,212 tokens/s is impossible", "288.5 TFLOP/s", "174.7% of the data-sheet peak", "165.2 TFLOP/s"):
        assert number in caught.value.what
    assert caught.value.exit_code == 7


def test_the_honest_speed_of_that_card_is_not() -> None:
    check_possible(work(73_000, CLAIM_FLOPS), 2.0, Limits(165.2e12))


@pytest.mark.parametrize(
    ("least_flops", "limits", "refused"),
    [
        (10.0, Limits(peak_flops_per_second=10), False),
        (10.001, Limits(peak_flops_per_second=10), True),
        (11.5, Limits(matmul_peak_flops_per_second=10), False),
        (11.6, Limits(matmul_peak_flops_per_second=10), True),
        (1e30, Limits(), False),
    ],
)
def test_bounds(least_flops: float, limits: Limits, refused: bool) -> None:
    done = Work(num_tokens=1, flops=1e30, least_flops=least_flops)
    if refused:
        with pytest.raises(NumericalError, match="impossible"):
            check_possible(done, 1.0, limits)
    else:
        check_possible(done, 1.0, limits)


def test_flops_are_summed_over_the_steps_of_a_window() -> None:
    """Rows may be longer in one step than in another; one constant would be right in neither window."""
    clock = Clock()
    meter = throughput(clock, Limits(peak_flops_per_second=1e6))
    meter.count(work(100, 5.0))
    rates = []
    for per_token in ((10.0, 10.0), (10.0, 40.0), (40.0, 40.0)):
        for flops in per_token:
            clock.now += 1.0
            meter.count(work(100, flops))
        rates.append(meter.read().model_flops_per_second)
    assert rates == [1000.0, 2500.0, 4000.0]
    assert meter.total().mfu_fraction == 2500.0 / 1e6


def read_once(done: Work, limits: Limits) -> Reading:
    clock = Clock()
    meter = throughput(clock, limits)
    meter.count(Work())
    clock.now += 1.0
    meter.count(done)
    return meter.read()


def test_an_impossible_speed_is_not_shown() -> None:
    reading = read_once(work(106_212, CLAIM_FLOPS), Limits(peak_flops_per_second=165.2e12))
    assert reading.tokens_per_second is None
    assert reading.mfu_fraction is None
    assert "106,212 tokens/s is impossible" in reading.impossible
    assert "tokens_per_second" not in reading.metrics()
    assert reading.step_seconds == 1.0, "what is no claim about the hardware stays"


def test_a_higher_peak_makes_the_last_reading_possible() -> None:
    """What a busy machine measured too low is measured again; the speed of these steps is shown all the same."""
    clock = Clock()
    meter = throughput(clock, Limits(matmul_peak_flops_per_second=1e9))
    done = work(100, 3e7)
    meter.count(done)
    clock.now += 1.0
    meter.count(done)
    assert meter.read().tokens_per_second is None
    meter.raise_matmul_peak(2.9e9)
    again = meter.rated_again()
    assert (again.tokens_per_second, again.num_steps, again.impossible) == (100, 1, "")
    assert again.matmul_peak_fraction == 1.0, "the steps are the highest rate seen"


def test_a_convention_that_counts_masked_attention_hides_mfu_but_not_the_speed() -> None:
    reading = read_once(work(100, 10e9, 6e9), Limits(peak_flops_per_second=0.9e12))
    assert reading.tokens_per_second == 100
    assert reading.mfu_fraction is None
    assert reading.model_flops_per_second is None
    assert "MFU is not shown" in reading.impossible


def test_eta_includes_pauses() -> None:
    clock = Clock()
    meter = throughput(clock)
    meter.count(work(1))
    for _ in range(10):
        clock.now += 1.0
        meter.count(work(1))
    clock.spend("save", 5.0)
    assert eta_seconds(meter.total(), 100) == 150.0


def test_a_ceiling_measured_in_a_busy_moment_can_only_rise() -> None:
    meter = throughput(Clock(), Limits(matmul_peak_flops_per_second=100.0))
    meter.raise_matmul_peak(150.0)
    assert meter.limits.matmul_peak_flops_per_second == 150.0
    meter.raise_matmul_peak(120.0)
    assert meter.limits.matmul_peak_flops_per_second == 150.0


def test_memory_grows_by_what_is_taken() -> None:
    """In a process where nothing else happens."""
    said = subprocess.run([sys.executable, "-c", TAKES_MEMORY], capture_output=True, text=True, check=True)
    before, after = json.loads(said.stdout)
    assert after["memory/host_bytes"] - before["memory/host_bytes"] == pytest.approx(64 << 20, rel=0.2)
    assert after["memory/host_peak_bytes"] >= after["memory/host_bytes"] * 0.9
    assert after["memory/host_available_bytes"] > 0
    for name in after:
        assert metric(name).unit == "bytes"


def test_resident_memory_is_what_the_kernel_says() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    kernel_bytes = int(lines["VmRSS"].split()[0]) * 1024
    assert host_memory()["memory/host_bytes"] == pytest.approx(kernel_bytes, rel=0.1)
