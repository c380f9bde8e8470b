"""The contenders of ``data_peers.py``: each stores the same rows in its own format and reads shuffled batches back.

A contender has ``imports()``: what a script that uses it names at its top; ``write(folder, rows)``; and ``open(folder,
batch, seed, state)``, which gives an iterator of token batches ``[batch, T]`` over one shuffled epoch and a function
that says the state behind the last batch taken, as JSON values. ``state`` resumes; ``None`` begins. The shuffle is the
one that the library recommends for whole epochs, the writer its own or, where it has none for arrays, the fastest that
leaves the same files.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Tokens = np.ndarray[Any, Any]
Opened = tuple[Iterator[Tokens], Callable[[], Any]]

_WRITE_ROWS = 65_536


class Contender(Protocol):
    def imports(self) -> None: ...
    def write(self, folder: Path, rows: Tokens) -> None: ...
    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened: ...


def blocks(rows: Tokens) -> Iterator[Tokens]:
    return (rows[first : first + _WRITE_ROWS] for first in range(0, len(rows), _WRITE_ROWS))


class Memmap:
    """nanoGPT's crops: no epochs and no state."""

    def imports(self) -> None:
        import numpy.random  # noqa: F401 - numpy itself loads it late

    def write(self, folder: Path, rows: Tokens) -> None:
        rows.tofile(folder / "train.bin")
        (folder / "shape.json").write_text(json.dumps(rows.shape))

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        count, width = json.loads((folder / "shape.json").read_text())
        random = np.random.default_rng(seed)

        def batches() -> Iterator[Tokens]:
            for _ in range(count // batch):
                data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
                offsets = random.integers(len(data) - width - 1, size=batch)
                inputs = np.stack([data[i : i + width - 1].astype(np.int64) for i in offsets])
                np.stack([data[i + 1 : i + width].astype(np.int64) for i in offsets])
                yield inputs

        return batches(), lambda: None


class MemmapRows:
    """The least that a script of one's own can do: rows of a memmap by a numpy permutation, inputs and labels. A floor
    under everybody: no check, no documents, no record of what was read. The state is the position."""

    stored_as = "bare memmap"

    def imports(self) -> None:
        import numpy.random  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        Memmap().write(folder, rows)

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        shape = tuple(json.loads((folder / "shape.json").read_text()))
        rows, place = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r", shape=shape), [state or 0]
        order = np.random.default_rng(seed).permutation(len(rows))

        def batches() -> Iterator[Tokens]:
            while place[0] + batch <= len(rows):
                taken = rows[order[place[0] : place[0] + batch]].astype(np.int32)
                place[0] += batch
                np.ascontiguousarray(taken[:, 1:])
                yield np.ascontiguousarray(taken[:, :-1])

        return batches(), lambda: place[0]

    def rows_of_step(self, folder: Path, batch: int, seed: int, step: int) -> Tokens:
        count, _ = json.loads((folder / "shape.json").read_text())
        return np.random.default_rng(seed).permutation(count)[step * batch : (step + 1) * batch]


class Arrow:
    """datasets, map-style. ``shuffle()``: the library's own, which writes its indices beside the data and finds them
    again; otherwise a numpy permutation that the script makes itself each time. The state is the position."""

    stored_as = "datasets, Arrow, shuffle()"

    def __init__(self, *, library_shuffle: bool) -> None:
        self.library_shuffle = library_shuffle

    def imports(self) -> None:
        import datasets
        import numpy.random  # noqa: F401

        datasets.disable_progress_bars()

    def write(self, folder: Path, rows: Tokens) -> None:
        import datasets
        import pyarrow as pa

        def column(block: Tokens) -> pa.Array:
            return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(block).reshape(-1)), rows.shape[1])

        table = pa.table({"tokens": pa.chunked_array([column(block) for block in blocks(rows)])})
        datasets.Dataset(table).save_to_disk(str(folder / "arrow"))

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        import datasets

        stored = datasets.load_from_disk(str(folder / "arrow"))
        order = None
        if self.library_shuffle:
            stored = stored.shuffle(seed=seed)
        else:
            order = np.random.default_rng(seed).permutation(len(stored))
        stored, place = stored.with_format("numpy"), [state or 0]

        def batches() -> Iterator[Tokens]:
            while place[0] + batch <= len(stored):
                chosen = slice(place[0], place[0] + batch)
                tokens = stored[chosen if order is None else order[chosen]]["tokens"].astype(np.int32)
                place[0] += batch
                yield tokens[:, :-1]

        return batches(), lambda: place[0]

    def rows_of_step(self, folder: Path, batch: int, seed: int, step: int) -> Tokens:
        import datasets

        stored = datasets.load_from_disk(str(folder / "arrow"))
        places = slice(step * batch, (step + 1) * batch)
        if not self.library_shuffle:
            return np.random.default_rng(seed).permutation(len(stored))[places]
        numbered = datasets.Dataset.from_dict({"row": np.arange(len(stored))})  # shuffled alike
        return np.array(numbered.shuffle(seed=seed)[places]["row"])


