"""Peers of the loader benchmark: each writes the same rows in its own format and reads shuffled batches back.

A peer is ``open_(directory, rows, batch) -> iterator factory``: it stores ``rows`` (uint16, ``[N, T + 1]``) once and
returns a function that starts a fresh shuffled pass and yields ``(inputs, labels)`` as ``[batch, T]`` arrays. One
thread, no worker processes, page cache warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Pass = Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]


def memmap(directory: Path, rows: np.ndarray, batch: int) -> Pass:
    """nanoGPT's way: random crops of a flat memmap, no epochs, no checks."""
    path = directory / "train.bin"
    rows.tofile(path)
    length = rows.shape[1] - 1

    def start(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng(seed)
        for _ in range(len(rows) // batch):
            data = np.memmap(path, dtype=np.uint16, mode="r")
            offsets = random.integers(len(data) - length - 1, size=batch)
            yield (
                np.stack([data[i : i + length].astype(np.int64) for i in offsets]),
                np.stack([data[i + 1 : i + 1 + length].astype(np.int64) for i in offsets]),
            )

    return start


def arrow(directory: Path, rows: np.ndarray, batch: int) -> Pass:
    """Hugging Face datasets, map-style: a shuffled index over an Arrow file in numpy format."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"), length=rows.shape[1])})
    table = datasets.Dataset.from_dict({"tokens": list(rows)}, features=features)
    table.save_to_disk(str(directory / "arrow"))
    stored = datasets.load_from_disk(str(directory / "arrow")).with_format("numpy")

    def start(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng(seed).permutation(len(rows))
        for first in range(0, len(rows) - batch + 1, batch):
            tokens = stored[order[first : first + batch]]["tokens"].astype(np.int32)
            yield tokens[:, :-1], tokens[:, 1:]

    return start


def litdata(directory: Path, rows: np.ndarray, batch: int) -> Pass:
    """litdata: TokensLoader chunks of the flat token stream, shuffled, torch DataLoader without workers."""
    import litdata as lit
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    target = directory / "litdata"
    if not target.exists():
        target.mkdir()
        writer = BinaryWriter(str(target), chunk_size=rows.shape[1] * 4096, item_loader=TokensLoader(rows.shape[1]))
        for index, row in enumerate(rows):
            writer.add_item(index, torch.from_numpy(row.astype(np.int32)))
        writer.done()
        writer.merge()

    def start(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        dataset = lit.StreamingDataset(
            str(target), item_loader=TokensLoader(rows.shape[1]), shuffle=True, drop_last=True, seed=seed
        )
        for tokens in lit.StreamingDataLoader(dataset, batch_size=batch, drop_last=True):
            yield tokens[:, :-1].numpy(), tokens[:, 1:].numpy()

    return start


def grain(directory: Path, rows: np.ndarray, batch: int) -> Pass:
    """Grain: a shuffled MapDataset over rows kept in ArrayRecord."""
    import grain.python as pygrain
    from array_record.python.array_record_module import ArrayRecordWriter

    path = directory / "rows.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row.tobytes())
    writer.close()
    source = pygrain.ArrayRecordDataSource([str(path)])

    def start(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        dataset = (
            pygrain.MapDataset.source(source)
            .seed(seed)
            .shuffle()
            .map(lambda record: np.frombuffer(record, dtype=np.uint16).astype(np.int32))
            .batch(batch, drop_remainder=True)
        )
        for tokens in dataset.to_iter_dataset(pygrain.ReadOptions(num_threads=1, prefetch_buffer_size=64)):
            yield tokens[:, :-1], tokens[:, 1:]

    return start


PEERS: dict[str, Callable[[Path, np.ndarray, int], Pass]] = {
    "bare memmap": memmap,
    "datasets (arrow)": arrow,
    "litdata": litdata,
    "grain": grain,
}
