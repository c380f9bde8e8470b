"""What ``vorox checkpoints materialize --plan`` says that a state costs, beside what it then takes.

    re_execution_cost.py [--rounds 10] [--steps 120] [--set train.global_batch_sequences=8 ...]

A run is trained in two attempts. Every round asks for the state of another step, drawn by a seed: the seconds of the
plan, and those of the command from its start to its end, Python and imports included. Reported: both, their ratio, and
the median of the ratios, for the first estimate (from the run's own record) and for the later ones (from the last
re-execution on this machine).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WORDS = ("a run is a pure function of its plan", "what was lost", "can be computed", "again and again")


def vorox(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "vorox", *words], cwd=folder, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def trained(folder: Path, num_steps: int, settings: list[str]) -> str:
    """Train a run in two attempts, and return its name."""
    chooser = random.Random(0)
    lines = [" ".join(chooser.choices(_WORDS, k=200)) for _ in range(400)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    model = ["model.family=llama", "model.num_layers=4", "model.hidden_size=128", "model.num_heads=4"]
    shape = ["data.sequence_length_tokens=128", "train.global_batch_sequences=8", "tokenizer.kind=byte"]
    saves = ["checkpoint.every_steps=50", "eval.every_steps=null", "data.cache.directory=cache", "run.name=cost"]
    config = ["--data", "text.txt", *model, *shape, *saves, *settings]
    vorox(folder, "train", *config, f"train.num_steps={num_steps // 2}", "schedule.name=constant")
    vorox(folder, "train", "--resume", "cost", f"train.num_steps={num_steps}")
    return "cost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], help="A setting of the run, as in vorox train.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chooser, found = random.Random(options.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="vorox-cost-") as name:
        folder = Path(name)
        run = trained(folder, options.steps, options.set)
        for number in range(options.rounds):
            step = str(chooser.randrange(options.steps // 2, options.steps))
            ask = ("checkpoints", "materialize", run, "--step", step)
            cost = json.loads(vorox(folder, *ask, "--plan", "--json"))
            began = time.perf_counter()
            vorox(folder, *ask, "--to", f"states-{number}")
            taken = time.perf_counter() - began
            row = {"step": int(step), "num_steps": cost["num_steps"], "planned": cost["seconds"], "taken": taken}
            found.append({**row, "ratio": cost["seconds"] / taken})
            print(json.dumps(found[-1]), flush=True)
    ratios = [row["ratio"] for row in found]
    print(json.dumps({"first_ratio": ratios[0], "median_ratio": statistics.median(ratios[1:] or ratios)}))


if __name__ == "__main__":
    main()
