"""``--nproc`` and ``--max-restarts``: start the ranks of a run on this machine.

Rank 0 has the terminal; the others write their own logs into the run directory. Ctrl-C reaches all ranks; SIGTERM and
SIGHUP are forwarded; on Linux the ranks get SIGTERM when the launcher is killed, so none trains on without it. When a
rank fails, the others have a grace period to exit, then they are killed. The output of the first failed rank is
printed, and the command exits with its code, unless the ranks start again (``cli/launch/restarts.py``).

With ``VOROX_NODE_COUNT`` and ``VOROX_NODE_INDEX``, the ranks are part of a run on several machines, each with its own
launcher. Unlike torchrun, the launcher keeps exit codes, and waits for a save after SIGTERM.
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
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from vorox.cli.launch.restarts import FINAL_EXIT_CODES, Restarts
from vorox.core.errors import ConfigError, LostRankError, Preempted
from vorox.core.processes.child_process import child_command
from vorox.core.processes.signals import end_with_parent, stop_signals
from vorox.core.ranks.distributed_context import (
    AGENT_STORE,
    COORDINATOR,
    COUNT,
    INDEX,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    NODE_COUNT,
    NODE_INDEX,
    RANK,
    WORLD_SIZE,
    Node,
    membership,
    node_membership,
)
from vorox.core.ranks.rank_secret import SECRET, new_secret
from vorox.core.user_code.trusted_code import given_flag

GRACE_SECONDS = 30.0
_ENDS_WELL = frozenset({0, Preempted.exit_code})
"""After either, other ranks may still be writing the checkpoint."""
_HERE = "127.0.0.1"
_POLL_SECONDS = 0.05
_STDERR = 2
"""The descriptor of standard error."""
_SHOWN_BYTES = 4000
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the ranks ended: the exit code of the command, and a line about a rank that was killed."""

    exit_code: int
    text: str = ""


def launch_ranks(
    count: int,
    arguments: Sequence[str],
    restarts: Restarts | None = None,
    *,
    advice: str = "Run the same command again to resume.",
    is_quiet: bool = False,
) -> int:
    """Run ``vorox ARGUMENTS`` with ``count`` ranks on this machine.

    Rank 0 has this process's standard output, or its standard error within ``printing_to_stderr``.

    Args:
        count: Number of ranks on this machine.
        arguments: The command line, without the program's name.
        restarts: Restarts after a failure; default: none.
        advice: What to do after a rank was killed.
        is_quiet: Discard the standard output of rank 0.

    Returns:
        The exit code of the first rank that failed in the last start, else 0.

    Raises:
        ConfigError: The visible devices cannot be divided evenly among the ranks.
        StalledError: The restarts made no progress.
    """
    with _Signals() as signals:
        while True:
            ending = _run_ranks(count, arguments, signals, subprocess.DEVNULL if is_quiet else None)
            ends_well = ending.exit_code in _ENDS_WELL or signals.received is not None
            is_final = ends_well or ending.exit_code in FINAL_EXIT_CODES
            following = None if restarts is None or is_final else restarts.after_failure(ending.text)
            if following is None:
                if ending.text:
                    sys.stderr.write(f"{ending.text}. {advice}\n")
                return ending.exit_code
            arguments = following


def _run_ranks(count: int, arguments: Sequence[str], signals: _Signals, output: int | None) -> _Ending:
    if output is None and sys.stdout is sys.stderr:
        output = _STDERR
    command = child_command("vorox", *given_flag(), *arguments)
    node = node_membership(os.environ) or Node(_HERE, _free_port(), 0, 1)
    environments = environments_of(count, node, os.environ)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        children = [
            subprocess.Popen(
                command, env=environment, stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=output if rank == 0 else subprocess.DEVNULL, stderr=None if rank == 0 else outputs[rank - 1],
                preexec_fn=end_with_parent(),
            )
            for rank, environment in enumerate(environments)
        ]  # fmt: skip
        stack.enter_context(signals.forwarding(children))
        return _wait(children, outputs, signals, node)


def is_launcher(count: int, max_restarts: int) -> bool:
    """Whether the command starts ranks: several, restartable ones, or those of one machine of several.

    Raises:
        ConfigError: Restarts are requested on several machines, which cannot restart together.
    """
    is_one_of_several = node_membership(os.environ) is not None
    if is_one_of_several and max_restarts:
        raise ConfigError(
            "The ranks of several machines are not restarted by one of them", where="--max-restarts",
            hint="remove --max-restarts, and let the scheduler restart the job, as in `vorox launch`",
        )  # fmt: skip
    return count > 1 or max_restarts > 0 or is_one_of_several


