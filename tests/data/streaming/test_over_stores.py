"""Streams over real stores on loopback: the same samples with and without faults, none lost or repeated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from servers.four_stores import FourStores, four_stores
from vorox.data.dataset.iterable_dataset import RemoteIterableDataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with four_stores(tmp_path_factory.mktemp("local"), documents=120) as running:
        yield running


def stream(stores: FourStores, cache: Path, retention_bytes: int) -> RemoteIterableDataset:
    sources = {
        source["name"]: {key: value for key, value in source.items() if key != "name"} for source in stores.sources
    }
    return RemoteIterableDataset(
        sources, tokenizer="byte", sequence_length_tokens=32, cache_directory=cache, unit_bytes=4000,
        shuffle_buffer_rows=240, retention_bytes=retention_bytes, metadata=True,
    )  # fmt: skip


def taken(dataset: RemoteIterableDataset, count: int) -> list[tuple[Any, ...]]:
    samples = iter(dataset)
    found = [next(samples) for _ in range(count)]
    samples.close()  # type: ignore[attr-defined]
    return [(sample["input_ids"].tobytes(), json.dumps(sample["metadata"])) for sample in found]


def test_four_stores_give_one_order_whatever_fails(stores: FourStores, tmp_path: Path) -> None:
    count = 2500
    clean = taken(stream(stores, tmp_path / "clean", 1 << 30), count)
    with stores.behind(seed=3, error_503_fraction=0.3, truncated_fraction=0.1) as proxies:
        broken = taken(stream(stores, tmp_path / "broken", 250_000), count)
        assert sum(sum(proxy.faults.values()) for proxy in proxies.values()) > 0
    assert broken == clean
    chunks = sum(path.stat().st_size for path in (tmp_path / "broken" / "streams").rglob("*.psc"))
    assert chunks <= 250_000
    drawn = Counter(json.loads(metadata)["source"] for _, metadata in clean)
    assert [drawn[name] for name in ("crawl", "books", "edu", "notes")] == [1000, 750, 500, 250]


def test_a_state_goes_on_behind_faults(stores: FourStores, tmp_path: Path) -> None:
    clean = taken(stream(stores, tmp_path / "clean", 1 << 30), 900)
    first = stream(stores, tmp_path / "broken", 250_000)
    samples = iter(first)
    for _ in range(600):
        next(samples)
    state = first.state_dict()
    samples.close()  # type: ignore[attr-defined]
    with stores.behind(seed=5, error_503_fraction=0.1):
        again = stream(stores, tmp_path / "broken", 250_000)
        again.load_state_dict(state)
        assert taken(again, 300) == clean[600:]
