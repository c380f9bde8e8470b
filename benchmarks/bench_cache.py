"""Our side of ``data_peers.py``: the rows that everybody stores, our cache of them, and batches out of it.

Two corpora. *Text*: the Python files of torch and transformers in rows of 1,025 tokens, through the whole builder.
*Scaled*: the tokens of that text, over and over, in ``.bin`` shards, built into as many rows as asked for.

What reads a cache is imported with this module, as a trainer of one's own would; what builds one, where it is needed.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vorox.core.batch import DataCursor, DataShard
from vorox.data.cache.reader import CacheReader
from vorox.data.order.loader import first_cursor, open_batches
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanSource, PlanStart

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig

TEXT_TOKENS = 1024
CACHE = "cache"
MANY_BYTES, FEW_BYTES = 90_000_000, 2_000_000
_SHARD_TOKENS = 100_000_000
_READ_ROWS = 4096


def text_configuration(folder: Path, codec: str, max_bytes: int) -> RunConfig:
    from vorox.core.config import load_config

    packages = Path(sysconfig.get_paths()["purelib"])
    return load_config(
        "quickstart",
        [
            "data.sources.0.format=txt", f"data.sources.0.max_bytes={max_bytes}",
            f"data.sources.0.paths=[{packages}/torch/**/*.py, {packages}/transformers/**/*.py]",
            "data.sources.0.bad_record_fraction=0.01", f"data.sequence_length_tokens={TEXT_TOKENS}",
            f"data.cache.directory={folder}", f"data.cache.codec={codec}",
        ],
    )  # fmt: skip


def scaled_configuration(folder: Path, codec: str, shards: Path, tokenizer: Path, row_tokens: int) -> RunConfig:
    from vorox.core.config import load_config

    return load_config(
        "quickstart",
        [
            "data.sources.0.format=bin", f"data.sources.0.paths=[{shards}/*.bin]",
            f"data.sources.0.tokenizer={tokenizer}", "tokenizer.kind=file", f"tokenizer.path={tokenizer}",
            f"data.sequence_length_tokens={row_tokens - 1}", "data.validation.held_out_fraction=0",
            "eval.every_steps=null", "eval.prompts=[]", f"data.cache.directory={folder}", f"data.cache.codec={codec}",
        ],
    )  # fmt: skip


def build(configuration: RunConfig, folder: Path) -> CacheReader:
    """Build the training cache of the one source and let it be ``folder / CACHE``."""
    from vorox.data.corpus.corpus import prepare

    reader = prepare(configuration).sources[0].train
    reader.directory.rename(folder / CACHE)
    return CacheReader.open(folder / CACHE)


def write_scaled_shards(shards: Path, rows: np.ndarray[Any, Any], num_rows: int, row_tokens: int) -> None:
    """The tokens of ``rows`` repeated until they fill ``num_rows`` rows of ``row_tokens``."""
    from vorox.data.text.shard_format import write_shard

    shards.mkdir()
    stream = rows.reshape(-1)
    for number, first in enumerate(range(0, num_rows * row_tokens, _SHARD_TOKENS)):
        size = min(_SHARD_TOKENS, num_rows * row_tokens - first)
        shard = np.take(stream, np.arange(first, first + size), mode="wrap")
        write_shard(shards / f"shard-{number:04d}.bin", shard)


def save_rows(reader: CacheReader, path: Path) -> None:
    """All rows as a ``.npy`` file, uint16 ``[N, C]``."""
    shape = (reader.num_rows, reader.row_tokens)
    stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape)
    for first in range(0, reader.num_rows, _READ_ROWS):
        last = min(first + _READ_ROWS, reader.num_rows)
        stored[first:last] = reader.read_rows(np.arange(first, last)).tokens_NC
    stored.flush()


def open_batches_of(
    folder: Path, batch: int, seed: int, state: Any, document_mask: bool = True
) -> tuple[Iterator[Any], Callable[[], Any]]:
    """Batches as a run opens them: a durable plan, one reader thread, every row checked.

    A new run writes its plan; one that resumes reads it.
    """
    reader, path = CacheReader.open(folder / CACHE), folder / f"plan-{seed}.jsonl"
    if state is None:
        path.unlink(missing_ok=True)
        source = PlanSource("text", Fraction(1), reader.recipe.digest, reader.row_tokens)
        plan = DataPlan.create(path, PlanStart(seed, True, batch, (source,)), [reader])
        plan.extend_to(reader.num_rows // batch * batch, [reader])
        cursor = first_cursor(plan, seed)
    else:
        plan, cursor = DataPlan.open(path), DataCursor(**state)
    stream = open_batches(
        plan, [reader], shard=DataShard(), cursor=cursor, global_batch_sequences=batch, micro_batch_sequences=batch,
        document_mask=document_mask,
    )  # fmt: skip
    last: list[Any] = []

    def batches() -> Iterator[Any]:
        with stream:
            for _ in range(cursor.step, reader.num_rows // batch):
                taken = next(stream)
                last[:] = [taken.cursor_after]
                yield taken.tokens_ABT[0]

    return batches(), lambda: {name: getattr(last[0], name) for name in last[0].__slots__}


def verify(folder: Path) -> None:
    CacheReader.open(folder / CACHE).verify()


def rows_of_step(folder: Path, batch: int, seed: int, step: int) -> np.ndarray[Any, Any]:
    found = DataPlan.open(folder / f"plan-{seed}.jsonl").locate(np.arange(step * batch, (step + 1) * batch))
    return found.row + CacheReader.open(folder / CACHE).unit_row_starts[found.unit_start]


def steps_of_row(folder: Path, batch: int, seed: int, row: int) -> list[int]:
    positions = DataPlan.open(folder / f"plan-{seed}.jsonl").positions_of(0, row, CacheReader.open(folder / CACHE))
    return (positions // batch).tolist()


def texts_of_row(folder: Path, row: int) -> list[tuple[str, str]]:
    """Of each segment of a row, the text that its tokens stand for and the text of the bytes it is said to be from."""
    import tokenizers

    reader = CacheReader.open(folder / CACHE)
    (path,) = folder.glob("tokenizers/*/tokenizer.json")
    tokenizer, first, texts = tokenizers.Tokenizer.from_file(str(path)), 0, list[tuple[str, str]]()
    tokens = reader.read_rows(np.array([row])).tokens_NC[0]
    for span in reader.documents_of(row):
        with Path(span.uri.removeprefix("file://")).open("rb") as file:
            file.seek(span.byte_offset)
            source = file.read(span.byte_length).decode(errors="replace")
        texts.append((tokenizer.decode(tokens[first : first + span.length].tolist()), source))
        first += span.length
    return texts
