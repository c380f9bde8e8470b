"""Data formats side by side: the same packed rows in ours and in six peers', each measured in a process of its own.

    data_peers.py [--rounds 3] [--flips 200]

Per contender: bytes on disk; seconds from opening to the first batch, imports excluded; tokens/s over an epoch; seconds
to the first batch after resuming at 50%, and whether the batches that follow are those of the uninterrupted pass; peak
memory beyond that after the imports; and what becomes of single flipped bits: detected, harmless, or silently wrong
tokens. Batches are 64 x 1,024, shuffled, one process, page cache warm. Our rows are checked on every read and delivered
with labels, segment ids, position ids and digests; peers deliver tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import interleave

BATCH, SEED = 64, 7
Tokens = np.ndarray[Any, Any]
Opened = tuple[Iterator[Tokens], Callable[[], Any]]
"""Batches ``[64, T]`` or wider, and the state to resume from behind the last one taken."""


class Vorox:
    """Our cache and loader. The codec is that of the name."""

    def __init__(self, codec: str) -> None:
        self.codec = codec

    def imports(self) -> None:
        import bench_cache  # noqa: F401 - and with it all of the data room

    def write(self, folder: Path, rows: Tokens) -> None:
        """Through the real builder, from the text that the rows are made of."""
        from bench_cache import FEW_BYTES, MANY_BYTES, build_rows, open_rows

        reader = build_rows(folder / "cache", self.codec, FEW_BYTES if folder.name.startswith("few") else MANY_BYTES)
        assert reader.num_rows == len(rows), "the same text gives the same rows"
        open_rows(folder, BATCH, SEED)  # a run begins its plan once; what follows opens it

    def open(self, folder: Path, state: Any) -> Opened:
        from bench_cache import open_rows
        from vorox.core.records import DataCursor, DataShard
        from vorox.data.loader import first_cursor, open_batches

        plan, reader = open_rows(folder, BATCH, SEED)
        cursor = first_cursor(plan, SEED) if state is None else DataCursor(**state)
        stream = open_batches(
            plan, [reader], shard=DataShard(), cursor=cursor, global_batch_sequences=BATCH,
            micro_batch_sequences=BATCH, document_mask=True, num_threads=0,
        )  # fmt: skip
        last: list[Any] = []

        def batches() -> Iterator[Tokens]:
            for _ in range(cursor.step, reader.num_rows // BATCH):
                batch = next(stream)
                last[:] = [batch.cursor_after]
                yield batch.tokens_ABT[0]

        return batches(), lambda: {name: getattr(last[0], name) for name in last[0].__slots__}


class Memmap:
    """nanoGPT's crops: no epochs and no state."""

    def imports(self) -> None:
        pass

    def write(self, folder: Path, rows: Tokens) -> None:
        rows.tofile(folder / "train.bin")
        (folder / "shape.json").write_text(json.dumps(rows.shape))

    def open(self, folder: Path, state: Any) -> Opened:
        count, width = json.loads((folder / "shape.json").read_text())
        random = np.random.default_rng(SEED)

        def batches() -> Iterator[Tokens]:
            for _ in range(count // BATCH):
                data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
                offsets = random.integers(len(data) - width - 1, size=BATCH)
                inputs = np.stack([data[i : i + width - 1].astype(np.int64) for i in offsets])
                np.stack([data[i + 1 : i + width].astype(np.int64) for i in offsets])
                yield inputs

        return batches(), lambda: None


class Arrow:
    """datasets, map-style: the order is recomputed and the position kept, as a sampler would."""

    def imports(self) -> None:
        import datasets

        datasets.disable_progress_bars()

    def write(self, folder: Path, rows: Tokens) -> None:
        import datasets

        features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"), length=rows.shape[1])})
        datasets.Dataset.from_dict({"tokens": list(rows)}, features=features).save_to_disk(str(folder / "arrow"))

    def open(self, folder: Path, state: Any) -> Opened:
        import datasets

        stored = datasets.load_from_disk(str(folder / "arrow")).with_format("numpy")
        order = np.random.default_rng(SEED).permutation(len(stored))
        place = [state or 0]

        def batches() -> Iterator[Tokens]:
            while place[0] + BATCH <= len(order):
                tokens = stored[order[place[0] : place[0] + BATCH]]["tokens"].astype(np.int32)
                place[0] += BATCH
                yield tokens[:, :-1]

        return batches(), lambda: place[0]


class ParquetStreaming:
    """datasets, streaming over Parquet with a shuffle buffer of 1,000 rows."""

    def imports(self) -> None:
        Arrow().imports()

    def write(self, folder: Path, rows: Tokens) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for number, part in enumerate(np.array_split(rows, 8)):
            pq.write_table(pa.table({"tokens": list(part)}), folder / f"part-{number}.parquet", row_group_size=512)

    def open(self, folder: Path, state: Any) -> Opened:
        import datasets

        files = sorted(str(path) for path in folder.glob("part-*.parquet"))
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        stream = stream.shuffle(seed=SEED, buffer_size=1000).with_format("numpy")
        if state is not None:
            stream.load_state_dict(state)
        batches = (batch["tokens"].astype(np.int32)[:, :-1] for batch in stream.iter(BATCH, drop_last_batch=True))
        return batches, stream.state_dict


class Litdata:
    """litdata's TokensLoader under its StreamingDataLoader."""

    def imports(self) -> None:
        import litdata  # noqa: F401
        import torch  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        import torch
        from litdata.streaming.item_loader import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        target = folder / "litdata"
        target.mkdir()
        writer = BinaryWriter(str(target), chunk_size=rows.shape[1] * 4096, item_loader=TokensLoader(rows.shape[1]))
        for index, row in enumerate(rows):
            writer.add_item(index, torch.from_numpy(row.astype(np.int32)))
        writer.done()
        writer.merge()
        (folder / "width.json").write_text(str(rows.shape[1]))

    def open(self, folder: Path, state: Any) -> Opened:
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        width = int((folder / "width.json").read_text())
        dataset = litdata.StreamingDataset(
            str(folder / "litdata"), item_loader=TokensLoader(width), shuffle=True, drop_last=True, seed=SEED
        )
        loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, drop_last=True)
        if state is not None:
            loader.load_state_dict(state)
        return (tokens[:, :-1].numpy() for tokens in loader), loader.state_dict


