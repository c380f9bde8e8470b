"""Pins: the checkpoints of a run that other runs need, as the base of an adapter or the reference of DPO.

A checkpoint and the run that needs it go in; a file in ``pins/`` of the checkpoint's run keeps it from retention, and
names that run to anyone who removes it. It stays when the run that needs it cannot be found: it may have been moved.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection
from pathlib import Path

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.json_reader import MalformedJson, read_json
from vorox.core.run_layout import RunLayout, parse_checkpoint_name, run_of_checkpoint


def pin_checkpoint(checkpoint: Path, run_directory: Path) -> bool:
    """Keep a checkpoint of another run for a run; whether it is one, and its directory can be written."""
    base, name = run_of_checkpoint(checkpoint), parse_checkpoint_name(checkpoint.name)
    if base is None or name is None or base.resolve() == run_directory.resolve():
        return False
    path = _path(base, run_directory)
    try:
        atomic.make_directory(path.parent)
        atomic.write_file(path, atomic.canonical_json({"step": name.step, "run": str(run_directory.absolute())}))
    except OSError:  # another user's run
        return False
    return True


def unpin(checkpoint: Path, run_directory: Path) -> None:
    """Remove the pin of a run from the run of a checkpoint."""
    base = run_of_checkpoint(checkpoint)
    if base is not None:
        _path(base, run_directory).unlink(missing_ok=True)


def pinned_steps(run_directory: Path) -> dict[int, list[str]]:
    """Return the steps of a run whose checkpoints other runs need, each with these runs."""
    steps: dict[int, list[str]] = {}
    for path in sorted(RunLayout(run_directory).pins.glob("*.json")):
        try:
            pin = read_json(path, dict)
        except (OSError, MalformedJson):
            continue
        step, run = pin.get("step"), pin.get("run")
        if type(step) is int and isinstance(run, str):
            steps.setdefault(step, []).append(run)
    return steps


def refuse_pinned(run_directory: Path, steps: Collection[int] | None = None) -> None:
    """Refuse to remove checkpoints that other runs need; ``None``: all of the run.

    Raises:
        ConfigError: Some run needs one of them and is still there.
    """
    for step, runs in pinned_steps(run_directory).items():
        present = [run for run in runs if RunLayout(Path(run)).record.exists()]
        if present and (steps is None or step in steps):
            raise ConfigError(
                f"The checkpoint of step {step:,} is the base or the reference of {present[0]}, which cannot be used "
                "without it",
                where=str(RunLayout(run_directory).checkpoint(step)), saved="nothing was removed",
                hint=f"remove that run first: vorox runs remove {shlex.quote(present[0])}",
            )  # fmt: skip


def _path(base: Path, run_directory: Path) -> Path:
    name = hashlib.sha256(str(run_directory.absolute()).encode()).hexdigest()[:16]
    return RunLayout(base).pins / f"{name}.json"
