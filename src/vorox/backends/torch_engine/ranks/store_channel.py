"""Host-side communication between ranks over a store of PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class StoreChannel:
    """``core.ranks.distributed_context.Channel`` over a store of PyTorch.

    A client of the store serves one call at a time, so every thread has its own.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clients = threading.local()

    @property
    def _client(self) -> Store:
        if not hasattr(self._clients, "store"):
            self._clients.store = cast("Any", self._store).clone()  # missing in the type stubs
        return cast("Store", self._clients.store)

    def put(self, key: str, value: bytes) -> None:
        self._client.set(key, value.decode())

    replace = put

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        client = self._client
        try:
            if timeout_seconds <= 0:
                return client.get(key) if client.check([key]) else None
            client.wait([key], timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return None
        return client.get(key)

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        client, keys = self._client, [f"{folder}/{name}" for name in names]
        try:
            if timeout_seconds <= 0:
                return client.multi_get(keys) if client.check(keys) else None
            client.wait(keys, timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return None
        return client.multi_get(keys)

    def remove(self, key: str) -> None:
        self._client.delete_key(key)
