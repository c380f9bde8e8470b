"""The cost of the hashes of a row: xxh3 of what the cache stores, and the element of the batch digest.

    row_digests.py [--tokens 1024 8192] [--rows 64] [--rounds 30]

Printed is the processor time per row, the median of the rounds with its 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from vorox.core.batch import DataCursor
from vorox.data.rows import RowBlock, assemble, row_digests


def microseconds(call: Callable[[], object], num_rows: int, rounds: int) -> str:
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    middle, low, high = 1e6 / num_rows * np.percentile(seconds, [50, 10, 90])
    return f"{middle:.1f} us ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    for num_tokens in options.tokens:
        tokens_NC = np.random.default_rng(0).integers(0, 50_000, (options.rows, num_tokens + 1)).astype(np.uint16)
        row_ptr = np.arange(options.rows + 1) * 4
        lengths = np.tile([num_tokens // 4] * 3 + [num_tokens - num_tokens // 4 * 3 + 1], options.rows).astype(np.int32)
        block = RowBlock(tokens_NC, row_ptr, lengths, np.zeros_like(lengths))
        batch = assemble(block, document_mask=True, step=0, cursor_after=DataCursor("", 0, 1, 1, 0))
        slots = np.arange(options.rows)
        stored = microseconds(lambda block=block: row_digests(block), options.rows, options.rounds)
        trained = microseconds(lambda batch=batch, slots=slots: batch.with_lanes(slots), options.rows, options.rounds)
        print(f"{num_tokens:,} tokens: xxh3 {stored}, element of the batch digest {trained}")


if __name__ == "__main__":
    main()
