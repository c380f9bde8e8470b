"""Streaming: caches whose chunks are built and evicted while they are read, and a dataset over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vorox.data.streaming.iterable_dataset import RemoteIterableDataset

__all__ = ["RemoteIterableDataset"]


def __getattr__(name: str) -> Any:
    """Import the dataset lazily: it imports ``data.corpus``, which imports modules of this package."""
    if name != "RemoteIterableDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vorox.data.streaming.iterable_dataset import RemoteIterableDataset

    return RemoteIterableDataset
