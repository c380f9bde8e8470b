"""``RemoteIterableDataset`` as a ``torch.utils.data.IterableDataset``.

The only module of ``data/`` that imports torch. Samples become dictionaries of int64 tensors, which the default collate
function stacks; ``metadata`` becomes JSON text. The workers of a ``DataLoader`` take turns. Invariant: a loader yields
the items of the dataset in the same order, for any number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vorox.core.errors import ConfigError, DataError
from vorox.data.dataset.sample_reader import Sample, SampleStream, Share

_STATE_VERSION = 1

if TYPE_CHECKING:
    _Base = IterableDataset[dict[str, Any]]
else:
    _Base = IterableDataset


class TorchStream(_Base):
    """A ``RemoteIterableDataset`` for a ``DataLoader``, created by ``as_torch``.

    Iteration starts from the state that the dataset has loaded. In a worker, ``state_dict`` returns the state of that
    worker, for loaders that collect worker states; ``state_after`` returns the state of all workers together, from
    which any number of workers can resume.

    Args:
        dataset: The dataset to read.
        batch_size: Samples that a worker reads per turn.
    """

    def __init__(self, dataset: SampleStream, *, batch_size: int = 1) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} is too small", where="as_torch")
        self.dataset, self.batch_size = dataset, batch_size
        self._taken, self._workers = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._taken and self._workers != workers:
            raise ConfigError(
                f"The state was saved with {self._workers} workers, there are {workers}", where="DataLoader",
                hint="keep the number of workers, or resume from state_after, which fits any number",
            )  # fmt: skip
        self._workers = workers
        dataset = self.dataset
        start = int(dataset.start_state["position"]) + dataset.rank
        share = Share(worker, workers, self.batch_size, dataset.world_size, self._taken)
        for _, sample in dataset.samples(start, share):
            self._taken += 1
            yield _tensors(sample)
        self._taken = 0

    def state_after(self, num_samples: int) -> dict[str, Any]:
        """Return the state of the dataset after ``num_samples`` samples of the loader."""
        start = self.dataset.start_state
        return {**start, "position": start["position"] + num_samples * self.dataset.world_size, "order": ""}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker, or of the whole dataset if the loader has no workers."""
        return {"v": _STATE_VERSION, "taken": self._taken, "workers": self._workers, "start": self.dataset.start_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iterator from a state returned by ``state_dict``.

        Raises:
            DataError: The state is invalid.
        """
        start = state.get("start")
        if state.get("v") != _STATE_VERSION or not isinstance(start, Mapping):
            raise DataError(f"Not a state of a TorchStream: {dict(state)}")
        self.dataset.load_state_dict({str(key): value for key, value in start.items()})  # pyright: ignore
        self._taken, self._workers = int(state["taken"]), int(state["workers"])


def _tensors(sample: Sample) -> dict[str, Any]:
    return {
        name: json.dumps(value) if name == "metadata" else torch.as_tensor(value, dtype=torch.int64)
        for name, value in sample.items()
    }
