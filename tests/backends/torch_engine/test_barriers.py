"""Threads at barriers: who decides, and that libgomp follows."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from vorox.backends.torch_engine.device import barriers

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
COUNT_SLEEPS = """
import os, resource, sys, time
from vorox.backends.torch_engine.device import barriers
barriers._VARIABLES["GOMP_SPINCOUNT"] = "20000000000"  # never sleeps by itself, on a busy machine either
barriers.INTERVAL_SECONDS = 1e6
for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
    os.environ.pop(name)
barriers.prepare()
import torch
torch.set_num_threads(2)
watch = barriers.watch(2)
if watch is None:
    print("no libgomp"); sys.exit()
watch._cores = watch._cores[:2]  # a machine of two cores
values = torch.zeros(1 << 18)

def sleeps():
    for _ in range(3): values.add_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(50): values.add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

found = [sleeps()]
for others in (2.0, 0.0, 2.0):
    watch.decide(others)
    found.append(sleeps())
    deadline = time.monotonic() + 20
    while others == 0.0 and found[-1] > 5 and time.monotonic() < deadline:
        found[-1] = sleeps()  # the idle team ends a moment after its thread
print(*found)
"""


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_runtime_spins_for_a_bounded_time(no_variables: pytest.MonkeyPatch) -> None:
    no_variables.setattr(os, "environ", dict(os.environ))
    barriers.prepare()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 300_000  # libgomp's own default


@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_policy_wins(no_variables: pytest.MonkeyPatch, name: str) -> None:
    no_variables.setattr(os, "environ", dict(os.environ) | {name: "77"})
    barriers.prepare()
    assert {key: os.environ.get(key) for key in VARIABLES} == {key: "77" if key == name else None for key in VARIABLES}
    assert barriers.watch.__wrapped__(2) is None


def test_one_thread_needs_no_watch() -> None:
    assert barriers.watch.__wrapped__(1) is None


class Library:
    """Records the sizes of teams instead of starting them."""

    def __init__(self) -> None:
        self.teams: list[int] = []

    def GOMP_parallel(self, function: object, data: object, num_threads: ctypes.c_uint, flags: object) -> None:
        self.teams.append(num_threads.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the watch is for libgomp on Linux")
class TestBarrierWatch:
    def watch(
        self, monkeypatch: pytest.MonkeyPatch, *, cores: int, num_threads: int, library: Library | None = None
    ) -> barriers.BarrierWatch:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        return barriers.BarrierWatch(num_threads, cast("ctypes.CDLL", library or Library()))

    def test_sleeps_while_others_need_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watch, found = self.watch(monkeypatch, cores=4, num_threads=3), list[bool]()
        for others in (0.0, 1.2, 1.3, 4.0, 1.0, 0.0):
            watch.decide(others)
            found.append(watch._holder is not None)
        assert found == [False, False, True, True, False, False]

    def test_the_idle_team_exceeds_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = Library()
        watch = self.watch(monkeypatch, cores=16, num_threads=4, library=library)
        watch.decide(16.0)
        watch.decide(0.0)
        (team,) = library.teams
        assert 4 + (team - 1) > 16

    def test_counts_processor_time_of_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = self.watch(monkeypatch, cores=1, num_threads=1)
        wall, busy, own = watch._seconds()
        assert 0 < own < busy < wall


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists() or (os.cpu_count() or 1) < 2, reason="needs two cores, Linux")
def test_libgomp_follows() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SLEEPS], env=environment, capture_output=True, text=True, check=True
    )
    if "no libgomp" in done.stdout:
        pytest.skip("PyTorch uses another OpenMP runtime")
    spinning, sleeping, spinning_again, sleeping_again = map(int, done.stdout.split())
    assert max(spinning, spinning_again) <= 5
    assert min(sleeping, sleeping_again) >= 50