class Grain:
    """A shuffled MapDataset over ArrayRecord."""

    def imports(self) -> None:
        import grain.python  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
        for row in rows:
            writer.write(row.tobytes())
        writer.close()

    def open(self, folder: Path, state: Any) -> Opened:
        import grain.python as pygrain

        dataset = pygrain.MapDataset.source(pygrain.ArrayRecordDataSource([str(folder / "rows.array_record")]))
        dataset = dataset.seed(SEED).shuffle().map(lambda row: np.frombuffer(row, np.uint16).astype(np.int32))
        stream = iter(
            dataset.batch(BATCH, drop_remainder=True).to_iter_dataset(
                pygrain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
            )
        )
        if state is not None:
            stream.set_state(state)
        return (tokens[:, :-1] for tokens in stream), stream.get_state


class Mosaic:
    """mosaicml-streaming's MDS under its StreamingDataLoader."""

    def imports(self) -> None:
        import streaming  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{rows.shape[1]}"}) as writer:
            for row in rows:
                writer.write({"tokens": row})

    def open(self, folder: Path, state: Any) -> Opened:
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH
        )  # fmt: skip

        def collate(samples: list[Any]) -> Tokens:
            return np.stack([sample["tokens"] for sample in samples]).astype(np.int32)

        loader = streaming.StreamingDataLoader(dataset, batch_size=BATCH, drop_last=True, collate_fn=collate)
        if state is not None:
            loader.load_state_dict(state)
        taken = [0]

        def batches() -> Iterator[Tokens]:
            for tokens in loader:
                taken[0] += 1
                yield tokens[:, :-1]

        def get_state() -> Any:  # the loader counts samples by itself only for batches with a known size
            return dataset.state_dict(taken[0] * BATCH, from_beginning=True)

        if state is not None:
            dataset.load_state_dict(state)
        return batches(), get_state


CONTENDERS: dict[str, Any] = {
    "vorox, LZ4": Vorox("lz4"),
    "vorox, raw codec": Vorox("raw"),
    "bare memmap": Memmap(),
    "datasets, Arrow": Arrow(),
    "datasets, streaming Parquet": ParquetStreaming(),
    "litdata": Litdata(),
    "grain": Grain(),
    "mosaicml-streaming": Mosaic(),
}


def digest(tokens: Tokens) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def child(name: str, what: str, folder: Path, rows_path: Path, flips: int) -> dict[str, Any]:
    """One measurement, in the process that it is about."""
    contender = CONTENDERS[name]
    contender.imports()
    imported_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if what == "write":
        contender.write(folder, np.load(rows_path))
        files = [path for path in _payload_root(folder).rglob("*") if path.is_file()]
        return {"disk_bytes": sum(path.stat().st_size for path in files)}
    if what == "flips":
        return flip_bits(contender, folder, flips)
    if what == "resume":
        return resume(contender, folder)
    began = time.perf_counter()
    batches, _ = contender.open(folder, None)
    first = next(batches)
    start_seconds = time.perf_counter() - began
    began, count = time.perf_counter(), 0
    for tokens in batches:
        count += tokens.size
    seconds = time.perf_counter() - began
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported_kib
    return {
        "start_seconds": start_seconds, "tokens_per_second": count / seconds, "peak_bytes": peak_kib * 1024,
        "first": digest(first),
    }  # fmt: skip


