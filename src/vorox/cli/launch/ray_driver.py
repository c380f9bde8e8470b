"""Train on a Ray cluster: one launcher on each machine, restarted together.

Runs as the driver of a Ray job. A placement group gives each machine's devices to one actor, which starts ``vorox
train`` as a process of its own and reports its exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from vorox.cli.launch.job import SAVED_EXIT_CODE
from vorox.cli.launch.rank_launcher import GRACE_SECONDS
from vorox.cli.launch.restarts import JOB_FINAL_EXIT_CODES
from vorox.core.errors import ConfigError, LostRankError
from vorox.core.platform.telemetry import disable_telemetry
from vorox.core.pluralize import pluralize
from vorox.core.processes.child_process import child_command
from vorox.core.processes.signals import end_with_parent
from vorox.core.ranks.distributed_context import COORDINATOR, NODE_COUNT, NODE_INDEX
from vorox.core.ranks.rank_secret import SECRET, new_secret

_POLL_SECONDS = 1.0
_LOST_EXIT_CODE = LostRankError.exit_code
"""Of a machine that Ray has lost."""


class _Machine:
    """An actor that runs the launcher of one machine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return ``host:port`` that rank 0 can listen at."""
        import ray  # optional

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the environment variables that are not set."""
        return [name for name in names if not os.environ.get(name)]

    def train(self, arguments: Sequence[str], variables: dict[str, str]) -> int:
        """Run the launcher to its end, and return its exit code."""
        self._process = subprocess.Popen(
            child_command("vorox", *arguments),
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        code = self._process.wait()
        return code if code >= 0 else _LOST_EXIT_CODE

    def stop(self) -> None:
        """Request a save and a stop."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the launcher and its ranks immediately; without effect after their end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def train_on_ray(
    arguments: Sequence[str],
    *,
    num_nodes: int,
    gpus_per_node: int,
    cpus_per_node: int,
    max_restarts: int,
    secrets: Sequence[str] = (),
) -> int:
    """Train, restart after crashes and lost machines, and return the exit code of the run.

    Args:
        arguments: The command of each machine, without ``vorox``.
        num_nodes: Number of machines.
        gpus_per_node: GPUs of each.
        cpus_per_node: CPUs of each.
        max_restarts: Restarts after crashes; restarts after a stop on request are not counted.
        secrets: Environment variables that every machine must have.
    """
    import ray  # optional

    disable_telemetry()
    if not ray.is_initialized():
        ray.init(address="auto")
    stop = _StopSignal()
    crashes = 0
    while True:
        code = _start(arguments, num_nodes, {"GPU": gpus_per_node, "CPU": cpus_per_node}, secrets, stop)
        if code == 0 or code in JOB_FINAL_EXIT_CODES or stop.is_requested:
            return code
        if code != SAVED_EXIT_CODE:
            crashes += 1
            if crashes > max_restarts:
                return code
        sys.stderr.write(f"Exit code {code}: starting again ({pluralize(crashes, 'crash', 'crashes')} so far).\n")


def _start(
    arguments: Sequence[str], num_nodes: int, resources: dict[str, int], secrets: Sequence[str], stop: _StopSignal
) -> int:
    """Start all machines once, and return the exit code of the run."""
    import ray  # optional
    from ray.exceptions import RayActorError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = {name: float(number) for name, number in resources.items() if number}
    group = placement_group([wanted] * num_nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())
        remote: Any = ray.remote(_Machine)
        machines = [
            remote.options(
                num_gpus=resources["GPU"], num_cpus=resources["CPU"], max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(num_nodes)
        ]  # fmt: skip
        try:
            for index, names in enumerate(ray.get([machine.missing.remote(list(secrets)) for machine in machines])):
                if names:
                    sys.stderr.write(f"Environment variables are not set on machine {index}: {', '.join(names)}\n")
                    return ConfigError.exit_code
            address = ray.get(machines[0].address.remote())
        except RayActorError:
            return _LOST_EXIT_CODE
        variables = {COORDINATOR: address, NODE_COUNT: str(num_nodes), SECRET: new_secret()}
        runs = [
            machine.train.remote(list(arguments), {**variables, NODE_INDEX: str(index)})
            for index, machine in enumerate(machines)
        ]
        code = _wait(machines, runs, stop)
        ray.wait([machine.kill.remote() for machine in machines], num_returns=num_nodes, timeout=GRACE_SECONDS)
        return code
    finally:
        remove_placement_group(group)  # also ends the actors


def _wait(machines: Sequence[Any], runs: Sequence[Any], stop: _StopSignal) -> int:
    """Wait for all machines and return the exit code of the run: that of a failure, else of a stop, else 0.

    After a failure, the other machines have a grace period: they may wait for a collective that cannot end.
    """
    import ray  # optional
    from ray.exceptions import RayActorError

    codes: list[int] = []
    pending, was_stopped, ends_at = list(runs), False, float("inf")
    while pending and time.monotonic() < ends_at:
        if stop.is_requested and not was_stopped:
            was_stopped = True
            for machine in machines:
                machine.stop.remote()
        done, pending = ray.wait(pending, timeout=_POLL_SECONDS)
        for one in done:
            try:
                codes.append(ray.get(one))
            except RayActorError:
                codes.append(_LOST_EXIT_CODE)
        if ends_at == float("inf") and _failures(codes):
            ends_at = time.monotonic() + GRACE_SECONDS
    return next(iter(_failures(codes)), max(codes, default=0))


def _failures(codes: Sequence[int]) -> list[int]:
    return [code for code in codes if code not in (0, SAVED_EXIT_CODE)]


class _StopSignal:
    """Records SIGTERM, as ``ray job stop`` sends it."""

    def __init__(self) -> None:
        self.is_requested = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.is_requested = True
