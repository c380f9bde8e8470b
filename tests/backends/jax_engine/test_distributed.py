"""Which GPUs of a machine a rank uses."""

from __future__ import annotations

import pytest

from vorox.core.distributed_context import Membership
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.jax


def gpus(num_devices: int, num_listed: int, *, ranks: int = 2, machines: int = 1) -> list[tuple[int, ...] | None]:
    """The GPUs of each rank of the last machine."""
    from vorox.backends.jax_engine.distributed import local_gpus

    first = ranks * (machines - 1)
    members = [Membership("host:1", first + rank, ranks * machines, rank, ranks) for rank in range(ranks)]
    return [local_gpus(member, num_devices, num_listed) for member in members]


def test_ranks_of_a_machine_share_its_gpus() -> None:
    assert gpus(2, 0) == [(0,), (1,)]
    assert gpus(4, 0) == gpus(4, 4) == [(0, 1), (2, 3)]
    assert gpus(16, 0, ranks=4, machines=2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert gpus(8, 8, ranks=1) == [None], "the only rank of a machine uses all"
    assert gpus(1, 6, ranks=3) == [(0, 1), (2, 3), (4, 5)], "more are visible than the run needs at least"


def test_a_cluster_may_list_the_gpus_of_each_rank() -> None:
    assert gpus(4, 2) == [None, None]


def test_uneven_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="Cannot divide 3 visible GPUs evenly among the 2 ranks"):
        gpus(4, 3)