def resume(contender: Any, folder: Path) -> dict[str, Any]:
    """In the middle: how long it takes, and whether what follows is what would have followed."""
    batches, _ = contender.open(folder, None)
    straight = [digest(tokens) for tokens in batches]
    half = len(straight) // 2
    batches, get_state = contender.open(folder, None)
    for _ in itertools.islice(batches, half):
        pass
    state = get_state()
    del batches
    if state is None:
        return {"resume_seconds": None, "exact": False}
    began = time.perf_counter()
    again, _ = contender.open(folder, state)
    found = [digest(next(again))]
    seconds = time.perf_counter() - began
    found += [digest(tokens) for tokens in again]
    return {"resume_seconds": seconds, "exact": found == straight[half:]}


def flip_bits(contender: Any, folder: Path, flips: int) -> dict[str, Any]:
    """Flip one random bit in the largest files, read everything, put it back."""
    random = np.random.default_rng(SEED)
    expected = sorted(digest(tokens) for tokens in contender.open(folder, None)[0])
    files = sorted(
        (path for path in _payload_root(folder).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    payload = [path for path in files if path.stat().st_size > files[-1].stat().st_size // 2]
    outcome = {"detected": 0, "silent": 0, "harmless": 0}
    for _ in range(flips):
        path = payload[int(random.integers(len(payload)))]
        place, bit = int(random.integers(path.stat().st_size)), int(random.integers(8))
        _flip(path, place, bit)
        try:
            found = sorted(digest(tokens) for tokens in contender.open(folder, None)[0])
            outcome["harmless" if found == expected else "silent"] += 1
        except Exception:
            outcome["detected"] += 1
        _flip(path, place, bit)
    return outcome


def _payload_root(folder: Path) -> Path:
    """Where a contender keeps its tokens: our tokenizer and listings lie beside the cache."""
    chunks = list(folder.glob("cache/*-train-*"))
    return chunks[0] if chunks else folder


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def run_child(name: str, what: str, folder: Path, rows_path: Path, flips: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, what, str(folder), str(rows_path), str(flips)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder.parent / "hf")}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=900, cwd=Path(__file__).parent
    )
    if result.returncode:
        print(f"{name}, {what}: failed: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        warnings.simplefilter("ignore")
        name, what, folder, rows_path, flips = sys.argv[2:]
        print(json.dumps(child(name, what, Path(folder), Path(rows_path), int(flips))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flips", type=int, default=200)
    options = parser.parse_args()
    from bench_cache import FEW_BYTES, MANY_BYTES, all_rows, build_rows

    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        rows = all_rows(build_rows(root / "text-rows", "lz4", MANY_BYTES))
        np.save(root / "rows.npy", rows)
        np.save(root / "few.npy", all_rows(build_rows(root / "text-few", "lz4", FEW_BYTES)))
        for number, name in enumerate(CONTENDERS):
            for size in ("rows", "few"):
                folder = root / f"{size}-{number}"
                folder.mkdir()
                written = run_child(name, "write", folder, root / f"{size}.npy")
                if size == "rows":
                    table[name] = written
        for _ in range(options.rounds):
            for number, name in enumerate(CONTENDERS):
                for what in ("read", "resume"):
                    for key, value in run_child(name, what, root / f"rows-{number}", root / "rows.npy").items():
                        table[name].setdefault(f"all_{key}", []).append(value)
        for number, name in enumerate(CONTENDERS):
            if name != "bare memmap":
                flips = options.flips if name.startswith("vorox") else options.flips // 4
                table[name] |= run_child(name, "flips", root / f"few-{number}", root / "few.npy", flips)
    print_table(table, rows)
    interleave.RESULTS.mkdir(exist_ok=True)
    (interleave.RESULTS / "data_peers.json").write_text(json.dumps(table, indent=1) + "\n")


def print_table(table: dict[str, dict[str, Any]], rows: Tokens) -> None:
    def median(values: list[Any] | None) -> float | None:
        numbers = [value for value in values or [] if value is not None]
        return statistics.median(numbers) if numbers else None

    print(f"{rows.shape[0]:,} rows of {rows.shape[1]:,} tokens, {rows.nbytes:,} bytes as uint16\n")
    print("| | disk | first batch | tokens/s | resume at 50% | same rows after | memory | flipped bits |")
    print("|---|---|---|---|---|---|---|---|")
    for name, found in table.items():
        start, rate, resumed = (
            median(found.get(f"all_{key}")) for key in ("start_seconds", "tokens_per_second", "resume_seconds")
        )
        exact = found.get("all_exact", [])
        flips = "not measured"
        if "detected" in found:
            total = found["detected"] + found["silent"] + found["harmless"]
            flips = f"{found['detected']}/{total} detected, {found['silent']} silent, {found['harmless']} harmless"
        cells = [
            f"{found.get('disk_bytes', 0) / rows.nbytes:.0%}", "-" if start is None else f"{start * 1e3:.0f} ms",
            "-" if rate is None else f"{rate / 1e6:.1f}M", "-" if resumed is None else f"{resumed * 1e3:.0f} ms",
            "yes" if exact and all(exact) else "no",
            f"{(median(found.get('all_peak_bytes')) or 0) / 2**20:.0f} MiB", flips,
        ]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
