"""A rank whose peer ends while they connect: no cluster stops it, so it stops itself, after the start timeout."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest

from vorox.core.errors import StalledError
from vorox.core.ranks.distributed_context import Membership

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("joins_store", [False, True], ids=["before the store", "after the store"])
def test_a_peer_that_ended_is_waited_for_as_long_as_configured(joins_store: bool) -> None:
    import torch.distributed as dist

    from vorox.backends.torch_engine.ranks import distributed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if joins_store:
        join = threading.Thread(
            target=lambda: dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=30)), daemon=True
        )
        join.start()
    started = time.monotonic()
    with pytest.raises(StalledError, match="did not connect within 1 s"):
        distributed._joined.__wrapped__(Membership(f"127.0.0.1:{port}", 0, 2, 0, 1), timedelta(seconds=1))
    assert time.monotonic() - started < 30
    assert not dist.is_initialized()
