"""One of two ranks that train with DeepSpeed beside one device, started by ``test_deepspeed.py``.

Arguments: a seed, a folder for checkpoints, and the names of cases. The rank is in the environment, as for every
command. The oracle is the engine of one device on the whole batch, in the same process. Losses and norms agree to 1e-5
and 1e-4 (relative); after 20 steps, parameters, which have moved by about 0.03, agree to 1e-6 on average and 1e-5 at
most, with an epsilon that does not magnify rounding. What is saved and loaded agrees bit for bit.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engines import POSITIONS, VOCAB, batch, torch_config
from small_configurations import SMOOTH_EPS
from vorox import backends
from vorox.core.batch import Batch
from vorox.core.engine import Engine
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec
from vorox.training.checkpoints.store import write_shards, write_state

STEPS, ROWS, HALF = 20, 8, 10
MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 40, "num_heads": 4, "num_kv_heads": 2}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "1": {"parallel": {"zero_stage": 1}},
    "2": {"parallel": {"zero_stage": 2}, "model": {**MODEL, "tie_embeddings": True}},
    "3": {"parallel": {"zero_stage": 3}, "train": {"activation_checkpointing": "block"}},
    "2 with offload": {"parallel": {"zero_stage": 2, "zero_offload": "optimizer"}},
    "3 with offload": {"parallel": {"zero_stage": 3, "zero_offload": "parameters"}},
}


class Pair:
    """The engine of a case on this rank and an oracle of one device, with the same data; fingerprints of saves."""

    half = end = ""

    def __init__(self, case: str, seed: int, folder: Path, dist: DistributedContext) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.dist, self.generator = dist, np.random.default_rng(seed)
        self.engine = self.create(case, seed, dist, kind="deepspeed")
        self.oracle = self.create(case, seed, DistributedContext(), kind="native")
        self.batches = [self._batches(step) for step in range(STEPS + 4)]

    @staticmethod
    def create(case: str, seed: int, dist: DistributedContext, *, kind: str) -> Any:
        sections = CASES[case]
        train = {"num_steps": STEPS, "global_batch_sequences": ROWS, "micro_batch_sequences": 2}
        config = torch_config(
            seed % 1000,
            **{
                "model": MODEL,
                **sections,
                "parallel": {"kind": kind, **sections["parallel"]} if kind == "deepspeed" else {},
                "train": {**train, **sections.get("train", {})},
                "optimizer": {"clip_norm": 0.3, "layer_lr_decay": 0.9, "weight_decay": 0.1, "eps": SMOOTH_EPS},
            },
        )
        spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
        return backends.load("torch").create(config, spec, dist)

    def _batches(self, step: int) -> tuple[Batch, Batch]:
        """Two micro-batches for this rank, with unequally many targets, and four for the oracle."""
        tokens = self.generator.integers(0, VOCAB, (ROWS, POSITIONS + 1), np.int32)
        keep = self.generator.random((ROWS, POSITIONS)) < 0.7
        mine = slice(self.dist.rank, None, self.dist.world_size)
        return batch(tokens[mine], 2, step=step, keep=keep[mine]), batch(tokens, 4, step=step, keep=keep)

    def step(self, index: int, *, compare: bool = True) -> None:
        settings = {"lr": 0.01 / (1 + index), "weight_decay": 0.1 + 0.01 * index}
        mine, whole = self.batches[index]
        got = self.engine.train_step(mine, **settings).fetch()
        assert got.finite
        if compare:
            expected = self.oracle.train_step(whole, **settings).fetch()
            assert got.loss == pytest.approx(expected.loss, rel=1e-5)
            assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def save(engine: Engine, target: Path, dist: DistributedContext) -> str:
    snapshot = engine.snapshot(detached=True)
    if dist.is_main:
        with StagedDirectory(target) as directory:
            directory.commit({"fingerprint": write_state(snapshot, directory, dist)})
    else:
        write_shards(snapshot, dist)
    dist.barrier(f"saved {target}")
    return read_manifest(target)["metadata"]["fingerprint"]


def check_training(pair: Pair) -> float:
    """20 steps beside the oracle; return the largest difference of a parameter."""
    for index in range(STEPS):
        pair.step(index)
        if index + 1 == HALF:
            pair.half = save(pair.engine, pair.folder / "half", pair.dist)
    pair.end = save(pair.engine, pair.folder / "end", pair.dist)
    mine, theirs = dict(pair.engine.export_weights()), dict(pair.oracle.export_weights())
    assert list(mine) == list(theirs)
    differences = {name: np.abs(mine[name] - theirs[name]) for name in mine}
    largest = max(float(difference.max()) for difference in differences.values())
    assert largest < 1e-5
    assert max(float(difference.mean()) for difference in differences.values()) < 1e-6
    return largest


def check_state(pair: Pair) -> None:
    """The state moves to one device and back, bit for bit, and a resumed run repeats every bit."""
    assert pair.engine.fingerprint() == pair.end
    pair.oracle.load(pair.folder / "end")
    assert pair.oracle.fingerprint() == pair.end
    pair.step(STEPS)  # continues alike from the moments and counters
    pair.engine.load(pair.folder / "half")
    assert pair.engine.fingerprint() == pair.half
    for index in range(HALF, STEPS):
        pair.step(index, compare=False)
    assert pair.engine.fingerprint() == pair.end
    alone = pair.folder / f"one device of rank {pair.dist.rank}"
    recorded = save(pair.oracle, alone, DistributedContext())
    pair.engine.load(alone)
    assert pair.engine.fingerprint() == recorded
    pair.step(STEPS + 1)


def check_nonfinite(pair: Pair) -> None:
    """Neither a gradient nor a loss that is not finite changes a bit, and the next step is as if it had not been."""
    before, engine = pair.engine.fingerprint(), pair.engine
    divisor, engine.parameters.gradient_divisor = engine.parameters.gradient_divisor, math.nan
    skipped = engine.train_step(pair.batches[0][0], lr=0.01, weight_decay=0.1).fetch()
    engine.parameters.gradient_divisor = divisor
    assert not skipped.finite
    assert not math.isfinite(skipped.grad_norm)
    assert engine.fingerprint() == before
    take_step = engine.optimizer.step
    engine.optimizer.step = lambda **settings: take_step(**{**settings, "loss": settings["loss"] * math.inf})
    assert not engine.train_step(pair.batches[0][0], lr=0.01, weight_decay=0.1).fetch().finite
    del engine.optimizer.step
    assert engine.fingerprint() == before
    pair.step(STEPS + 2)


def main() -> None:
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist = backends.load("torch").connect(torch_config())
    differences: dict[str, float] = {}
    for case in sys.argv[3:]:
        pair = Pair(case, seed, folder / case, dist)
        differences[case] = check_training(pair)
        check_state(pair)
        check_nonfinite(pair)
        losses = [pair.engine.eval_step(pair.batches[0][1]), pair.oracle.eval_step(pair.batches[0][1])]
        assert losses[0].loss_sum == pytest.approx(losses[1].loss_sum, rel=1e-5)
    if dist.is_main:
        print(json.dumps(differences))
    dist.barrier("end")


if __name__ == "__main__":
    main()
