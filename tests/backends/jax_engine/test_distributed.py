"""Which GPUs of a machine a rank uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import Membership

pytestmark = pytest.mark.jax


def gpus(num_devices: int, num_listed: int, *, ranks: int = 2, machines: int = 1) -> list[tuple[int, ...] | None]:
    """The GPUs of each rank of the last machine."""
    from vorox.backends.jax_engine.ranks.distributed import local_gpus

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


STORE = """
import socket, threading, time
import jax
from jax._src import distributed
from vorox.backends.jax_engine.ranks.distributed import _KeyValueStore

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
store = _KeyValueStore(distributed.global_state.client)
for name in ("2", "1"):
    store.put(f"vorox/step/1/{name}", name.encode())
assert store.get_all("vorox/step/1", ["1", "2"], 1.0) == [b"1", b"2"]
assert store.get_all("vorox/step/1", ["1", "2", "3"], 0.2) is None
threading.Timer(0.3, store.put, ("vorox/step/1/3", b"3")).start()
assert store.get_all("vorox/step/1", ["1", "2", "3"], 30.0) == [b"1", b"2", b"3"]
store.remove("vorox/step/1/2")
store.remove("vorox/step/0/absent")
assert store.get_all("vorox/step/1", ["1", "2"], 0.2) is None
assert store.get_all("vorox/step/1", ["3"], 0.2) == [b"3"]
for sign in (b"1", b"2"):
    store.replace("vorox/alive/0", sign)
    assert store.get("vorox/alive/0", 0.0) == sign
"""


def test_reports_of_several_ranks_are_read_together() -> None:
    """In a process of its own, because JAX joins one process group."""
    done = subprocess.run([sys.executable, "-c", STORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
