"""``RemoteIterableDataset``: each row once per epoch, in one order for any ranks and workers, from any state."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eventually import wait_until
from servers import fault_proxy, http_server
from tiny_streams import dataset, write_source
from transport import received
from vorox.core.errors import ConfigError, DataError
from vorox.data.cache.reader import CacheReader
from vorox.data.storage import RetryPolicy, waiting_for_data
from vorox.data.storage.reading import RangeCache


def ids(samples: Any) -> list[bytes]:
    return [sample["input_ids"].tobytes() + sample["segment_ids"].tobytes() for sample in samples]


@pytest.fixture
def straight(tmp_path: Path) -> list[bytes]:
    return ids(dataset(tmp_path))


def test_an_epoch_is_every_row_once_in_another_order_for_every_seed(tmp_path, straight):
    (stream,) = (tmp_path / "cache" / "streams").iterdir()
    reader = CacheReader.open(stream)
    assert len(straight) == reader.num_rows > 200
    other = ids(dataset(tmp_path, seed=99))
    assert straight != other
    assert Counter(straight) == Counter(other)
    twice = ids(dataset(tmp_path, epochs=2))
    assert twice[: len(straight)] == straight
    assert Counter(twice) == Counter(straight * 2)
    assert twice[len(straight) :] != straight
    chunks = sum(path.stat().st_size for path in (stream / "chunks").rglob("*.psc"))
    assert chunks <= 20_000 < int(reader.manifest.chunks["size_bytes"].sum())


def test_labels_are_the_next_tokens_and_metadata_says_which_bytes(tmp_path):
    for sample in dataset(tmp_path, metadata=True):
        arrays = [sample[name] for name in ("input_ids", "labels", "segment_ids", "position_ids")]
        assert {(array.shape, array.dtype.name) for array in arrays} == {((16,), "int32")}
        metadata = sample["metadata"]
        assert (metadata["source"], metadata["epoch"]) == ("words", 0)
        for number, document in enumerate(metadata["documents"], 1):
            raw = Path(document["uri"]).read_bytes()[document["start_byte"] : document["end_byte"]]
            tokens = [*json.loads(raw)["text"].encode(), 256]
            expected = tokens[document["first_token"] : document["first_token"] + document["num_tokens"]]
            found = sample["input_ids"][sample["segment_ids"] == number].tolist()
            assert found == expected[: len(found)]
            labels = sample["labels"][sample["segment_ids"] == number].tolist()
            assert [label for label in labels if label >= 0] == expected[1 : len(labels) + 1][: len(labels)]


def test_any_state_goes_on_where_it_was_taken_at_any_number_of_ranks(tmp_path, straight):
    for stop in (1, 7, 16, 120, len(straight) - 1):
        before = dataset(tmp_path, prefetch_samples=stop % 3 * 16)
        iterator = iter(before)
        taken = ids(next(iterator) for _ in range(stop))
        state = json.loads(json.dumps(before.state_dict()))
        iterator.close()  # type: ignore[attr-defined]
        assert len(json.dumps(state)) <= 200
        again = received(dataset(tmp_path))
        again.load_state_dict(state)
        assert taken + ids(again) == straight
        shares = []
        for rank in range(3):
            one = dataset(tmp_path, rank=rank, world_size=3)
            one.load_state_dict(state)
            shares.append(ids(one))
        merged = [sample for samples in zip(*shares, strict=False) for sample in samples]
        assert merged == straight[stop:][: len(merged)]
        assert Counter(itertools.chain(*shares)) == Counter(straight[stop:])


def test_a_state_of_other_text_or_another_seed_is_refused(tmp_path, straight):
    assert straight
    before = dataset(tmp_path)
    iterator = iter(before)
    for _ in range(50):
        next(iterator)
    state = before.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="saved with seed"):
        dataset(tmp_path, seed=7).load_state_dict(state)
    with pytest.raises(DataError, match="Not a state of a RemoteIterableDataset"):
        dataset(tmp_path).load_state_dict({"step": 4})
    path = tmp_path / "text" / "0.jsonl"
    path.write_bytes(path.read_bytes().replace(b"aa", b"ab", 1))
    changed = dataset(tmp_path)
    changed.load_state_dict(state)
    with pytest.raises(DataError, match="have changed since the state was saved"):
        next(iter(changed))


def test_several_sources_are_drawn_by_exact_weights(tmp_path):
    for name in ("one", "other"):
        write_source(tmp_path / name, seed=len(name))
    data = {name: {"format": "jsonl", "paths": [str(tmp_path / name)]} for name in ("one", "other")}
    weights = {"one": "2/3", "other": "1/3"}
    samples = iter(dataset(tmp_path, data=data, weights=weights, metadata=True, epochs=None, retention_bytes=60_000))
    drawn = [next(samples)["metadata"]["source"] for _ in range(900)]
    samples.close()  # type: ignore[attr-defined]
    for end in range(1, 901):
        assert abs(drawn[:end].count("one") - end * 2 / 3) < 2


def test_abandoned_iterators_leave_no_thread_and_no_plan(tmp_path):
    before = set(threading.enumerate())
    samples = iter(dataset(tmp_path, epochs=None))
    for _ in range(30):
        next(samples)
    assert set(threading.enumerate()) > before
    samples.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before


def test_an_iterator_closed_while_its_store_is_away_leaves_no_request(tmp_path, monkeypatch):
    """Its build would else retry for minutes, and report that this process waits for data."""
    policy = RetryPolicy(10**9, longest_backoff_seconds=0.05, late_seconds=0.1)
    monkeypatch.setattr(RetryPolicy, "from_source", lambda config: policy)
    # A text this small would be in memory after the first sample.
    monkeypatch.setattr(RangeCache, "get", lambda _self, _file, _position, start, end, fetch: fetch(start, end))
    write_source(tmp_path / "text")
    with http_server(tmp_path / "text") as server, fault_proxy(server.url) as proxy:
        source = {"words": {"format": "jsonl", "paths": [f"{proxy.url}/"]}}
        samples = iter(dataset(tmp_path, data=source, epochs=None))
        next(samples)
        proxy.error_503_fraction = 1.0
        while not proxy.faults["answer"]:  # the build is a segment ahead of the reader
            next(samples)
            time.sleep(0.002)
        build = next(thread for thread in threading.enumerate() if thread.name.startswith("build "))
        samples.close()  # type: ignore[attr-defined]
        assert not build.is_alive()
        wait_until(lambda: waiting_for_data() is None, seconds=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "/somewhere/text"}, "cannot be inferred from its name"),
        ({"data": ["a.jsonl", "b.txt"]}, "different formats"),
        ({"rank": 2, "world_size": 2}, "Rank 2 is not in"),
        ({"weights": {"words": 1, "letters": 1}}, "differ in letters"),
        ({"shuffle_buffer_rows": 0}, "shuffle buffer of 0 rows"),
        ({"sequence_length_tokens": 0}, "sequence_length_tokens"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        dataset(tmp_path, **changes)


def peak_bytes(directory: Path, documents: int) -> int:
    place = directory / str(documents)
    write_source(place / "text", documents=documents)
    data = {"words": {"format": "jsonl", "paths": [str(place / "text")]}}
    stream = dataset(
        directory, data=data, cache_directory=place / "cache", unit_bytes=50_000, sequence_length_tokens=128,
        shuffle_buffer_rows=800, retention_bytes=1 << 20,
    )  # fmt: skip
    tracemalloc.start()
    try:
        assert sum(1 for _ in stream) > documents / 4
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """In a process of its own, because memory of all threads counts."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        # The first call has what is imported and remembered at the first use.
        _, small, large = process.map(peak_bytes, [tmp_path] * 3, [500, 4_000, 24_000])
    assert large < 1.5 * small