class ParquetStreaming:
    """datasets, streaming over Parquet, its default shuffle buffer of 1,000 rows. ``checksums``: of pages, checked."""

    def __init__(self, *, checksums: bool = False) -> None:
        self.checksums = checksums

    def imports(self) -> None:
        import datasets
        import pyarrow.dataset  # noqa: F401

        datasets.disable_progress_bars()

    def write(self, folder: Path, rows: Tokens) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for number, part in enumerate(np.array_split(rows, 8)):
            tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(part).reshape(-1)), rows.shape[1])
            group_rows = 512 * 1024 // rows.shape[1]
            pq.write_table(
                pa.table({"tokens": tokens}), folder / f"part-{number}.parquet", row_group_size=group_rows,
                write_page_checksum=self.checksums,
            )  # fmt: skip

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        import datasets
        import pyarrow.dataset

        files = sorted(str(path) for path in folder.glob("part-*.parquet"))
        options = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        stream = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True,
            **({"fragment_scan_options": options} if self.checksums else {}),
        )  # fmt: skip
        stream = stream.shuffle(seed=seed, buffer_size=1000).with_format("numpy")
        if state is not None:
            stream.load_state_dict(state)
        batches = (read["tokens"].astype(np.int32)[:, :-1] for read in stream.iter(batch, drop_last_batch=True))
        return batches, stream.state_dict


class Litdata:
    """litdata's TokensLoader under its StreamingDataLoader; chunks of 64 MB as its documentation has them."""

    def imports(self) -> None:
        import litdata  # noqa: F401
        import torch  # noqa: F401
        from litdata.streaming.item_loader import TokensLoader  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        import torch
        from litdata.streaming.item_loader import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        target = folder / "litdata"
        target.mkdir()
        writer = BinaryWriter(str(target), chunk_bytes="64MB", item_loader=TokensLoader(rows.shape[1]))
        for index, first in enumerate(range(0, len(rows), 512)):  # a text of 512 rows
            writer.add_item(index, torch.from_numpy(rows[first : first + 512].reshape(-1).copy()))
        writer.done()
        writer.merge()
        (folder / "width.json").write_text(str(rows.shape[1]))

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        width = int((folder / "width.json").read_text())
        dataset = litdata.StreamingDataset(
            str(folder / "litdata"), item_loader=TokensLoader(width), shuffle=True, drop_last=True, seed=seed
        )
        loader = litdata.StreamingDataLoader(dataset, batch_size=batch, drop_last=True)
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

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        import grain.python as pygrain

        dataset = pygrain.MapDataset.source(pygrain.ArrayRecordDataSource([str(folder / "rows.array_record")]))
        dataset = dataset.seed(seed).shuffle().map(lambda row: np.frombuffer(row, np.uint16).astype(np.int32))
        stream = iter(
            dataset.batch(batch, drop_remainder=True).to_iter_dataset(
                pygrain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
            )
        )
        if state is not None:
            stream.set_state(state)
        return (tokens[:, :-1] for tokens in stream), stream.get_state


