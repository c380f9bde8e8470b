"""Packed and shuffled training rows for a PyTorch ``DataLoader``, from a configuration or from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox import backends
from vorox.api.arguments import check_argument
from vorox.core.schema import RunConfig
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.dataset.dataset_config import Sources, Transforms
from vorox.data.dataset.iterable_dataset import RemoteIterableDataset

if TYPE_CHECKING:
    from vorox.data.dataset.torch_adapter import TorchStream


def dataset(
    data: RunConfig | Sources,
    *,
    batch_size: int = 1,
    state: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
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
    """Return a ``torch.utils.data.IterableDataset`` of packed rows that resumes at any row.

    The text is tokenized and packed while rows are read. The order of the rows does not depend on the number of
    ``DataLoader`` workers. Each row is a dictionary of int64 tensors ``[T]``: ``input_ids``, ``labels`` (-100 where the
    loss ignores a position) and, with a document mask, ``segment_ids`` and ``position_ids``.

    Args:
        data: A configuration returned by ``load_config``; or the location of the text: one path or URL (local,
            ``hf://``, ``s3://``, ``gs://``, ``az://``, ``https://``), a list of them, or a mapping of source names to
            locations or to settings of ``data.sources``.
        batch_size: Batch size of the ``DataLoader``: workers take turns of this many rows.
        state: State to resume from: ``state_after(num_rows)`` of an earlier dataset over the same data.
        tokenizer: Path of a ``tokenizer.json``, or ``byte``. Default: the configuration's.
        sequence_length_tokens: Positions of a row. Default: the configuration's, else 1,024.
        weights: Weight of each source by name. Default: the configuration's, else equal weights.
        transforms: Functions that filter or change documents, as in ``data.transforms``.
        seed: Seed of the order. Default: the configuration's.
        shuffle: Whether to shuffle rows. Default: the configuration's, else true.
        epochs: Number of passes over each source. ``None`` repeats indefinitely.
        metadata: Whether to add ``metadata`` to each row: JSON text that names its documents.
        rank: Rank of this process, which reads every ``world_size``-th row.
        world_size: Number of ranks.
        cache_directory: Directory of the built rows. Default: the configuration's.
        retention_bytes: Disk budget of the built rows. Default: the configuration's.
        on_progress: Called with the progress of data preparation.

    Raises:
        ConfigError: The arguments contradict each other, or PyTorch is not installed.
        DataError: ``state`` does not belong to this data.
    """
    check_argument("vorox.dataset", "data", data, (str, Path, Mapping, Sequence, RunConfig))
    for location in data if isinstance(data, Sequence) else ():
        check_argument("vorox.dataset", "a location", location, (str, Path))
    for name, number in (("batch_size", batch_size), ("world_size", world_size)):
        check_argument("vorox.dataset", name, number, (int,), least=1)
    check_argument("vorox.dataset", "rank", rank, (int,), least=0)
    check_argument("vorox.dataset", "epochs", epochs, (int, type(None)), least=1)
    check_argument("vorox.dataset", "weights", weights, (Mapping, type(None)))
    check_argument("vorox.dataset", "transforms", transforms, (list, tuple, type(None)))
    check_argument("vorox.dataset", "state", state, (Mapping, type(None)))
    check_argument("vorox.dataset", "tokenizer", tokenizer, (str, Path, type(None)))
    check_argument("vorox.dataset", "cache_directory", cache_directory, (str, Path, type(None)))
    backends.check_installed("torch")
    rows = RemoteIterableDataset(
        data, tokenizer=None if tokenizer is None else str(tokenizer), sequence_length_tokens=sequence_length_tokens,
        weights=weights, transforms=transforms, seed=seed, shuffle=shuffle, epochs=epochs, metadata=metadata,
        rank=rank, world_size=world_size, cache_directory=cache_directory, retention_bytes=retention_bytes,
        on_progress=on_progress,
    )  # fmt: skip
    if state is not None:
        rows.load_state_dict(state)
    return rows.as_torch(batch_size=batch_size)
