"""Restore checkpoints that were marked corrupt but verify.

In: a run directory that no process trains. Out: what became of each. A checkpoint goes back to its place only if every
byte is as its manifest says, its place is free, and the replay chain names the very state that it holds: it is then a
state of this run as it is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vorox.core import atomic, staged_directory
from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.run_layout import RunLayout, lock_run
from vorox.core.run_lookup import refuse_links
from vorox.training.checkpoint_store import REASON_NAME, set_aside_as_corrupt
from vorox.training.history import read_history


@dataclass(frozen=True, slots=True)
class Restoration:
    """What became of one checkpoint that was set aside.

    Attributes:
        name: Of the directory.
        step: Steps finished.
        problem: Why it stays aside; empty if it is back in its place.
    """

    name: str
    step: int
    problem: str


def restore_set_aside(run_directory: Path) -> list[Restoration]:
    """Take back the checkpoints that were set aside as corrupt and are whole.

    Raises:
        ConfigError: A process trains the run, or the directory leads to another place.
        UnreadableCheckpointError: The disk still does not deliver one.
    """
    refuse_links(run_directory)
    with lock_run(run_directory):
        heads = {step: record.get("chain") for step, record in read_history(RunLayout(run_directory).chain).items()}
        found: list[Restoration] = []
        for step, path in set_aside_as_corrupt(run_directory):
            problem = _problem(path, step, RunLayout(run_directory).checkpoint(step), heads)
            if not problem:
                atomic.rename(path, RunLayout(run_directory).checkpoint(step))
            found.append(Restoration(path.name, step, problem))
        return found


def _problem(path: Path, step: int, place: Path, heads: dict[int, str | None]) -> str:
    """Why a checkpoint cannot go back; the note that it was set aside with is removed if it can."""
    if path.is_symlink():
        return "it is a link"
    if place.exists() or place.is_symlink():
        return f"{place.name} was saved again since"
    try:
        metadata = staged_directory.verify_directory(path, beside=frozenset({REASON_NAME}))
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return str(error)
    if metadata.get("step") != step:
        return f"it holds step {metadata.get('step')}"
    if heads and heads.get(step) != metadata.get("chain"):
        return "the run went on without it, from an earlier step"
    atomic.remove_file(path / REASON_NAME)
    return ""
