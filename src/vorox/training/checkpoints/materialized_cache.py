"""The state after a step of a run, on disk: a kept checkpoint, or a materialised one from the cache.

In: a run and a step. Out: the directory of the state. ``training/materialize.py`` computes what is not there. The cache
has one folder per run, below the root of the run's data caches: it needs no write permission in the run, and may be
deleted together with them. What lies there is used only if the run still records this step as it was computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from pathlib import Path

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic, staged_directory
from vorox.core.run_layout import RunLayout, parse_checkpoint_name, step_directories
from vorox.data.corpus.cache_location import cache_root
from vorox.records.replay_chain import examine_chain, read_states
from vorox.records.run_context import read_config
from vorox.records.run_lookup import find_run, run_argument, split_step
from vorox.records.step_environments import StepEnvironments
from vorox.training.checkpoints.store import Checkpoint, verify

_FOLDER = "materialized"
"""Below the root of the caches."""


class StateNotOnDiskError(ConfigError):
    """A state that no checkpoint was kept of is needed, and its steps have to be computed first.

    Args:
        run_directory: The run.
        step: The step.
    """

    def __init__(self, run_directory: Path, step: int) -> None:
        count = StepEnvironments.of_run(run_directory).num_processes(max(1, step)) or 1
        ranks = "" if count == 1 else f", and {count} processes have to compute it"
        super().__init__(
            f"State after step {step:,} of run {run_directory.name} is not on disk{ranks}",
            where=f"{run_directory}@{step}", saved="nothing was written",
            hint=f"compute it with `{_command(run_directory, step, count)}`, and run this command again",
        )  # fmt: skip
        self.run_directory, self.step = run_directory, step


def _command(run_directory: Path, step: int, num_processes: int) -> str:
    nproc = "" if num_processes == 1 else f" --nproc {num_processes}"
    place = shlex.quote(str(folder(run_directory)))
    return f"vorox checkpoints materialize {run_argument(run_directory)} --step {step}{nproc} --to {place}"


def folder(run_directory: Path) -> Path:
    """Return the folder of the materialised states of a run."""
    home = run_directory.resolve()
    place = hashlib.blake2b(os.fsencode(home), digest_size=4).hexdigest()
    return cache_root(read_config(run_directory).data) / _FOLDER / f"{home.name}-{place}"


def find_state(run_directory: Path, step: int) -> Path | None:
    """Return the directory of the state after a step, not verified; ``None`` if it has to be computed."""
    return step_directories(run_directory).get(step) or _cached(run_directory, step)


def verified_state(run_directory: Path, step: int) -> Checkpoint | None:
    """Return the state after a step from the cache, every byte verified; ``None`` if it has to be computed.

    Raises:
        UnreadableCheckpointError: The disk fails to read it.
    """
    path = _cached(run_directory, step)
    if path is None:
        return None
    found = verify(path)
    with contextlib.suppress(OSError):
        os.utime(path)  # its last use
    return found


def named_state(name: str, runs_directory: str) -> Path | None:
    """Return the directory of the state that ``RUN@STEP`` names; ``None`` for any other name.

    Raises:
        ConfigError: There is no such run.
        StateNotOnDiskError: The state has to be computed first.
    """
    run, step = split_step(runs_directory, name)
    if step is None:
        return None
    directory = find_run(runs_directory, run).absolute()
    path = find_state(directory, step)
    if path is None:
        raise StateNotOnDiskError(directory, step)
    return path


def lasting_state(name: str, runs_directory: str, key: str) -> Path | None:
    """Return the kept checkpoint that ``RUN@STEP`` names; ``None`` for any other name.

    Raises:
        ConfigError: The run keeps none; what another run needs at every start is not left to the cache.
    """
    run, step = split_step(runs_directory, name)
    if step is None:
        return None
    directory = find_run(runs_directory, run).absolute()
    kept = step_directories(directory).get(step)
    if kept is None:
        command = f"vorox checkpoints materialize {run_argument(directory)} --step {step} --to DIR"
        raise ConfigError(
            f"The run keeps no checkpoint of step {step:,}, and a base must stay where it is", where=key,
            hint=f"write it to a place of yours with `{command}`, and name that checkpoint instead",
            saved="nothing was written",
        )  # fmt: skip
    return kept


def absolute_name(name: str, runs_directory: str) -> str:
    """Return ``RUN@STEP`` with the absolute path of the run; any other name as it is."""
    run, step = split_step(runs_directory, name)
    return name if step is None else f"{find_run(runs_directory, run).absolute()}@{step}"


def _cached(run_directory: Path, step: int) -> Path | None:
    path = folder(run_directory) / RunLayout(run_directory).checkpoint(step).name
    if not staged_directory.has_manifest(path):
        return None
    try:
        metadata = Checkpoint.read(path).metadata
    except CheckpointError:
        return None
    chain = examine_chain(run_directory)
    entry = chain.entries.get(step)
    if step and (entry is None or step in chain.changed or entry.chain != metadata.get("chain")):
        return None  # the run was resumed from an earlier step, and computed this one again
    recorded = read_states(run_directory).get(step)
    if recorded is not None and recorded.chain == metadata.get("chain"):
        return path if recorded.fingerprint == metadata.get("fingerprint") else None
    return path


def remove_state(path: Path) -> None:
    """Remove a state from the cache, or what is there in its place; a reader never finds a part of it."""
    if os.path.lexists(path):
        atomic.remove_directory(staged_directory.hide(path))


def remove_old_states(directory: Path, keep: int) -> None:
    """Remove all states of a folder but those that were used last."""
    found = [path for path in directory.iterdir() if parse_checkpoint_name(path.name) and path.is_dir()]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))[:-keep]:
        remove_state(path)
