"""``--nproc``: several processes of one run on this machine, and one that starts them and waits.

The first process has the terminal; the others write their own logs into the run directory. Ctrl-C reaches all of them,
SIGTERM is passed on. When one fails, the others get a moment to notice by themselves, then they are ended; what the
first failure said is shown, and its exit code is the command's.
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

from vorox.core.distributed_context import COORDINATOR, COUNT, INDEX, membership
from vorox.core.errors import ConfigError, Preempted

GRACE_SECONDS = 30.0
_HERE = "127.0.0.1"
_POLL_SECONDS = 0.05
_SHOWN_BYTES = 4000
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``vorox ARGUMENTS`` in ``count`` processes that are one run.

    Returns:
        The exit code: that of the first one that failed, else 0.

    Raises:
        ConfigError: The devices that this process may see cannot be divided among them.
    """
    command = [sys.executable, "-m", "vorox", *arguments]
    environments = environments_of(count, _free_port(), os.environ)
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        children = [
            subprocess.Popen(
                command, env=environment, stdin=None if index == 0 else subprocess.DEVNULL,
                stdout=None if index == 0 else subprocess.DEVNULL, stderr=None if index == 0 else said[index - 1],
            )
            for index, environment in enumerate(environments)
        ]  # fmt: skip
        stack.enter_context(_passing_signals_on(children))
        return _wait(children, said)


def environments_of(count: int, port: int, base: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each process; visible GPUs that are listed are divided among them.

    Raises:
        ConfigError: They do not come out even.
    """
    visible = [device for device in base.get(_VISIBLE, "").split(",") if device.strip()]
    if len(visible) % count:
        raise ConfigError(
            f"{len(visible)} visible GPUs cannot be divided among {count} processes", where="--nproc",
            hint=f"choose a divisor of {len(visible)}, or list other GPUs in {_VISIBLE}",
        )  # fmt: skip
    share = len(visible) // count
    found: list[dict[str, str]] = []
    for index in range(count):
        place = {COORDINATOR: f"{_HERE}:{port}", COUNT: str(count), INDEX: str(index)}
        mine = {_VISIBLE: ",".join(visible[index * share : (index + 1) * share])} if share else {}
        found.append({**base, **place, **mine})
    return found


def nproc_option() -> str:
    """What makes a command start as many processes as this one's did; nothing for one process, or on a cluster."""
    place = membership()
    if place is None or not place.coordinator.startswith(f"{_HERE}:"):
        return ""
    return f" --nproc {place.process_count}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _passing_signals_on(children: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    def pass_on(number: int, _frame: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the terminal has told the children already
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], said: Sequence[IO[bytes]]) -> int:
    failed: int | None = None
    ends_at = float("inf")
    ends_well = {None, 0, Preempted.exit_code}  # the first process may still be writing the checkpoint
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
    if failed > 0 and children[0].returncode != code:  # the first process has not said the same already
        said[failed - 1].seek(0)
        sys.stderr.write(said[failed - 1].read()[-_SHOWN_BYTES:].decode(errors="replace"))
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"process {failed} of {len(children)} was ended by {name}; run the command again to go on\n")
    return code if code > 0 else 1
