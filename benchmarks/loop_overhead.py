"""What our loop costs over a bare one: the same engine, the same batches, with and without everything around them.

Bare: ``engine.train_step(batch).fetch()`` on prepared batches. Ours: the real ``vorox train`` path with reading ahead,
replay chain, metrics, progress and the finite count, without saves and validation, timed between the first and the last
step by its own metrics. The two take turns in blocks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import interleave
from vorox import backends
from vorox.core.config import load_config
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import prepare
from vorox.models.decoder.spec import decoder_spec
from vorox.records.run_context import RunContext
from vorox.run import make_workload
from vorox.training.loop import loop
from vorox.training.loop.display import NoDisplay
from vorox.training.loop.session import open_log, open_session
from vorox.training.loop.startup import initialize_or_resume
from vorox.training.mirror import open_mirror
from vorox.training.steps.stop import StopRequest


def configuration(folder: Path, name: str, num_steps: int) -> RunConfig:
    sizes = {
        "character demo": [
            "model.family=gpt2", "model.num_layers=4", "model.num_heads=4", "model.hidden_size=128",
            "model.num_kv_heads=null", "model.intermediate_size=null", "data.sequence_length_tokens=64",
            "train.global_batch_sequences=12", "train.micro_batch_sequences=12", "tokenizer.kind=char",
        ],
        "6 layers x 384": [
            "model.num_layers=6", "model.num_heads=6", "model.num_kv_heads=null", "model.hidden_size=384",
            "model.intermediate_size=null", "train.global_batch_sequences=8", "train.micro_batch_sequences=8",
        ],
    }  # fmt: skip
    return load_config(
        "quickstart",
        [
            *sizes[name], f"train.num_steps={num_steps}", f"run.directory={folder}/runs",
            f"data.cache.directory={folder}/cache", "eval.every_steps=null", "eval.prompts=[]", "eval.at_end=false",
            "checkpoint.every_steps=null", "checkpoint.at_end=false", "runtime.num_threads=2",
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for name, steps in (("character demo", 100), ("6 layers x 384", 4)):
        with tempfile.TemporaryDirectory() as directory:
            compare(Path(directory), name, steps, rounds)


def compare(folder: Path, name: str, steps: int, rounds: int) -> None:
    total = steps * (rounds + 2)
    config = configuration(folder, name, total)
    corpus = prepare(config)
    spec = decoder_spec(
        config.model,
        tokenizer_vocab_size=corpus.tokenizer.vocab_size,
        sequence_length_tokens=config.data.sequence_length_tokens,
    )
    bare_engine = backends.load("torch").create(config, spec, DistributedContext())
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    dist = DistributedContext()
    with (
        open_mirror(config, "never", dist, print) as mirror,
        RunContext.create(config) as run,
        open_log(run, NoDisplay(), dist) as log,
        StopRequest() as stop,
    ):
        setup = initialize_or_resume(make_workload(config, dist, log, None), run, mirror, None)
        with open_session(setup, NoDisplay(), stop) as parts:
            prepared = list(itertools.islice(parts.batches, 8))
            bare_batches = itertools.cycle(prepared)
            marks = _Marks(parts, steps, lambda: _bare(bare_engine, bare_batches, steps), seconds)
            loop.train(_with_batches(parts, marks), setup.state.progress)
    ratios = [ours / bare for ours, bare in zip(seconds["ours"][1:], seconds["bare"][1:], strict=False)]
    median = statistics.median(ratios)
    low, high = interleave.quantile(ratios, 0.1), interleave.quantile(ratios, 0.9)
    print(
        f"{name}: our loop takes {median:.4f} of the bare loop's time ({low:.4f} to {high:.4f}) over {len(ratios)} "
        f"blocks of {steps} steps; medians {statistics.median(seconds['ours']) / steps * 1e3:.2f} ms and "
        f"{statistics.median(seconds['bare']) / steps * 1e3:.2f} ms a step"
    )


def _bare(engine, batches, steps: int) -> None:
    for _ in range(steps):
        engine.train_step(next(batches), lr=1e-3, weight_decay=0.1).fetch()


class _Marks:
    """Passes batches on, and after every block of steps lets the bare loop run a block, both timed."""

    def __init__(self, parts, steps: int, bare, seconds: dict[str, list[float]]) -> None:
        self._batches, self._steps, self._bare, self._seconds = parts.batches, steps, bare, seconds
        self._count, self._began = 0, time.perf_counter()

    def __getattr__(self, name: str):
        return getattr(self._batches, name)

    def __iter__(self):
        return self

    def __next__(self):
        if self._count and self._count % self._steps == 0:
            self._seconds["ours"].append(time.perf_counter() - self._began)
            began = time.perf_counter()
            self._bare()
            self._seconds["bare"].append(time.perf_counter() - began)
            self._began = time.perf_counter()
        self._count += 1
        return next(self._batches)


def _with_batches(parts, marks: _Marks):
    import dataclasses

    return dataclasses.replace(parts, batches=marks)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
