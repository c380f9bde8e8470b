"""The cost of sums that no number of ranks changes: ``determinism=bitwise-any-world`` against ``bitwise``.

    exact_sums.py [--ranks 1 2] [--pairs 40] [--size small|demo] [--micro-batches 8]

Both engines of a process take turns, a step each, on the same random tokens, with one thread per process. Printed are
the median ratio of a pair and its 10th and 90th percentile. The ranks of a run are processes on this machine that
exchange by gloo; the global batch is the same for all.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time

import numpy as np

from vorox import backends
from vorox.core.batch import Batch, DataCursor
from vorox.core.config import load_config
from vorox.models.decoder.spec import decoder_spec

LEVELS = ("bitwise", "bitwise-any-world")
SIZES = {
    "demo": ["model.num_layers=4", "model.num_heads=4", "model.hidden_size=128", "data.sequence_length_tokens=64"],
    "small": ["model.num_layers=6", "model.num_heads=6", "model.hidden_size=384", "data.sequence_length_tokens=256"],
}
VOCABULARY = 4096
LR, WEIGHT_DECAY = 1e-3, 0.1


def measure(options: argparse.Namespace) -> list[tuple[float, ...]]:
    """Return seconds of a step per level, pair by pair. Runs in every rank."""
    engines, count, dist = [], options.micro_batches, None
    for level in LEVELS:
        config = load_config(
            "quickstart",
            [
                "model.family=llama", *SIZES[options.size], "model.num_kv_heads=null", "model.intermediate_size=null",
                f"train.global_batch_sequences={count}", "train.micro_batch_sequences=1", "runtime.num_threads=1",
                f"runtime.determinism={level}", "runtime.device=cpu",
            ],
        )  # fmt: skip
        length = config.data.sequence_length_tokens
        spec = decoder_spec(config.model, tokenizer_vocab_size=VOCABULARY, sequence_length_tokens=length)
        dist = dist or backends.connect(config)
        engines.append(backends.load("torch").create(config, spec, dist))
    shard, found = engines[0].data_shard, []
    for step in range(options.pairs + 2):
        rows = np.random.default_rng(step).integers(0, VOCABULARY, (count, 1, length + 1), np.int32)
        rows = rows[shard.index :: shard.count]
        batch = Batch(
            step, np.ascontiguousarray(rows[:, :, :-1]), np.ascontiguousarray(rows[:, :, 1:]), None, None,
            np.ones(rows.shape[:2], np.uint64), rows[:, :, 1:].size, DataCursor("", 0, step + 1, 0, 0),
        )  # fmt: skip
        seconds = []
        for engine in engines:
            started = time.perf_counter()
            engine.train_step(batch, lr=LR, weight_decay=WEIGHT_DECAY).fetch()
            seconds.append(time.perf_counter() - started)
        found.append(tuple(seconds))
    return found[2:]


def start_ranks(options: argparse.Namespace, num_ranks: int) -> str:
    """Start a process per rank; return what rank 0 prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable, __file__, "--child", "--pairs", str(options.pairs), "--size", options.size,
        "--micro-batches", str(options.micro_batches),
    ]  # fmt: skip
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
    children = [
        subprocess.Popen(
            command, env={**os.environ, **place, **({"RANK": str(rank)} if place else {})}, text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    outputs = [child.communicate()[0] for child in children]
    return outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        seconds = np.array(measure(options))
        ratios = np.percentile(seconds[:, 1] / seconds[:, 0], [50, 10, 90])
        plain, exact = np.median(seconds, axis=0)
        print(f"{plain:.3f} s and {exact:.3f} s per step, ratio {ratios[0]:.2f} ({ratios[1]:.2f} to {ratios[2]:.2f})")
        return
    for num_ranks in options.ranks:
        times = start_ranks(options, num_ranks).strip()
        print(f"{num_ranks} ranks, {options.micro_batches // num_ranks} micro-batches each: {times}", flush=True)


if __name__ == "__main__":
    main()
