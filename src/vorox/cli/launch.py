"""``--nproc``: a launcher that starts the ranks of a run on this machine and waits for them.

Rank 0 has the terminal; the others write their own logs into the run directory. Ctrl-C reaches all ranks, SIGTERM is
forwarded. When a rank fails, the others have a grace period to exit, then they are killed. The output of the first
failed rank is printed, and its exit code is that of the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from typing import IO

from vorox.core.distributed_context import (
    AGENT_STORE,
    COORDINATOR,
    COUNT,
    INDEX,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
    membership,
)
from vorox.core.errors import ConfigError, Preempted

GRACE_SECONDS = 30.0
_HERE = "127.0.0.1"
_POLL_SECONDS = 0.05
_SHOWN_BYTES = 4000
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``vorox ARGUMENTS`` as one run of ``count`` ranks.

    Returns:
        The exit code of the first rank that failed, else 0.

    Raises:
        ConfigError: The visible devices cannot be divided evenly among the ranks.
    """
    command = [sys.executable, "-m", "vorox", *arguments]
    environments = environments_of(count, _free_port(), os.environ)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        children = [
            subprocess.Popen(
                command, env=environment, stdin=None if index == 0 else subprocess.DEVNULL,
                stdout=None if index == 0 else subprocess.DEVNULL, stderr=None if index == 0 else outputs[index - 1],
            )
            for index, environment in enumerate(environments)
        ]  # fmt: skip
        stack.enter_context(_forward_signals(children))
        return _wait(children, outputs)


def environments_of(count: int, port: int, base: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each rank, with the variables of torchrun; visible GPUs, if listed, are divided.

    Raises:
        ConfigError: The GPUs cannot be divided evenly.
    """
    visible = [device for device in base.get(_VISIBLE, "").split(",") if device.strip()]
    if len(visible) % count:
        raise ConfigError(
            f"Cannot divide {len(visible)} visible GPUs evenly among {count} processes", where="--nproc",
            hint=f"choose a divisor of {len(visible)}, or list other GPUs in {_VISIBLE}",
        )  # fmt: skip
    share = len(visible) // count
    inherited = {name: value for name, value in base.items() if name not in {COORDINATOR, COUNT, INDEX, AGENT_STORE}}
    found: list[dict[str, str]] = []
    for index in range(count):
        member = {
            MASTER_ADDR: _HERE, MASTER_PORT: str(port), RANK: str(index), WORLD_SIZE: str(count),
            LOCAL_RANK: str(index), LOCAL_WORLD_SIZE: str(count),
        }  # fmt: skip
        visible_devices = {_VISIBLE: ",".join(visible[index * share : (index + 1) * share])} if share else {}
        found.append({**inherited, **member, **visible_devices})
    return found


def nproc_option() -> str:
    """Return the ``--nproc`` option that starts as many ranks as this run has; empty for one rank or on a cluster."""
    member = membership()
    if member is None or not member.coordinator.startswith(f"{_HERE}:"):
        return ""
    return f" --nproc {member.world_size}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _forward_signals(children: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    def forward(number: int, _frame: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the terminal signals the children itself
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], outputs: Sequence[IO[bytes]]) -> int:
    failed: int | None = None
    ends_at = float("inf")
    ends_well = {None, 0, Preempted.exit_code}  # rank 0 may still be writing the checkpoint
    while any(child.poll() is None for child in children):
        if failed is None:
            failed = next((index for index, child in enumerate(children) if child.poll() not in ends_well), None)
            ends_at = time.monotonic() + GRACE_SECONDS if failed is not None else ends_at
        if time.monotonic() > ends_at:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
    if failed is None:
        failed = next((index for index, child in enumerate(children) if child.returncode), None)
    if failed is None:
        return 0
    code = children[failed].returncode
    if failed > 0 and children[0].returncode != code:  # rank 0 has not printed the same error
        outputs[failed - 1].seek(0)
        sys.stderr.write(outputs[failed - 1].read()[-_SHOWN_BYTES:].decode(errors="replace"))
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(
            f"Rank {failed} of {len(children)} was killed by {name}. Run the same command again to resume.\n"
        )
    return code if code > 0 else 1
