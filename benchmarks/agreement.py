"""The latency of an exchange between ranks (``training/step_sync.py``) at several numbers of ranks.

    agreement.py [--ranks 2 4 8] [--exchanges 200] [--rows 64]

Every rank is a process of this machine that reports so many row digests through a ``TCPStore`` of PyTorch, as a run
does about twice a second. Printed is the median time of an exchange on rank 0, with its 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from datetime import timedelta
from typing import Any

import numpy as np


def exchange(rank: int, num_ranks: int, port: int, options: argparse.Namespace) -> None:
    from torch.distributed import PrefixStore, TCPStore

    from vorox.backends.torch_engine.distributed import StoreChannel
    from vorox.core.distributed_context import DistributedContext

    store = TCPStore("127.0.0.1", port, num_ranks, rank == 0, timedelta(seconds=60))
    dist = DistributedContext(rank, num_ranks, StoreChannel(PrefixStore("vorox", store)))
    report: dict[str, Any] = {"stop": "", "numbers": "0" * 32, "rows": ["0" * 16 * options.rows]}
    seconds = []
    for _ in range(options.exchanges):
        started = time.perf_counter()
        dist.agree("step", report, lambda reports: {"digests": ["0" * 32], "stop": "", "ranks": len(reports)})
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        middle, low, high = 1e3 * np.percentile(seconds[10:], [50, 10, 90])
        print(f"{num_ranks} ranks: {middle:.2f} ms ({low:.2f} to {high:.2f})", flush=True)
        time.sleep(1)  # rank 0 serves the store, from which the others read the last decision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64, help="rows that a rank reads between two exchanges")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for num_ranks in options.ranks:
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
