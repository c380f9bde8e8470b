"""What ranks read in PyTorch's store while another one writes."""

from __future__ import annotations

import threading

import pytest

from vorox.core.ranks.distributed_context import SealedChannel
from vorox.core.ranks.rank_liveness import Liveness

pytestmark = pytest.mark.torch


def test_a_sign_of_life_is_there_while_it_is_renewed() -> None:
    """A sign that was removed before it was written again was read as empty, and its run ended as if it were forged."""
    import torch.distributed as dist

    from vorox.backends.torch_engine.ranks.store_channel import StoreChannel

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    channel = SealedChannel(StoreChannel(server))
    liveness, is_read = Liveness(channel, 0, 10.0), threading.Event()
    liveness.renew(0)

    def renew() -> None:
        count = 0
        while not is_read.is_set():
            liveness.renew(count := count + 1)

    writer = threading.Thread(target=renew)
    writer.start()
    try:
        signs = [channel.get("vorox/alive/0", 0.0) for _ in range(1000)]
    finally:
        is_read.set()
        writer.join()
    assert None not in signs
    assert len(set(signs)) > 10
