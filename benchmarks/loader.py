"""Loader throughput, start-up, resume and packing: our loader against peers over the same rows of real text.

The text is the Python sources of the installed packages, tokenized once with a 4,096-token BPE and packed into rows of
1,025 tokens; every peer stores exactly those rows. Batches are 64 x 1,024, shuffled. Ours also verifies a checksum on
every read and delivers labels, segment ids, position ids and row digests, which the others do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import interleave
from loader_peers import PEERS
from vorox.core.batch import DataShard
from vorox.core.config import load_config
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.corpus import Corpus, prepare
from vorox.data.order.loader import first_cursor, open_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart

BATCH, LENGTH = 64, 1024


def configuration(folder: Path, codec: str) -> RunConfig:
    packages = Path(sysconfig.get_paths()["purelib"])
    return load_config(
        "quickstart",
        [
            "data.sources.0.format=txt",
            f"data.sources.0.paths=[{packages}/torch/**/*.py, {packages}/transformers/**/*.py]",
            "data.sources.0.bad_record_fraction=0.01",
            f"data.sequence_length_tokens={LENGTH}",
            f"data.cache.directory={folder}/{codec}",
            f"data.cache.codec={codec}",
        ],
    )


def start_of(corpus: Corpus) -> PlanStart:
    reader = corpus.train[0]
    source = PlanSource(corpus.names[0], corpus.weights[0], reader.recipe.digest, reader.row_tokens)
    return PlanStart(seed=1, shuffle=True, global_batch_sequences=BATCH, sources=(source,))


def ours(folder: Path, corpus: Corpus, num_threads: int, document_mask: bool) -> Callable[[], float]:
    """One epoch through the real loader."""
    plan_path = folder / f"plan-{num_threads}-{document_mask}-{time.monotonic_ns()}.jsonl"
    plan = DataPlan.create(plan_path, start_of(corpus), corpus.train)
    num_steps = corpus.train[0].num_rows // BATCH
    plan.extend_to(num_steps * BATCH, corpus.train)

    def run() -> float:
        with open_batches(
            plan,
            corpus.train,
            shard=DataShard(),
            cursor=first_cursor(plan, 1),
            global_batch_sequences=BATCH,
            micro_batch_sequences=BATCH,
            document_mask=document_mask,
            num_threads=num_threads,
        ) as stream:
            return float(sum(next(stream).num_tokens for _ in range(num_steps)))

    return run


def first_batch_seconds(folder: Path, corpus: Corpus, rounds: int) -> dict[str, list[float]]:
    """Opening cache and plan until the first batch is there, at the start and in the middle of an epoch."""
    directory, recipe = corpus.train[0].directory, corpus.train[0].recipe
    path = folder / "plan-first.jsonl"
    plan = DataPlan.create(path, start_of(corpus), corpus.train)
    num_steps = corpus.train[0].num_rows // BATCH
    plan.extend_to(num_steps * BATCH, corpus.train)
    seconds: dict[str, list[float]] = {"first batch": [], "resume at 50%": []}
    for _ in range(rounds):
        for name, step in (("first batch", 0), ("resume at 50%", num_steps // 2)):
            began = time.perf_counter()
            reader = CacheReader.open(directory, recipe)
            again = DataPlan.open(path)
            again.check([reader])
            cursor = first_cursor(again, 1)
            if step:
                cursor = type(cursor)(cursor.plan_digest, cursor.plan_events, step, step * BATCH, 1)
            with open_batches(
                again,
                [reader],
                shard=DataShard(),
                cursor=cursor,
                global_batch_sequences=BATCH,
                micro_batch_sequences=BATCH,
                document_mask=True,
            ) as stream:
                next(stream)
                seconds[name].append(time.perf_counter() - began)
    return seconds


def epoch_of(start: Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]) -> Callable[[], float]:
    seed = iter(range(10**6))
    return lambda: float(sum(inputs.size for inputs, _ in start(next(seed))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        corpora = {codec: prepare(configuration(folder, codec)) for codec in ("lz4", "raw")}
        for name, report in corpora["lz4"].reports.items():
            print(
                f"{name}: {report.tokens:,} tokens in {report.rows:,} rows, {report.utilisation_fraction:.3%} full, "
                f"{report.ratio_to_uint16:.1%} of uint16, built at {report.text_bytes / 1e6 / report.seconds:.1f} MB/s"
            )
        reader = corpora["lz4"].train[0]
        rows = np.concatenate(
            [
                reader.read_rows(np.arange(first, min(first + 4096, reader.num_rows))).tokens_NC
                for first in range(0, reader.num_rows, 4096)
            ]
        )
        contenders = {
            "vorox, LZ4, verified, 0 threads": ours(folder, corpora["lz4"], 0, document_mask=True),
            "vorox, LZ4, verified, 1 thread": ours(folder, corpora["lz4"], 1, document_mask=True),
            "vorox, LZ4, verified, no document mask": ours(folder, corpora["lz4"], 0, document_mask=False),
            "vorox, raw codec, verified, no document mask": ours(folder, corpora["raw"], 0, document_mask=False),
        }
        for name, peer in PEERS.items():
            place = folder / name.split()[0]
            place.mkdir()
            try:
                contenders[name] = epoch_of(peer(place, rows, BATCH))
            except ImportError as error:
                print(f"{name} is absent: {error}; run benchmarks/setup.sh")
        rates = interleave.measure(contenders, rounds=rounds)
        reference = "bare memmap"
        interleave.report(
            "Loader, one epoch", interleave.table(rates, reference=reference, unit="tokens/s"), reference=reference,
            rounds=rounds,
        )  # fmt: skip
        seconds = first_batch_seconds(folder, corpora["lz4"], rounds * 3)
        for name, values in seconds.items():
            spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
            print(f"{name}: {statistics.median(values) * 1e3:.1f} ms ({spread})")
        interleave.RESULTS.mkdir(exist_ok=True)
        (interleave.RESULTS / "loader_start.json").write_text(json.dumps(seconds) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
