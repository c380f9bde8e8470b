"""What the ranks of one machine listen on: loopback, and nothing else, from their start to their last step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ranks.processes import PATIENCE_SECONDS, environment
from tiny_runs import configuration
from vorox.core.ranks.rendezvous import is_loopback

pytestmark = pytest.mark.slow


def listening(process: psutil.Process) -> set[str]:
    """The local addresses on which a process and its children accept connections or datagrams."""
    found: set[str] = set()
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found |= {
                    connection.laddr.ip
                    for connection in one.net_connections(kind="inet")
                    if connection.status == psutil.CONN_LISTEN or (connection.laddr and not connection.raddr)
                }
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["parallel.data_parallel_size=2"], id="torch", marks=pytest.mark.torch),
        pytest.param(["parallel.fsdp_size=2"], id="torch fsdp", marks=pytest.mark.torch),
        pytest.param(["parallel.data_parallel_size=2", "backend=jax"], id="jax", marks=pytest.mark.jax),
    ],
)
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path, settings: list[str]) -> None:
    configuration(tmp_path)
    command = [
        sys.executable, "-m", "vorox", "train", "tiny.yaml", "train.global_batch_sequences=8", "log.matmul_peak=false",
        "runtime.num_threads=null", "train.num_steps=6", *settings, "--nproc", "2",
    ]  # fmt: skip
    found: set[str] = set()
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        watched = psutil.Process(launcher.pid)
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while launcher.poll() is None:
            found |= listening(watched)
            assert time.monotonic() < ends_at
            time.sleep(0.02)
        assert launcher.stdout is not None
        output = launcher.stdout.read()
    assert launcher.returncode == 0, output
    assert found, "the ranks have a store"
    assert all(is_loopback(address.removeprefix("::ffff:")) for address in found), found
