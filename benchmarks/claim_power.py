"""How many runs `vorox claim` saves by pairs: claim_power.py [--seeds 150] [--steps 24] [--effect 0.01] [--repeats 400]

Arm B is planted: it has a smaller learning rate than A, such that its validation loss is 1% higher on 16 seeds that are
used for nothing else. Both arms are then trained with the numpy engine of the tests, as ``vorox train`` trains, once
per seed: B with the seeds of A (pairs with the same rows and initial weights), again with the rows of A and other
initial weights (pairs of models that differ), and with seeds of its own (no pairs).

A claim draws seeds in random order, and adds one run of each arm until the sequential test at the level of a first
claim decides, after 5 at the earliest. Reported, over many such claims: the runs per arm. Pairs have the test of
``experiments/paired_test.py``. Without pairs, it is the same mixture of t statistics for two samples: 2 n - 2 degrees
of freedom instead of n - 1, and an effect in deviations of a run. Claims that the seeds do not decide count as
infinitely long. All claims draw from the same runs, so the quantiles describe orders of these seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from interleave import machine, quantile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny_runs
import vorox.run
from numpy_engine import NumpyEngine
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.experiments.paired_test import EFFECT_VARIANCE, FEWEST_PAIRS, paired_test
from vorox.models.decoder.spec import DecoderSpec
from vorox.sweeps.claim_register import level_of

LEVEL = level_of(1, 0.05)
LEARNING_RATE = 0.03
CALIBRATION_SEEDS = range(10_000, 10_016)


class Backend(tiny_runs.NumpyBackend):
    """The numpy engine; runs of an arm named "start" have initial weights of their own."""

    def create(self, config: RunConfig, spec: DecoderSpec, dist: DistributedContext) -> NumpyEngine:
        seed = zlib.crc32(config.run.name.encode()) if config.run.name.startswith("start") else config.run.seed
        return NumpyEngine(spec.vocab_size, seed=seed, width=4)


def losses(folder: Path, arm: str, lr: float, seeds: Sequence[int], num_steps: int) -> list[float]:
    """Train a run per seed; return their validation losses after the last step."""
    found: list[float] = []
    for seed in seeds:
        config = tiny_runs.configuration(
            folder,
            [f"optimizer.lr={lr!r}", f"run.seed={seed}", f"run.name={arm}-{seed}", f"train.num_steps={num_steps}",
             "eval.every_steps=null", "eval.num_sequences=40", "checkpoint.every_steps=null"],
        )  # fmt: skip
        outcome = tiny_runs.run(config)
        found.append(outcome.eval_losses[num_steps])
        shutil.rmtree(outcome.run_directory)
    return found


def planted_rate(folder: Path, effect: float, num_steps: int) -> float:
    """Return the learning rate of B: the relative effect is about linear in the change of the learning rate."""
    reference = statistics.fmean(losses(folder, "calibration", LEARNING_RATE, CALIBRATION_SEEDS, num_steps))
    rate = 0.95 * LEARNING_RATE
    for attempt in range(2):
        other = statistics.fmean(losses(folder, f"calibration-{attempt}", rate, CALIBRATION_SEEDS, num_steps))
        rate = LEARNING_RATE + (rate - LEARNING_RATE) * effect / (other / reference - 1)
    return rate


def paired_sign(first: Sequence[float], second: Sequence[float]) -> int:
    return paired_test([after - before for before, after in zip(first, second, strict=True)], LEVEL).sign


def unpaired_sign(first: Sequence[float], second: Sequence[float]) -> int:
    """Return 1 or -1 if two independent samples of one size are decided to have other means, else 0."""
    count, freedom = len(first), 2 * len(first) - 2
    if count < FEWEST_PAIRS:
        return 0
    gain, variance = float(np.mean(second) - np.mean(first)), float(np.var(first, ddof=1) + np.var(second, ddof=1)) / 2
    s, spread = gain**2 * count / 2 / variance / freedom, 1 + EFFECT_VARIANCE * count / 2
    evidence = (freedom + 1) / 2 * (math.log1p(s) - math.log1p(s / spread)) - math.log(spread) / 2
    return (1 if gain > 0 else -1) if evidence > -math.log(LEVEL) else 0


def runs_per_arm(
    sign: Callable[[Sequence[float], Sequence[float]], int],
    first: Sequence[float],
    second: Sequence[float],
    orders: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[list[float], int]:
    """Return the runs per arm of every claim, and how many were decided for the wrong arm."""
    found, wrong = list[float](), 0
    for one, other in orders:
        ours, theirs = [first[index] for index in one], [second[index] for index in other]
        signs = ((count, sign(ours[:count], theirs[:count])) for count in range(FEWEST_PAIRS, len(ours) + 1))
        count, decision = next(((count, found) for count, found in signs if found), (math.inf, 1))
        found.append(count)
        wrong += decision < 0
    return found, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=150, help="Most runs per arm of a claim.")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--effect", type=float, default=0.01, help="By how much the loss of B is higher, relatively.")
    parser.add_argument("--repeats", type=int, default=400, help="Claims.")
    parser.add_argument("--seed", type=int, default=0, help="Of the orders.")
    options = parser.parse_args()
    began = time.process_time()
    vorox.run.backends.load = lambda name: Backend()  # type: ignore[assignment, return-value]
    seeds = range(options.seeds)
    with tempfile.TemporaryDirectory(prefix="vorox-claim-power-") as name:
        folder = Path(name)
        rate = planted_rate(folder, options.effect, options.steps)
        first = losses(folder, "first", LEARNING_RATE, seeds, options.steps)
        arms = {
            "pairs, same rows and weights": losses(folder, "second", rate, seeds, options.steps),
            "pairs, same rows": losses(folder, "start", rate, seeds, options.steps),
            "no pairs": losses(folder, "own", rate, range(20_000, 20_000 + options.seeds), options.steps),
        }
    generator = np.random.default_rng(options.seed)
    orders = [
        (generator.permutation(options.seeds).tolist(), generator.permutation(options.seeds).tolist())
        for _ in range(options.repeats)
    ]
    mean = statistics.fmean(first)
    print(json.dumps({"command": sys.argv, "machine": machine(), "lr": [LEARNING_RATE, rate], "level": LEVEL}))
    medians: dict[str, float] = {}
    for arm, second in arms.items():
        is_paired = arm != "no pairs"
        differences = [b - a for a, b in zip(first, second, strict=True)]
        noise = statistics.stdev(differences) if is_paired else math.hypot(*map(statistics.stdev, (first, second)))
        counts, wrong = (
            runs_per_arm(paired_sign, first, second, [(order, order) for order, _ in orders])
            if is_paired
            else runs_per_arm(unpaired_sign, first, second, orders)
        )
        low, medians[arm], high = (quantile(counts, fraction) for fraction in (0.1, 0.5, 0.9))
        print(json.dumps({
            "arms": arm, "effect": statistics.fmean(differences) / mean, "deviation_of_a_difference": noise / mean,
            "runs_per_arm": medians[arm], "low": low, "high": high, "wrong": wrong,
            "undecided": sum(map(math.isinf, counts)), "claims": len(counts),
        }), flush=True)  # fmt: skip
    if all(map(math.isfinite, medians.values())):
        print(json.dumps({"runs_per_run_without_pairs": {arm: medians[arm] / medians["no pairs"] for arm in arms}}))
    print(json.dumps({"processor_seconds": round(time.process_time() - began)}))


if __name__ == "__main__":
    main()