class Mosaic:
    """mosaicml-streaming's MDS under its StreamingDataLoader. ``validate_hash``: written with it and told to check."""

    def __init__(self, validate_hash: str | None = None) -> None:
        self.validate_hash = validate_hash

    def imports(self) -> None:
        # Its image datasets want torchvision, whose release for this torch has no build without CUDA.
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
        import streaming  # noqa: F401
        import torch  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        from streaming import MDSWriter

        hashes = [self.validate_hash] if self.validate_hash else None
        columns = {"tokens": f"ndarray:uint16:{rows.shape[1]}"}
        with MDSWriter(out=str(folder / "mds"), columns=columns, hashes=hashes) as writer:
            writer.encode_sample = lambda sample: sample["tokens"].tobytes()  # the same bytes, thirty times as fast
            for row in rows:
                writer.write({"tokens": row})

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(folder / "mds"), shuffle=True, shuffle_seed=seed, batch_size=batch,
            validate_hash=self.validate_hash,
        )  # fmt: skip

        def collate(samples: list[Any]) -> Tokens:
            return np.stack([sample["tokens"] for sample in samples]).astype(np.int32)

        loader = streaming.StreamingDataLoader(dataset, batch_size=batch, drop_last=True, collate_fn=collate)
        if state is not None:
            dataset.load_state_dict(state)
        taken = [0]

        def batches() -> Iterator[Tokens]:
            for tokens in loader:
                taken[0] += 1
                yield tokens[:, :-1]

        def get_state() -> Any:  # the loader counts samples by itself only for batches with a known size
            return dataset.state_dict(taken[0] * batch, from_beginning=True)

        return batches(), get_state


class Ours:
    """Our cache; ``bench_cache`` imports all that it needs, and builds it before the others write."""

    def __init__(self, stored_as: str, *, document_mask: bool = True) -> None:
        self.stored_as, self.document_mask = stored_as, document_mask

    def imports(self) -> None:
        import bench_cache  # noqa: F401

    def write(self, folder: Path, rows: Tokens) -> None:
        raise NotImplementedError("built through the real builder, before there are rows")

    def open(self, folder: Path, batch: int, seed: int, state: Any) -> Opened:
        from bench_cache import open_batches_of

        return open_batches_of(folder, batch, seed, state, self.document_mask)

    def verify(self, folder: Path) -> None:
        """What ``vorox data verify`` does."""
        from bench_cache import verify

        verify(folder)

    def rows_of_step(self, folder: Path, batch: int, seed: int, step: int) -> Tokens:
        from bench_cache import rows_of_step

        return rows_of_step(folder, batch, seed, step)

    def steps_of_row(self, folder: Path, batch: int, seed: int, row: int) -> list[int]:
        from bench_cache import steps_of_row

        return steps_of_row(folder, batch, seed, row)

    def texts_of_row(self, folder: Path, row: int) -> list[tuple[str, str]]:
        from bench_cache import texts_of_row

        return texts_of_row(folder, row)


def contenders() -> dict[str, Contender]:
    """Ours and the peers, by the name in the tables."""
    return {
        "vorox, lz4": Ours("vorox, lz4"),
        "vorox, raw": Ours("vorox, raw"),
        "vorox, raw, no document mask": Ours("vorox, raw", document_mask=False),
        "bare memmap": Memmap(),
        "memmap, rows in numpy's order": MemmapRows(),
        "datasets, Arrow, shuffle()": Arrow(library_shuffle=True),
        "datasets, Arrow, numpy order": Arrow(library_shuffle=False),
        "datasets, streaming Parquet": ParquetStreaming(),
        "litdata": Litdata(),
        "grain": Grain(),
        "mosaicml-streaming": Mosaic(),
    }


def checking_contenders() -> dict[str, Contender]:
    """Peers with the checks switched on that their documentation has and their defaults leave off."""
    return {
        "mosaicml-streaming, validate_hash": Mosaic(validate_hash="xxh64"),
        "datasets, streaming Parquet, page checksums": ParquetStreaming(checksums=True),
    }


def folder_of(root: Path, name: str) -> Path:
    """Where a contender's files are; some read what another one wrote."""
    owner = getattr((contenders() | checking_contenders())[name], "stored_as", name)
    return root / "".join(character for character in owner if character.isalnum())


def is_payload(path: Path) -> bool:
    """Whether a file is the format's: not what a trial leaves, nor the tokenizer and listings beside our cache."""
    kept = not set(path.parts) & {"tokenizers", "versions", "locks"} and "-validation-" not in str(path)
    return kept and path.is_file() and not path.name.startswith(("plan-", "cache-"))
