"""Checkpoints on disk: reading, verifying and choosing them, and setting corrupt ones aside.

``checkpoints/step-00001000`` holds what the engine wrote, ``state.json`` (progress, horizon) and, where transformers
knows the architecture, what makes the directory a Hugging Face model. ``checkpoint_writer`` writes it: whole or
not at all, with a hash of every byte. "Latest" is the highest step that verifies, never a clock or a pointer file. A
corrupt one is renamed, never deleted, and the one before it is taken, loudly. A disk that does not deliver a file says
nothing about it: that ends the command, and nothing is renamed. A checkpoint that is a symbolic link is read, but
nothing is ever written or removed behind the link.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vorox.core import atomic, staged_directory
from vorox.core.batch import Progress
from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.log import RunLog
from vorox.core.run_layout import RunLayout, parse_checkpoint_name
from vorox.core.run_lookup import refuse_links
from vorox.core.schema import CheckpointConfig
from vorox.training.schedule import Horizon

STATE_NAME = "state.json"
STATE_FORMAT = "vorox-state/1"
REASON_NAME = "REASON.txt"
_SAVED = "saved"


class Checkpoint(NamedTuple):
    """A committed checkpoint and the metadata of its manifest."""

    path: Path
    metadata: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds besides the engine's state.

    Attributes:
        progress: How far the run is.
        horizon: The length of the run as fixed at its start.
        nonfinite_in_a_row: Steps up to this one whose loss or gradient was not finite.
    """

    progress: Progress
    horizon: Horizon
    nonfinite_in_a_row: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunState:
        progress, length = Progress.from_json(value["progress"]), Horizon.from_json(value["horizon"])
        return cls(progress, length, int(value["nonfinite_in_a_row"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "progress": self.progress.to_json(),
            "horizon": self.horizon.to_json(),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }


@contextlib.contextmanager
def reading(path: Path) -> Generator[None]:
    """While inside, a disk that does not deliver is an error that is no verdict about the checkpoint.

    Raises:
        UnreadableCheckpointError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise staged_directory.unreadable(error, path) from error


def read_state(checkpoint: Path) -> RunState:
    """The state of a verified checkpoint.

    Raises:
        CheckpointError: It was written by another version of Vorox, or cannot be read.
    """
    path = checkpoint / STATE_NAME
    with reading(path):
        value = json.loads(path.read_bytes())
    if value.get("format") != STATE_FORMAT:
        raise CheckpointError(f"the state has format {value.get('format')}, not {STATE_FORMAT}", where=str(path))
    return RunState.from_json(value)


def step_directories(run_directory: Path) -> dict[int, Path]:
    """Every directory that has a checkpoint's name, by step, whatever state it is in.

    Raises:
        UnreadableCheckpointError: The directory of the checkpoints cannot be listed.
    """
    found = ((parse_checkpoint_name(path.name), path) for path in _listed(run_directory))
    return dict(sorted((name.step, path) for name, path in found if name and not name.status))


def _listed(run_directory: Path) -> list[Path]:
    """The directories among the checkpoints, links to one included, by name."""
    parent = RunLayout(run_directory).checkpoints
    with reading(parent):
        try:
            names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
        except FileNotFoundError:  # no other error means that there is none
            names = []
    return [parent / name for name in sorted(names)]


def verify(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint.

    Raises:
        CheckpointError: Anything is missing or changed, or it lies under another step's name.
        UnreadableCheckpointError: The disk did not deliver a file.
    """
    with reading(path):
        checkpoint = Checkpoint(path, staged_directory.verify_directory(path))
    name = parse_checkpoint_name(path.name)
    if name and not name.status and checkpoint.metadata.get("step") != name.step:
        raise CheckpointError(f"this is the checkpoint of step {checkpoint.metadata.get('step')}", where=str(path))
    return checkpoint


def latest_valid(
    run_directory: Path,
    *,
    at_or_before: int | None = None,
    on_corrupt: Callable[[Path, CheckpointError], None] | None = None,
) -> Checkpoint | None:
    """The checkpoint of the highest step that verifies; ``None`` if the run never made one.

    Args:
        run_directory: The run.
        at_or_before: Consider only steps up to this one.
        on_corrupt: Told of every corrupt one that is passed over. Whoever owns the run puts it aside (``quarantine``).

    Raises:
        CheckpointError: There are checkpoints but none is valid.
        UnreadableCheckpointError: The disk did not deliver one. An older one is no answer to that.
    """
    directories = step_directories(run_directory)
    failures: list[CheckpointError] = []
    for step in sorted(directories, reverse=True):
        if at_or_before is not None and step > at_or_before:
            continue
        try:
            return verify(directories[step])
        except UnreadableCheckpointError:
            raise
        except CheckpointError as error:
            failures.append(error)
            if on_corrupt is not None:
                on_corrupt(directories[step], error)
    if failures or (at_or_before is None and _corrupt_before(run_directory)):
        raise CheckpointError(
            "no checkpoint of this run is valid: " + ("; ".join(map(str, failures)) or "all were put aside"),
            where=str(RunLayout(run_directory).checkpoints),
            hint=f"`vorox checkpoints verify {run_directory.name} --restore` takes back what reads whole; else restore "
            "one from a copy, or start again with --resume never",
        )
    return None


def _corrupt_before(run_directory: Path) -> bool:
    return bool(set_aside_as_corrupt(run_directory))


def set_aside_as_corrupt(run_directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints that were set aside as corrupt, with their steps."""
    found = ((parse_checkpoint_name(path.name), path) for path in _listed(run_directory))
    return [(name.step, path) for name, path in found if name and name.status == "corrupt"]


def set_aside(path: Path, why: str, note: str) -> Path:
    """Rename a checkpoint so that nobody takes it, and leave a note in it; ``why`` is ``corrupt`` or ``replaced``.

    Of a symbolic link, the link is renamed, and nothing is written behind it.
    """
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.{why}-{number}")):
        number += 1
    atomic.rename(path, target)
    if not target.is_symlink():
        with contextlib.suppress(OSError):  # the note is a courtesy; the disk may be the reason
            atomic.write_file(target / REASON_NAME, (note + "\n").encode())
    return target


def quarantine(log: RunLog) -> Callable[[Path, CheckpointError], None]:
    """For ``latest_valid``: put corrupt checkpoints aside and say so."""

    def put_aside(path: Path, error: CheckpointError) -> None:
        target = set_aside(path, "corrupt", str(error))
        log.event(
            "checkpoint_corrupt",
            f"checkpoint {path.name} is corrupt, renamed to {target.name} ({error}); falling back to the one before",
            level="warning",
            renamed_to=str(target),
            reason=str(error),
        )

    return put_aside


def steps_to_keep(steps: list[int], config: CheckpointConfig, eval_losses: Mapping[int, float]) -> set[int]:
    """Return the steps whose checkpoints the retention rules keep, of the ascending ``steps``."""
    keep = set(steps[-config.keep_last :])
    best = sorted((eval_losses[step], step) for step in steps if math.isfinite(eval_losses.get(step, math.nan)))
    keep.update(step for _, step in best[: config.keep_best])
    if config.keep_every_steps is not None:
        keep.update(step for step in steps if step % config.keep_every_steps == 0)
    return keep


def request_save(run_directory: Path) -> None:
    """Ask the process that trains this run for a checkpoint after its current step."""
    refuse_links(run_directory)
    path = RunLayout(run_directory).save_request
    atomic.make_directory(path.parent)
    atomic.write_file(path, b"")
