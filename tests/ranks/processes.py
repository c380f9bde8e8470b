"""Commands of several processes, each command a process of its own, in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from eventually import wait_until
from tiny_runs import configuration
from vorox.core.staged_directory import read_manifest
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.engine_state import read_weights
from vorox.training.replay_chain import ChainEntry, number, read_chain

PATIENCE_SECONDS = 600


class Runs:
    """A folder with a text, its cache and runs; ``model`` are settings of all commands."""

    def __init__(self, directory: Path, model: Sequence[str]) -> None:
        self.directory, self.model = directory, model
        configuration(directory)  # writes the text and tiny.yaml

    def command(self, name: str, overrides: Sequence[str]) -> list[str]:
        words = [str(self.directory / "tiny.yaml"), *self.model, *overrides]
        return [sys.executable, "-m", "vorox", "train", *words, "--name", name]

    def start(self, name: str, overrides: Sequence[str], hold: Path | None = None) -> subprocess.Popen[str]:
        """The command as a process; where there is a file ``hold``, no process of the run begins step 9."""
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        if hold is not None:
            hold.touch()
            environment |= {"VOROX_TESTS_HOLD": str(hold), "VOROX_TESTS_SETTINGS": " ".join(self.model)}
            environment["PYTHONPATH"] = str(Path(__file__).with_name("held"))
        return subprocess.Popen(
            self.command(name, overrides), env=environment, cwd=self.directory, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def train_with_variables(self, name: str, overrides: Sequence[str], variables: dict[str, str]) -> str:
        """Run the command with more environment variables to its end; return what was said on stderr."""
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | variables
        done = subprocess.run(
            self.command(name, overrides), env=environment, cwd=self.directory, text=True, capture_output=True,
            timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stderr

    def train(self, name: str, overrides: Sequence[str], *, code: int = 0) -> tuple[Path, str]:
        """The run of that name, and what was said on stderr."""
        process = self.start(name, overrides)
        said, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == code, f"{process.returncode}\n{said[-3000:]}\n{errors[-3000:]}"
        return self.find(name), errors

    def find(self, name: str) -> Path:
        found = [path for path in (self.directory / "runs").glob(f"{name}-*") if path.is_dir()]
        return found[0] if found else self.directory / "runs" / name


KILLS = ("1-connect", "0-corpus", "1-step", "0-checkpoint")
"""Before the ranks connect, while they prepare the data, in a step, and before a checkpoint is committed."""


def train_with_kills(
    runs: Runs, backend: str, overrides: Sequence[str], orders: Path, kills: Sequence[str] = KILLS
) -> Path:
    """A run of two ranks that kill themselves at these points, in this order, and are restarted."""
    orders.mkdir(exist_ok=True)
    for kill in kills:
        (orders / kill).touch()
    variables = {
        "VOROX_TESTS_KILLS": str(orders),
        "VOROX_TESTS_BACKEND": backend,
        "PYTHONPATH": str(Path(__file__).with_name("killed")),
    }
    errors = runs.train_with_variables(
        "restarted", [*overrides, "--nproc", "2", "--max-restarts", str(len(kills))], variables
    )
    assert not any(orders.iterdir()), "every kill took place"
    assert [line for line in errors.splitlines() if "Restarting" in line] == [
        f"Rank {kill[0]} of 2 was killed by SIGKILL. Restarting ({number} of {len(kills)}) from the newest checkpoint."
        for number, kill in enumerate(kills, start=1)
    ]
    return runs.find("restarted")


def entries(run: Path) -> list[ChainEntry]:
    return list(read_chain(run).values())


def losses(run: Path) -> list[float]:
    return [number(entry.loss) for entry in entries(run)]


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def second_process(process: subprocess.Popen[str], runs: Runs, name: str) -> int:
    """The process id of the second process, once the run has saved."""
    saved = "checkpoints/step-*/MANIFEST.json"
    wait_until(lambda: process.poll() is not None or any(runs.find(name).glob(saved)), PATIENCE_SECONDS)
    assert process.poll() is None, process.communicate()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    is_second = b"\0RANK=1\0"
    (found,) = [int(child) for child in children if is_second in Path(f"/proc/{child}/environ").read_bytes()]
    return found


def stored_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """The whole arrays of a checkpoint of PyTorch by ``<kind>.<canonical name>``; shards are joined by their index."""
    if not (checkpoint / "shards.json").exists():
        spec = DecoderSpec(**json.loads((checkpoint / "engine.json").read_bytes())["spec"])
        weights = {f"weights.{name}": array for name, array in read_weights(checkpoint, spec)}
        return weights | load_file(checkpoint / "optimizer.safetensors")
    index = json.loads((checkpoint / "shards.json").read_bytes())["arrays"]
    shards = {path.name: load_file(path) for path in checkpoint.glob("shard-*.safetensors")}
    return {
        name: np.concatenate([shards[file][name] for file, _, _ in array["slices"]]) for name, array in index.items()
    }


def fingerprint(run: Path) -> str:
    return read_manifest(run / "checkpoints" / "step-00000012")["metadata"]["fingerprint"]
