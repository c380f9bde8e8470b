"""The torch view of a stream: one order for any number of workers, and states that resume anywhere."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tiny_streams import dataset
from vorox.core.errors import ConfigError

torch = pytest.importorskip("torch")
DataLoader, get_worker_info = torch.utils.data.DataLoader, torch.utils.data.get_worker_info


@pytest.fixture
def straight(tmp_path: Path) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in dataset(tmp_path)]


def loader(stream, workers: int, **options):
    return DataLoader(stream, num_workers=workers, multiprocessing_context="spawn" if workers else None, **options)


def test_batches_are_those_of_the_dataset(tmp_path, straight):
    stream = dataset(tmp_path).as_torch(batch_size=8)
    batches = list(loader(stream, 0, batch_size=8))
    assert [batch["input_ids"].tolist() for batch in batches] == [straight[at : at + 8] for at in range(0, 641, 8)]
    assert batches[0]["labels"].dtype == torch.int64
    samples = dataset(tmp_path, metadata=True).as_torch()
    first = next(iter(loader(samples, 0, batch_size=None)))
    assert json.loads(first["metadata"])["position"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_one_order_with_workers(workers, tmp_path, straight):
    """They are processes of their own, which share the directory and the work."""
    stream = dataset(tmp_path, cache_directory=tmp_path / "fresh").as_torch(batch_size=8)
    found = [batch["input_ids"].tolist() for batch in loader(stream, workers, batch_size=8)]
    whole = len(straight) // 8 - workers + 1  # the last turns may be short ones, of any worker
    assert found[:whole] == [straight[at : at + 8] for at in range(0, 8 * whole, 8)]
    assert sorted(itertools.chain(*found)) == sorted(straight)


def test_a_state_after_some_batches_fits_any_number_of_workers(tmp_path, straight):
    stream = dataset(tmp_path).as_torch(batch_size=4)
    state = stream.state_after(5 * 4)
    again = dataset(tmp_path)
    again.load_state_dict(state)
    batches = iter(loader(again.as_torch(batch_size=4), 0, batch_size=4))
    assert next(batches)["input_ids"].tolist() == straight[20:24]


def test_each_worker_goes_on_from_its_own_state(tmp_path, straight, monkeypatch):
    """As a stateful loader does it: a state per worker, taken behind some of its items."""

    class Info:
        num_workers = 3
        id = 0

    monkeypatch.setattr("vorox.data.dataset.torch_adapter.get_worker_info", lambda: Info)
    assert get_worker_info() is None
    for worker, taken in ((0, 5), (1, 8), (2, 0)):
        Info.id = worker
        own = [sample for at, sample in enumerate(straight) if at // 4 % 3 == worker]
        stream = dataset(tmp_path).as_torch(batch_size=4)
        items = iter(stream)
        assert [next(items)["input_ids"].tolist() for _ in range(taken)] == own[:taken]
        state = json.loads(json.dumps(stream.state_dict()))
        items.close()  # type: ignore[attr-defined]
        again = dataset(tmp_path).as_torch(batch_size=4)
        again.load_state_dict(state)
        assert [item["input_ids"].tolist() for item in again] == own[taken:]
    stream = dataset(tmp_path).as_torch(batch_size=4)
    stream.load_state_dict({**state, "taken": 3, "workers": 2})
    with pytest.raises(ConfigError, match="with 2 workers, there are 3"):
        next(iter(stream))
