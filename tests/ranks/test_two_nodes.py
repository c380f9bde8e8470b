"""Two machines train one run; then one of them fails: the verdict, the exit code, the time that it takes, the resume.

The machines are network namespaces (``two_nodes.py``); they share the disk. The oracle is the run of one process: what
is read is equal, losses agree to 1e-5, and a run that was interrupted and resumed has the entries of one that was not,
bit for bit. Each engine trains, is cut off, loses a rank and has one stopped; what depends on the launcher and the
watchdog alone is shown with PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from eventually import wait_until
from ranks.processes import Runs, entries, environment, losses, python_path
from ranks.two_nodes import TwoNodes, reason_against
from vorox.core.files.json_lines import read_lines
from vorox.core.run_layout import RunLayout
from vorox.experiments.tracking import read_metrics
from vorox.runtime.heartbeat import read_beat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY := reason_against()), reason=WHY or "two machines can be made"),
]

STALL_SECONDS = 10
END_SECONDS = 60
"""Bound from the fault to the end of both machines' commands: the stall, the stacks, and the launcher's 30 seconds."""
TRAIN_SECONDS = 180
SETTINGS = ["parallel.data_parallel_size=2", f"runtime.stall_timeout_seconds={STALL_SECONDS}"]
TORCH = pytest.param("torch", marks=pytest.mark.torch)
each_engine = pytest.mark.parametrize("runs", [TORCH, pytest.param("jax", marks=pytest.mark.jax)], indirect=True)
one_engine = pytest.mark.parametrize("runs", [TORCH], indirect=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    model = [f"backend={request.param}", "log.matmul_peak=false", "model.vocab_size=265", "eval.prompts=[]"]
    model += ["runtime.num_threads=null"] if request.param == "jax" else []
    return Runs(tmp_path_factory.mktemp("nodes"), model)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as made:
        yield made


@pytest.fixture(scope="module")
def pair(runs: Runs) -> Path:
    """A run of the two machines that nothing happens to."""
    with TwoNodes() as nodes, started(runs, nodes, "pair") as commands:
        end(commands, (0, 0), TRAIN_SECONDS)
    return runs.find("pair")


@contextmanager
def started(
    runs: Runs, nodes: TwoNodes, name: str, fault: str = "", **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on both machines, until the block ends; ``fault`` is a folder beside this file with a patch."""
    if fault:
        variables["PYTHONPATH"] = python_path(fault)
    with ExitStack() as stack:
        commands: list[subprocess.Popen[str]] = []
        for index in (0, 1):
            command = subprocess.Popen(
                nodes.command(index, runs.command(name, SETTINGS)), cwd=runs.directory, text=True,
                env=environment() | nodes.variables(index) | variables, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            stack.enter_context(command)
            stack.callback(kill_all, command.pid)
            commands.append(command)
        yield commands


def kill_all(session: int) -> None:
    """End the launcher and its ranks, if they still run."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def end(commands: Sequence[subprocess.Popen[str]], codes: Sequence[int], seconds: float) -> list[str]:
    """What the commands said, which end with these codes in time."""
    until = time.monotonic() + seconds
    said = [command.communicate(timeout=max(1.0, until - time.monotonic()))[0] for command in commands]
    assert [command.returncode for command in commands] == list(codes), "\n".join(text[-5000:] for text in said)
    return said


class Held:
    """Two commands whose ranks wait in step 9, with step 8 saved."""

    def __init__(self, commands: Sequence[subprocess.Popen[str]], run: Path, hold: Path) -> None:
        self.commands, self.run, self._hold = commands, run, hold

    def rank(self, number: int) -> int:
        """The process id of a rank, the only one of its machine."""
        beat = read_beat(RunLayout(self.run).heartbeat(number))
        assert beat is not None
        return TwoNodes.process_here(self.commands[number], beat.process.process_id)

    def release(self, *, but: str = "") -> None:
        """Let the ranks go on, all but the named one."""
        self._hold.write_text(but) if but else self._hold.unlink()

    def end(self, *codes: int) -> list[str]:
        """What the commands said, which end with these codes within the bound after a fault."""
        return end(self.commands, codes, END_SECONDS)

    @property
    def failure(self) -> str:
        return json.loads((self.run / "failure.json").read_bytes())["what"]


def wait_for_step_9(runs: Runs, name: str, commands: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until both ranks are in it."""

    def are_in_step_9() -> bool:
        for command in commands:
            assert command.poll() is None, command.communicate()
        layout = RunLayout(runs.find(name))
        beats = [read_beat(layout.heartbeat(rank)) for rank in (0, 1)]
        return all(beat is not None and (beat.step, beat.phase) == (9, "step") for beat in beats)

    wait_until(are_in_step_9, TRAIN_SECONDS)


@contextmanager
def held(runs: Runs, nodes: TwoNodes, name: str) -> Iterator[Held]:
    """A run of the two machines up to step 9."""
    hold = runs.directory / f"hold-{name}"
    hold.touch()
    variables = {"TESTS_HOLD": str(hold), "TESTS_SETTINGS": " ".join(runs.model)}
    with started(runs, nodes, name, "held", **variables) as commands:
        wait_for_step_9(runs, name, commands)
        wait_until((runs.find(name) / "checkpoints/step-00000008/MANIFEST.json").exists, TRAIN_SECONDS)
        yield Held(commands, runs.find(name), hold)


def resumed_equals(runs: Runs, name: str, pair: Path) -> None:
    """The same command on both machines finishes the run, bit for bit."""
    with TwoNodes() as again, started(runs, again, name) as commands:
        end(commands, (0, 0), TRAIN_SECONDS)
    assert entries(runs.find(name)) == entries(pair)


@each_engine
def test_two_machines_train_as_one_process(runs: Runs, pair: Path) -> None:
    alone = runs.train("alone", [])[0]
    assert [entry.batch for entry in entries(pair)] == [entry.batch for entry in entries(alone)]
    np.testing.assert_allclose(losses(pair), losses(alone), rtol=1e-5)


@each_engine
def test_a_machine_that_is_cut_off_is_a_stall_on_both(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    with held(runs, nodes, "cut") as run:
        nodes.cut()
        run.release()
        said = run.end(6, 6)
    assert "on host node-0" in said[0]
    assert "on host node-1" in said[1]
    resumed_equals(runs, "cut", pair)


@each_engine
def test_a_killed_rank_ends_both(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    """JAX computes in the background: the other rank waits for a report before it finds the error of a collective."""
    code, verdict = 1, "Rank 0 lost the connection to another rank"
    if "backend=jax" in runs.model:
        code, verdict = 6, "Rank 0 on host node-0 has waited for the other ranks"
    with held(runs, nodes, "killed") as run:
        os.kill(run.rank(1), signal.SIGKILL)
        run.release()
        said = run.end(code, 1)
    assert "Rank 1 of 2 was killed by SIGKILL" in said[1]
    assert verdict in said[0]
    assert "training state up to step 8 is safe" in said[0]
    resumed_equals(runs, "killed", pair)


@each_engine
def test_a_stopped_rank_is_named_and_ends_both(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    with held(runs, nodes, "stopped") as run:
        os.kill(run.rank(1), signal.SIGSTOP)
        run.release(but="1")
        said = run.end(6, 6)
    assert "Rank 1 on host node-1" in said[1]
    assert "SIGSTOP" in said[1]
    assert "SIGSTOP" in run.failure
    resumed_equals(runs, "stopped", pair)


@one_engine
def test_a_slow_machine_is_waited_for(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    """It stands still for half of the limit, again and again: nothing ends, and no bit differs."""
    with held(runs, nodes, "slow") as run:
        rank = run.rank(1)
        run.release()
        for _ in range(3):
            os.kill(rank, signal.SIGSTOP)
            time.sleep(STALL_SECONDS / 2)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.02)
        end(run.commands, (0, 0), TRAIN_SECONDS)
    assert entries(runs.find("slow")) == entries(pair)


@one_engine
def test_a_rank_that_computes_slowly_is_named_and_nothing_differs(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    with started(runs, nodes, "straggler", "slow") as commands:
        end(commands, (0, 0), TRAIN_SECONDS)
    run = runs.find("straggler")
    found = [event for event in read_lines(RunLayout(run).events) if event["kind"] == "straggler"]
    assert found
    assert {(event["fields"]["rank"], event["fields"]["host"], event["fields"]["cause"]) for event in found} == {
        (1, "node-1", "compute")
    }
    name = "ranks/slowest_seconds"
    slowest = [values[name] for values in read_metrics(run).values() if name in values]
    assert max(slowest) > 0.6
    assert entries(run) == entries(pair)


@one_engine
def test_different_collectives_are_a_stall(runs: Runs, pair: Path, nodes: TwoNodes) -> None:
    with started(runs, nodes, "diverging", "diverging") as commands:
        wait_for_step_9(runs, "diverging", commands)
        said = end(commands, (6, 6), END_SECONDS)
    assert all("has not finished forward and backward pass of step 9" in text for text in said)
    failure = json.loads(RunLayout(runs.find("diverging")).failure.read_bytes())
    assert "train_step" in failure["traceback"], "the stack of a rank that waits"
    resumed_equals(runs, "diverging", pair)
