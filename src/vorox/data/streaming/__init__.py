"""Training on text while it arrives: a cache whose chunk files come and go, and a dataset over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vorox.data.streaming.iterable_dataset import RemoteIterableDataset

__all__ = ["RemoteIterableDataset"]


def __getattr__(name: str) -> Any:
    """The dataset stands on ``data.corpus``, which stands on modules of this package."""
    if name != "RemoteIterableDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vorox.data.streaming.iterable_dataset import RemoteIterableDataset

    return RemoteIterableDataset
