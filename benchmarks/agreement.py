"""The exchange between ranks in every step (``training/loop/step_sync.py``): latency, and traffic by number of ranks.

    agreement.py [--ranks 2 4 8] [--exchanges 200]
    agreement.py --traffic [--ranks 8 16 32 64] [--rows 8]

Without ``--traffic``, every rank is a process of this machine that reports its rows through a ``TCPStore`` of PyTorch,
as a run does in every step. Printed is the median time of an exchange on rank 0, with its 10th and 90th percentile.
With ``--traffic``, ranks are threads, and a channel in memory counts operations and bytes of an exchange. The line
``gather`` is the form before: every rank sends 8 bytes per row to rank 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from vorox.core.batch import Batch, DataCursor, DataShard
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.training.loop.step_sync import RankRows, combine_reports, digest_of


def report_of(rows: RankRows, rank: int) -> dict[str, Any]:
    """The report of a rank with one row."""
    tokens = np.full((1, 1, 4), rank, np.int32)
    batch = Batch(0, tokens, tokens, None, None, np.ones((1, 1), np.uint64), 4, DataCursor("", 0, 1, 1, 0))
    statistics = {"compute_seconds": 0.123456789012345, "waited_seconds": 0.0}
    part = rows.report(batch.with_lanes(np.array([rank])))
    return {"heads": {"0" * 64: rank}, "statistics": [[rank, statistics]], "rows": part, "stop": "", "missing": None}


def decide(report: dict[str, Any]) -> dict[str, Any]:
    return {"batch_digest": digest_of(1, report["rows"]), "save": False, "stop": report["stop"], "missing": None}


def exchange(rank: int, num_ranks: int, port: int, options: argparse.Namespace) -> None:
    from torch.distributed import PrefixStore, TCPStore

    from vorox.backends.torch_engine.ranks.store_channel import StoreChannel

    store = TCPStore("127.0.0.1", port, num_ranks, rank == 0, timedelta(seconds=60))
    dist = DistributedContext(rank, num_ranks, StoreChannel(PrefixStore("vorox", store)))
    report = report_of(RankRows(dist, DataShard(rank, num_ranks)), rank)
    seconds = []
    for _ in range(options.exchanges):
        started = time.perf_counter()
        dist.reduce("step", report, combine_reports, decide)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        middle, low, high = 1e3 * np.percentile(seconds[10:], [50, 10, 90])
        print(f"{num_ranks} ranks: {middle:.2f} ms ({low:.2f} to {high:.2f})", flush=True)
        time.sleep(1)  # rank 0 serves the store, from which the others read the last decision


class CountingChannel:
    """A channel in memory that counts the operations of each rank and the bytes that it reads and writes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.rank = threading.local()
        self.operations, self.num_bytes = Counter[int](), Counter[int]()

    def _count(self, num_bytes: int) -> None:
        self.operations[self.rank.number] += 1
        self.num_bytes[self.rank.number] += num_bytes

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values.setdefault(key, value)
            self._count(len(value))
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        found = self.get_all(*key.rpartition("/")[::2], timeout_seconds)
        return None if found is None else found[0]

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        keys = [f"{folder}/{name}" for name in names]
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_seconds):
                return None
            found = [self._values[key] for key in keys]
            self._count(sum(map(len, found)))
            return found

    def remove(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)
            self._count(0)


def print_traffic(num_ranks: int, num_rows: int) -> None:
    """Count one exchange as a tree, and one in which rank 0 gathers the digests of rows."""
    for form in ("tree", "gather"):
        channel = CountingChannel()
        started = threading.Barrier(num_ranks)

        def one(rank: int, form: str = form, channel: Any = channel, started: threading.Barrier = started) -> None:
            channel.rank.number = rank
            dist = DistributedContext(rank, num_ranks, channel)
            report = report_of(RankRows(dist, DataShard(rank, num_ranks)), rank)
            gathered = {"chain": "0" * 32, "rows": "0" * 16 * num_rows, **report["statistics"][0][1]}
            started.wait()
            channel.operations[rank] = channel.num_bytes[rank] = 0
            started.wait()
            if form == "tree":
                dist.reduce("step", report, combine_reports, decide)
            else:
                dist.agree("step", gathered, lambda _: {"batch_digest": "0" * 32, "save": False, "stop": ""})

        with ThreadPoolExecutor(num_ranks) as pool:
            list(pool.map(one, range(num_ranks)))
        others = [rank for rank in range(num_ranks) if rank]
        most = max(others, key=channel.num_bytes.__getitem__)
        print(
            f"{num_ranks} ranks, {form}: rank 0 {channel.operations[0]} operations, {channel.num_bytes[0]:,} bytes; "
            f"median rank {np.median([channel.num_bytes[rank] for rank in others]):,.0f} bytes, "
            f"busiest {channel.operations[most]} operations, {channel.num_bytes[most]:,} bytes; "
            f"store {sum(channel.operations.values()):,} operations, {sum(channel.num_bytes.values()):,} bytes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--traffic", action="store_true", help="count operations and bytes of ranks as threads")
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank in the form that gathers")
    options = parser.parse_args()
    if options.traffic:
        for num_ranks in options.ranks or [8, 16, 32, 64]:
            print_traffic(num_ranks, options.rows)
        return
    context = multiprocessing.get_context("spawn")
    for num_ranks in options.ranks or [2, 4, 8]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [
            context.Process(target=exchange, args=(rank, num_ranks, port, options)) for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
