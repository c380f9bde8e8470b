"""Training rows for a PyTorch ``DataLoader``: the text of a configuration or of some files, packed and shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox import backends
from vorox.core.schema import RunConfig
from vorox.data.corpus import PrepareProgress
from vorox.data.streaming import RemoteIterableDataset
from vorox.data.streaming.dataset_config import Sources, Transforms

if TYPE_CHECKING:
    from vorox.data.streaming.torch_adapter import TorchStream


def dataset(
    data: RunConfig | Sources,
    *,
    batch_size: int = 1,
    state: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    sequence_length_tokens: int | None = None,
    weights: Mapping[str, float | str] | None = None,
    transforms: Transforms | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    epochs: int | None = None,
    metadata: bool = False,
    rank: int = 0,
    world_size: int = 1,
    cache_directory: str | Path | None = None,
    retention_bytes: int | None = None,
    on_progress: PrepareProgress | None = None,
) -> TorchStream:
    """Return a ``torch.utils.data.IterableDataset`` of packed rows, resumable at any row.

    Rows are built while they are read and come in one order with any number of ``DataLoader`` workers. Each is a
    dictionary of int64 tensors ``[T]``: ``input_ids``, ``labels`` (-100 where nothing is predicted), and under a
    document mask ``segment_ids`` and ``position_ids``.

    Args:
        data: A configuration of ``load_config``; or where the text is: a path or address (local, ``hf://``, ``s3://``,
            ``gs://``, ``https://``), several, or a mapping of source names to addresses or to settings of
            ``data.sources``.
        batch_size: That of the ``DataLoader``; workers take turns of this many rows.
        state: Where to continue: ``state_after(num_rows)`` of an earlier dataset on the same data.
        tokenizer: Path of a ``tokenizer.json``, or ``byte``. ``None``: that of the configuration.
        sequence_length_tokens: Positions of a row. ``None``: those of the configuration, else 1,024.
        weights: Share of each source by name. ``None``: those of the configuration, else equal shares.
        transforms: Functions that filter or change documents, as in ``data.transforms``.
        seed: Seed of the order. ``None``: that of the configuration.
        shuffle: Whether rows are shuffled. ``None``: as the configuration says, else yes.
        epochs: Passes over each source. ``None``: never end.
        metadata: Adds ``metadata`` to each row: a JSON text that names its documents.
        rank: This process's rank; it gets every ``world_size``-th row.
        world_size: Number of processes.
        cache_directory: Where built rows are kept. ``None``: as the configuration says.
        retention_bytes: Disk space that they may take. ``None``: as the configuration says.
        on_progress: Is given the progress of preparing the data.

    Raises:
        ConfigError: The arguments contradict each other, or PyTorch is not installed.
        DataError: ``state`` is not a state of this data.
    """
    backends.check_installed("torch")
    found = RemoteIterableDataset(
        data, tokenizer=tokenizer, sequence_length_tokens=sequence_length_tokens, weights=weights,
        transforms=transforms, seed=seed, shuffle=shuffle, epochs=epochs, metadata=metadata, rank=rank,
        world_size=world_size, cache_directory=cache_directory, retention_bytes=retention_bytes,
        on_progress=on_progress,
    )  # fmt: skip
    if state is not None:
        found.load_state_dict(state)
    return found.as_torch(batch_size=batch_size)
