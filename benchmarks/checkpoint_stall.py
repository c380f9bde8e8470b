"""How long training stands still for a checkpoint, with the writer in the background and without.

    checkpoint_stall.py [--rounds 9] [--backend torch|jax] [--size demo|small|124m] [--steps 12]

One engine, one checkpointer of each kind, each with its own directory on the same disk. In every round all do the same,
in an order that rotates: some steps, a save after the first of them, and a wait for what is still being written behind
the last. Reported: the seconds that the loop stood still, those until the commit, and those of the whole round, also
beside a round without any save, so that what the writer takes from the steps is counted as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interleave
import jax_step
from vorox.core.batch import DataCursor, Progress
from vorox.core.schema import CheckpointConfig
from vorox.records.log import RunLog
from vorox.records.replay_chain import ReplayChain
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.steps.pending_steps import PendingSteps
from vorox.training.steps.schedule import Horizon

KINDS = ("no save", "waiting", "background")


def open_checkpointer(directory: Path, kind: str) -> tuple[CheckpointWriter, PendingSteps]:
    directory.mkdir()
    checkpointer = CheckpointWriter(
        directory, CheckpointConfig(asynchronous=kind == "background", keep_last=1), Horizon(1 << 40, 1, 1),
        describe={}, companions={}, eval_losses={}, saved_step=None, log=RunLog(None, echo=lambda text, level: None),
    )  # fmt: skip
    pending = PendingSteps(ReplayChain(directory, progress_at(0)), max_nonfinite_steps=0, nonfinite_in_a_row=0)
    return checkpointer, pending


def progress_at(step: int) -> Progress:
    return Progress(step, step, DataCursor("", 0, step, 0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--size", choices=sorted(jax_step.SIZES), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--directory", type=Path, help="On the disk that is asked about. Default: the temporary one.")
    parser.add_argument("--set", action="append", default=[], help="A setting of the run, as in vorox train.")
    options = parser.parse_args()
    variant = jax_step.engine_step(options, f"backend={options.backend}", *options.set)
    step, engine = variant.step, variant.engine
    step()
    size_bytes = engine.snapshot(detached=False).size_bytes
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        seconds = measure(options, step, engine, Path(scratch))
    print(f"\n{options.backend}, {options.size}: state of {size_bytes / 1e6:,.1f} MB, {options.steps} steps a round, "
          f"{options.rounds} rounds, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    print("\n| | stood still, s | committed after, s | round, s | round to no save |\n|---|---|---|---|---|")
    for kind in KINDS:
        columns = [spread([parts[name] for parts in seconds[kind]]) for name in ("still", "commit", "round")]
        pairs = zip(seconds[kind], seconds["no save"], strict=True)
        columns.append(spread([parts["round"] / base["round"] for parts, base in pairs], digits=2))
        print(f"| {kind} | {' | '.join(columns)} |")
    pairs = zip(seconds["background"], seconds["waiting"], strict=True)
    print(f"\nstood still, background to waiting: {spread([a['still'] / b['still'] for a, b in pairs], digits=3)}")


def measure(
    options: argparse.Namespace, step: Callable[[], None], engine: Any, scratch: Path
) -> dict[str, list[dict[str, float]]]:
    opened = {kind: open_checkpointer(scratch / kind.replace(" ", "-"), kind) for kind in KINDS}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(-1, options.rounds):
        shift = number % len(KINDS)
        for kind in KINDS[shift:] + KINDS[:shift]:
            parts = one_round(options, step, engine, *opened[kind], kind, number + 2)
            if number >= 0:
                found[kind].append(parts)
    for checkpointer, _ in opened.values():
        checkpointer.__exit__(None, None, None)
    return found


def one_round(
    options: argparse.Namespace, step: Callable[[], None], engine: Any, checkpointer: CheckpointWriter,
    pending: PendingSteps,
    kind: str, number: int,
) -> dict[str, float]:  # fmt: skip
    still, saved_at, committed_at = 0.0, 0.0, [0.0]
    began = time.perf_counter()
    for index in range(options.steps):
        step()
        if index == 0 and kind != "no save":
            engine.synchronize()
            saved_at = time.perf_counter()
            checkpointer.save(
                engine, progress_at(number), pending, lambda path: committed_at.append(time.perf_counter())
            )
            still = time.perf_counter() - saved_at
    waited_at = time.perf_counter()
    checkpointer.wait()
    ended = time.perf_counter()
    return {"still": still + ended - waited_at, "commit": max(0.0, committed_at[-1] - saved_at), "round": ended - began}


def spread(values: list[float], digits: int = 3) -> str:
    low, high = interleave.quantile(values, 0.1), interleave.quantile(values, 0.9)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