def environments_of(count: int, node: Node, base: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each rank, with the variables of torchrun; the engines choose devices by local rank.

    Args:
        count: Number of ranks on each machine.
        node: This machine.
        base: The environment of the launcher.

    Raises:
        ConfigError: The listed GPUs cannot be divided evenly.
    """
    visible = [device for device in base.get(_VISIBLE, "").split(",") if device.strip()]
    if len(visible) % count:
        raise ConfigError(
            f"Cannot divide {len(visible)} visible GPUs evenly among {count} processes", where="--nproc",
            hint=f"choose a divisor of {len(visible)}, or list other GPUs in {_VISIBLE}",
        )  # fmt: skip
    replaced = {COORDINATOR, COUNT, INDEX, NODE_COUNT, NODE_INDEX, AGENT_STORE}
    inherited = {name: value for name, value in base.items() if name not in replaced}
    if node.count == 1:
        inherited.setdefault(SECRET, new_secret())
    found: list[dict[str, str]] = []
    for index in range(count):
        member = {
            MASTER_ADDR: node.host, MASTER_PORT: str(node.port), RANK: str(node.index * count + index),
            WORLD_SIZE: str(node.count * count), LOCAL_RANK: str(index), LOCAL_WORLD_SIZE: str(count),
        }  # fmt: skip
        found.append({**inherited, **member})
    return found


def is_main_rank() -> bool:
    """Whether this process prints and records: rank 0, a single process, or the launcher on rank 0's machine."""
    if os.environ.get(NODE_COUNT) or os.environ.get(NODE_INDEX):
        node = node_membership(os.environ)
        return node is None or node.index == 0
    member = membership()
    return member is None or member.rank in (None, 0)


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


class _Signals:
    """Handles the signals that stop the launcher inside its context.

    Attributes:
        received: The first signal; ``None`` if there was none.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._children: Sequence[subprocess.Popen[bytes]] = ()
        self._previous: dict[int, Any] = {}

    def _on_signal(self, number: int, _frame: object) -> None:
        self.received = self.received or number
        if number != signal.SIGINT:  # the terminal sends SIGINT to the ranks itself
            self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    @contextlib.contextmanager
    def forwarding(self, children: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
        """Forward signals to the ranks inside the block, also one that arrived before they were started."""
        self._children = children
        if self.received not in {None, signal.SIGINT}:
            self._send(signal.SIGTERM)
        try:
            yield
        finally:
            self._children = ()

    def __enter__(self) -> _Signals:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _wait(
    children: Sequence[subprocess.Popen[bytes]], outputs: Sequence[IO[bytes]], signals: _Signals, node: Node
) -> _Ending:
    failed: int | None = None
    ends_at = float("inf")
    while any(child.poll() is None for child in children):
        if failed is None:
            failed = _first_failed(children)
            ends_at = time.monotonic() + GRACE_SECONDS if failed is not None else ends_at
        if time.monotonic() > ends_at:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
    failed = _first_failed(children) if failed is None else failed
    if failed is None:
        return _Ending(next((child.returncode for child in children if child.returncode), 0))
    code = children[failed].returncode
    if failed > 0 and children[0].returncode != code:  # rank 0 has not printed the same error
        outputs[failed - 1].seek(0)
        sys.stderr.write(outputs[failed - 1].read()[-_SHOWN_BYTES:].decode(errors="replace"))
    if code > 0:
        return _Ending(code)
    if -code == signals.received:  # it got the signal before it could handle it
        return _Ending(Preempted.exit_code)
    rank, world_size = node.index * len(children) + failed, node.count * len(children)
    return _Ending(LostRankError.exit_code, f"Rank {rank} of {world_size} was killed by {signal.Signals(-code).name}")


def _first_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed; if several did, a killed one: the others may have lost their connection to it."""
    codes = {rank: child.poll() for rank, child in enumerate(children)}
    failed = [rank for rank, code in codes.items() if code is not None and code not in _ENDS_WELL]
    return next((rank for rank in failed if codes[rank] == -signal.SIGKILL), next(iter(failed), None))
