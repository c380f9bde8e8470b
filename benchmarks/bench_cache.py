"""Our caches for ``data_peers.py``: the Python files of torch and transformers, and the rows that peers store too."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.config import load_config
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.dataset import prepare
from vorox.data.plan import Plan
from vorox.data.plan_events import PlanSource, PlanStart

LENGTH = 1024
MANY_BYTES, FEW_BYTES = 90_000_000, 2_000_000


def configuration(folder: Path, codec: str, max_bytes: int) -> RunConfig:
    packages = Path(sysconfig.get_paths()["purelib"])
    return load_config(
        "quickstart",
        [
            "data.sources.0.format=txt", f"data.sources.0.max_bytes={max_bytes}",
            f"data.sources.0.paths=[{packages}/torch/**/*.py, {packages}/transformers/**/*.py]",
            "data.sources.0.bad_record_fraction=0.01", f"data.sequence_length_tokens={LENGTH}",
            f"data.cache.directory={folder}", f"data.cache.codec={codec}",
        ],
    )  # fmt: skip


def build_rows(folder: Path, codec: str, max_bytes: int) -> CacheReader:
    return prepare(configuration(folder, codec, max_bytes)).sources[0].train


def all_rows(reader: CacheReader) -> np.ndarray[Any, Any]:
    starts = range(0, reader.num_rows, 4096)
    return np.concatenate([reader.read_rows(np.arange(a, min(a + 4096, reader.num_rows))).tokens_NC for a in starts])


def open_rows(folder: Path, batch: int, seed: int) -> tuple[Plan, CacheReader]:
    """The cache and a plan of one epoch over it, begun once and opened afterwards."""
    (directory,) = folder.glob("cache/*-train-*")
    reader, path = CacheReader.open(directory), folder / "plan.jsonl"
    if path.exists():
        plan = Plan.open(path)
        plan.check([reader])
        return plan, reader
    source = PlanSource("text", 1, reader.recipe.digest, reader.row_tokens)  # type: ignore[arg-type]
    plan = Plan.create(path, PlanStart(seed, True, batch, (source,)), [reader])
    plan.extend_to(reader.num_rows // batch * batch, [reader])
    return plan, reader
