"""Two processes with two host devices each are one run: the losses of one device, one chain, one directory.

The oracle is the same command with one process and one device. Sums are made in another order, so losses agree to
1e-5 (relative); what is read (the batch digests of the chain) and what a resumed run repeats are equal bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ranks.processes import (
    PATIENCE_SECONDS,
    Runs,
    entries,
    fingerprint,
    lines,
    losses,
    python_path,
    second_process,
    train_with_kills,
)

pytestmark = [pytest.mark.jax, pytest.mark.slow]

MODEL = [
    "backend=jax", "runtime.num_threads=null", "model.num_heads=4", "model.hidden_size=32", "model.vocab_size=264",
    "train.global_batch_sequences=8", "eval.prompts=[the]", "eval.sample_tokens=4",
    "log.matmul_peak=false",
]  # fmt: skip
MESHES = {
    "data 4": ["parallel.data_parallel_size=4"],
    "fsdp 4": ["parallel.fsdp_size=4", "checkpoint.format=orbax"],
    "tensor 4": ["parallel.tensor_parallel_size=4"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("processes"), MODEL)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.train("alone", [])[0]


@pytest.fixture(scope="module")
def pair(runs: Runs, alone: Path) -> Path:
    """Two processes, never interrupted."""
    return runs.train("pair", [*MESHES["fsdp 4"], "--nproc", "2"])[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_rows_are_those_of_one_device(runs: Runs, alone: Path, pair: Path, mesh: str) -> None:
    if mesh == "fsdp 4":
        run = pair
    else:
        run, _ = runs.train(f"pair-{mesh.replace(', ', '-').replace(' ', '')}", [*MESHES[mesh], "--nproc", "2"])
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert len(entries(run)) == 12
    for here, there in zip(lines(run, "evaluations"), lines(alone, "evaluations"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert here["num_target_bytes"] == there["num_target_bytes"]


def test_one_directory_two_logs(pair: Path) -> None:
    record = json.loads((pair / "run.json").read_text())
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["finished"]
    assert record["attempts"][0]["notes"]["environment"]["num_processes"] == 2
    assert (pair / "log-00001.txt").exists()
    steps = [record["step"] for record in lines(pair, "metrics") if "loss" in record.get("values", {})]
    assert steps
    assert len(steps) == len({*steps}), "one process writes metrics"


def test_killed_is_resumed_bit_for_bit(runs: Runs, pair: Path, tmp_path: Path) -> None:
    """One of the two is killed with no warning; the command ends, says so, and the next one goes on."""
    overrides = [*MESHES["fsdp 4"], "--nproc", "2"]
    process = runs.start("killed", overrides, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", overrides)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


def test_kills_at_every_phase_are_restarted_and_nothing_is_lost(runs: Runs, pair: Path, tmp_path: Path) -> None:
    run = train_with_kills(runs, "jax", MESHES["fsdp 4"], tmp_path)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


def test_a_signal_to_one_stops_both_at_one_step(runs: Runs, pair: Path, tmp_path: Path) -> None:
    overrides = [*MESHES["fsdp 4"], "--nproc", "2"]
    process = runs.start("stopped", overrides, tmp_path / "hold")
    os.kill(second_process(process, runs, "stopped"), signal.SIGTERM)
    (tmp_path / "hold").unlink()
    said, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, (said[-2000:], errors[-2000:])
    run, _ = runs.train("stopped", overrides)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)


@pytest.mark.parametrize("overrides", [["parallel.data_parallel_size=2"], []], ids=["one process", "one device"])
def test_what_two_saved_one_restores(runs: Runs, pair: Path, overrides: list[str]) -> None:
    """Loading compares the fingerprint of all parameters and moments with the recorded one, bit for bit."""
    words = [*overrides, f"train.from_weights={pair}", "train.from_optimizer=true", "train.num_steps=1"]
    run, _ = runs.train("restored" + str(len(overrides)), words)
    notes = json.loads((run / "run.json").read_text())["attempts"][0]["notes"]
    assert notes["fingerprint"] == fingerprint(pair)


def test_a_mesh_that_is_not_all_devices_is_refused(runs: Runs, alone: Path) -> None:
    _, errors = runs.train("mesh", ["parallel.data_parallel_size=3", "--nproc", "2", *FITTING], code=2)
    assert "parallel" in errors
    assert "2" in errors


FITTING = ["train.global_batch_sequences=6"]


def test_torchrun_starts_the_same_run(runs: Runs, pair: Path) -> None:
    """Its agent serves a store on MASTER_PORT, so JAX takes another port."""
    command = runs.command("torchrun", MESHES["fsdp 4"])
    launcher = [command[0], "-m", "torch.distributed.run", "--nproc-per-node", "2", *command[1:]]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    found = subprocess.run(
        launcher, env=environment, cwd=runs.directory, text=True, capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert entries(runs.find("torchrun")) == entries(pair)


def separately(runs: Runs, *ranks: tuple[list[str], dict[str, str]], size: int = 2) -> list[tuple[int, str]]:
    """Start ranks as a cluster does, with overrides and variables per rank; return exit codes and errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            runs.command("separately", [*MESHES["fsdp 4"], *overrides]),
            env={**os.environ, **place, "RANK": str(rank), **variables}, cwd=runs.directory, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank, (overrides, variables) in enumerate(ranks)
    ]  # fmt: skip
    errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert not any((runs.directory / "runs").glob("separately*")), "nothing was written"
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def test_ranks_with_other_settings_or_versions_are_named(runs: Runs) -> None:
    for code, errors in separately(
        runs, ([], {}), (["optimizer.lr=0.02", "eval.every_steps=4", "log.every_steps=3"], {})
    ):
        assert code == 2
        assert "Rank 1 differs from rank 0: " in errors
        assert "optimizer.lr is 0.02, on rank 0 0.01" in errors
        assert "eval.every_steps is 4, on rank 0 6" in errors
        assert "log.every_steps" not in errors, "which need not be equal"
    other = {"PYTHONPATH": python_path("other_version")}
    for code, errors in separately(runs, ([], {}), ([], other)):
        assert code == 2
        assert "Rank 1 differs from rank 0: jaxlib is 0.0.1, on rank 0 " in errors


def test_a_rank_that_does_not_start_is_named(runs: Runs) -> None:
    [(code, errors)] = separately(runs, (["parallel.start_timeout_seconds=1"], {}))
    assert code == 6
    assert "Rank 1 of 2 did not start within 1 second" in errors
