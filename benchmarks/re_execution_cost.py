"""The first estimate of a re-execution, beside what it then takes: re_execution_cost.py [--only NAME ...] [--rounds 1]

Ten runs are trained: with the numpy engine of the tests, PyTorch and JAX; tiny ones and one of 5 million parameters;
kept checkpoints and none, so that steps are computed from step 0; a run in two attempts; two processes. Right after
each run, ``vorox checkpoints materialize --plan`` estimates one state, and the command without ``--plan`` is timed
from its start to its end, Python and imports included. So every estimate is the first one, from the run's own record.
Further rounds ask for other states; their estimates are those of the last re-execution.

Reported: seconds of both, their ratio, and the load of the machine; then the median of |ratio - 1| of first estimates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleave import machine

_WORDS = ("a run is a pure function of its plan", "what was lost", "can be computed", "again and again")
_TESTS = Path(__file__).parents[1] / "tests"
_NUMPY = (
    f"import sys; sys.path.insert(0, {str(_TESTS)!r}); import tiny_runs, vorox.run; from vorox.cli import main; "
    "vorox.run.backends.load = lambda name: tiny_runs.NumpyBackend(); sys.exit(main(sys.argv[1:]))"
)
_TINY = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "train.global_batch_sequences=8")
_LARGE = ("model.num_layers=6", "model.hidden_size=256", "model.num_heads=4", "train.global_batch_sequences=4")
_KEPT, _NONE = "checkpoint.every_steps=20", "checkpoint.every_steps=null"


@dataclass(frozen=True)
class Case:
    """A run, and the state to materialise.

    Attributes:
        name: Its name.
        engine: ``numpy``, ``torch`` or ``jax``.
        settings: Its settings.
        num_steps: Its length.
        step: The state.
        attempts: In how many attempts it is trained.
        nproc: Number of processes.
    """

    name: str
    engine: str
    settings: tuple[str, ...]
    num_steps: int
    step: int
    attempts: int = 1
    nproc: int = 1

    def vorox(self, folder: Path, *words: str) -> str:
        program = ["-c", _NUMPY] if self.engine == "numpy" else ["-m", "vorox"]
        done = subprocess.run(
            [sys.executable, *program, *words], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def train(self, folder: Path) -> None:
        chooser = random.Random(0)
        lines = [" ".join(chooser.choices(_WORDS, k=200)) for _ in range(400)]
        (folder / "text.txt").write_text("\n\n".join(lines))
        backend = "jax" if self.engine == "jax" else "torch"
        config = [
            "--data", "text.txt", f"backend={backend}", "model.family=llama", "data.sequence_length_tokens=128",
            "tokenizer.kind=byte", "eval.every_steps=null", "data.cache.directory=cache", f"run.name={self.name}",
            "schedule.name=constant", *self.settings,
        ]  # fmt: skip
        nproc = ["--nproc", str(self.nproc)] if self.nproc > 1 else []
        steps = [self.num_steps * (number + 1) // self.attempts for number in range(self.attempts)]
        self.vorox(folder, "train", *config, f"train.num_steps={steps[0]}", *nproc)
        for step in steps[1:]:
            self.vorox(folder, "train", "--resume", self.name, f"train.num_steps={step}", *nproc)

    def ask(self, folder: Path, step: int, number: int) -> dict[str, Any]:
        """Return the estimate for a state, and what it takes right after."""
        command = ["checkpoints", "materialize", self.name, "--step", str(step)]
        command += ["--nproc", str(self.nproc)] if self.nproc > 1 else []
        cost = json.loads(self.vorox(folder, *command, "--plan", "--json"))
        began = time.perf_counter()
        self.vorox(folder, *command, "--to", f"states-{number}")
        taken = time.perf_counter() - began
        return {
            "run": self.name, "round": number, "num_steps": cost["num_steps"], "start": cost["start_seconds"],
            "planned": cost["seconds"], "taken": taken, "ratio": cost["seconds"] / taken, "load": os.getloadavg()[0],
        }  # fmt: skip


CASES = (
    Case("numpy-kept", "numpy", (*_TINY, _KEPT), 60, 55),
    Case("numpy-from-0", "numpy", (*_TINY, _NONE), 200, 190),
    Case("torch-tiny-kept", "torch", (*_TINY, _KEPT), 60, 55),
    Case("torch-tiny-from-0", "torch", (*_TINY, _NONE), 100, 95),
    Case("torch-5M-kept", "torch", (*_LARGE, _KEPT), 40, 35),
    Case("torch-5M-from-0", "torch", (*_LARGE, _NONE), 40, 35),
    Case("torch-two-attempts", "torch", (*_TINY, _KEPT), 80, 75, attempts=2),
    Case("torch-nproc-2", "torch", (*_TINY, _KEPT), 60, 55, nproc=2),
    Case("jax-tiny-kept", "jax", (*_TINY, _KEPT), 60, 55),
    Case("jax-5M-from-0", "jax", (*_LARGE, _NONE), 40, 35),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    options = parser.parse_args()
    first: list[float] = []
    print(json.dumps({"machine": machine()}), flush=True)
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        with tempfile.TemporaryDirectory(prefix="vorox-cost-") as name:
            case.train(Path(name))
            for number in range(options.rounds):
                row = case.ask(Path(name), case.step - number, number)
                first += [row["ratio"]] if not number else []
                print(json.dumps(row), flush=True)
    print(json.dumps({"first": len(first), "median_miss": statistics.median(abs(ratio - 1) for ratio in first)}))


if __name__ == "__main__":
    main()
