"""Growing and streamed rows of several processes: the rows, order and plan of one process, whatever happens to them.

The oracle is one uninterrupted process over a growing cache. Batch digests and plans are equal bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from ranks.processes import PATIENCE_SECONDS, Runs, entries, fingerprint, losses, second_process
from ranks.test_processes import MODEL as JAX_MODEL
from ranks.test_torch_ranks import MODEL as TORCH_MODEL
from servers import http_server
from vorox.records.run_context import recorded_config

pytestmark = pytest.mark.slow

GROWING = [
    "data.cache.unit_bytes=300", "data.growth.mode=strict", "data.growth.first_segment_units=1",
    "data.growth.max_segment_units=1", "data.growth.later_passes=segments", "data.growth.horizon_steps=2",
]  # fmt: skip
LIMIT_BYTES = 16_000
MODES = {"growing": [], "streamed": ["data.mode=streaming", f"data.streaming.retention_bytes={LIMIT_BYTES}"]}
SIZES = {
    "torch": lambda count: [f"parallel.fsdp_size={count}"],
    "jax": lambda count: [f"parallel.data_parallel_size={count}"],
}


@pytest.fixture(
    scope="module", params=[pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    model = {"torch": TORCH_MODEL, "jax": JAX_MODEL}[request.param]
    return Runs(tmp_path_factory.mktemp(request.param), [*model, *GROWING])


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    run, _ = runs.train("alone", [])
    return run


def ranks(runs: Runs, count: int) -> list[str]:
    backend = "torch" if "backend=torch" in runs.model else "jax"
    return [*SIZES[backend](count), "--nproc", str(count)]


def forget_caches(runs: Runs) -> None:
    shutil.rmtree(runs.directory / "cache", ignore_errors=True)  # none, if no test of this module ran before


def plan(run: Path) -> list[str]:
    return (run / "plan.jsonl").read_text().splitlines()


def assert_rows_of(run: Path, oracle: Path) -> None:
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(oracle)]
    assert losses(run) == pytest.approx(losses(oracle), rel=1e-5)
    assert plan(run) == plan(oracle)
    assert len(plan(run)) > 3, "the plan grew"


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_read_the_rows_of_one(runs: Runs, alone: Path, mode: str) -> None:
    forget_caches(runs)
    run, _ = runs.train(mode, [*MODES[mode], *ranks(runs, 2)])
    assert_rows_of(run, alone)
    assert "bit-exact, 12 steps" in runs.vorox(["replay", str(run), "--nproc", "2"])


@pytest.mark.parametrize("mode", MODES)
def test_the_world_changes_at_resumes(runs: Runs, alone: Path, mode: str) -> None:
    """Four ranks, then three, one and two: no row is lost, repeated or in another place."""
    if "backend=jax" in runs.model:
        pytest.skip("three devices do not divide eight rows; what is read does not depend on the engine")
    forget_caches(runs)
    run, _ = runs.train(f"elastic-{mode}", [*MODES[mode], "train.num_steps=3", *ranks(runs, 4)])
    for count, steps in [(3, 6), (1, 9), (2, 12)]:
        sizes = ranks(runs, count) if count > 1 else ["parallel.fsdp_size=1"]
        runs.vorox(["train", "--resume", str(run), f"train.num_steps={steps}", *sizes])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    segments = [[line for line in plan(path) if '"segment"' in line] for path in (run, alone)]
    assert len(segments[0]) == len(segments[1])


def test_a_rank_that_is_killed_while_the_cache_grows_costs_nothing(runs: Runs, tmp_path: Path) -> None:
    forget_caches(runs)
    pair, _ = runs.train("uninterrupted", ranks(runs, 2))
    forget_caches(runs)
    process = runs.start("killed", ranks(runs, 2), tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", ranks(runs, 2))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    assert plan(run) == plan(pair)


def test_a_machine_fetches_each_byte_at_most_once_more_than_one_process(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.directory / "text", tmp_path / "web")
    size = (tmp_path / "web" / "text.jsonl").stat().st_size
    fetched = dict[int, int]()
    for count in (1, 3):
        if count == 3 and "backend=jax" in runs.model:
            count = 2
        shutil.rmtree(runs.directory / "cache", ignore_errors=True)
        with http_server(tmp_path / "web") as server:
            source = f"data.sources.0.paths=[{server.url}/text.jsonl]"
            words = ranks(runs, count) if count > 1 else []
            runs.train(f"web-{count}", [*MODES["streamed"], source, *words])
            fetched[count] = sum(request.sent_bytes for request in server.log.reads("text.jsonl"))
    one, several = fetched.values()
    assert one >= size
    assert several <= one + size, fetched


def test_minutes_are_those_of_the_main_rank(runs: Runs) -> None:
    run, _ = runs.train("minutes", [*MODES["streamed"], "--minutes", "0.1", *ranks(runs, 2)])
    num_steps = recorded_config(run).train.num_steps
    assert num_steps is not None
    assert len(entries(run)) == num_steps
