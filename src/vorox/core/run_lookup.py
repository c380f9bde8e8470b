"""Lookup of runs on disk: by id, prefix or path, or the latest. Reads only; needs no lock."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

from vorox.core.atomic import MANIFEST_NAME
from vorox.core.config.schema_fields import nearest
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout, parse_checkpoint_name, run_of_checkpoint


def run_directories(root: Path) -> list[Path]:
    """Return all run directories in ``root``, sorted by name."""
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if is_run(path)]


def same_run_directories(root: Path, run_id: str) -> list[Path]:
    """Return the directories of a run id, oldest first: ``<id>``, ``<id>-2``, ``<id>-3``, ..."""
    found: list[tuple[int, Path]] = []
    for path in run_directories(root):
        match = re.fullmatch(re.escape(run_id) + r"(?:-(\d+))?", path.name)
        if match:
            found.append((int(match[1] or 1), path))
    return [path for _, path in sorted(found)]


def run_attempts(directory: Path) -> list[dict[str, Any]]:
    """Return the attempts in ``run.json``; empty if there is no readable record."""
    try:
        value = json.loads(RunLayout(directory).record.read_bytes())
        return list(cast("list[dict[str, Any]]", value["attempts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def find_run(root: Path | str, name: str) -> Path:
    """Return the directory of a run.

    Args:
        root: Parent directory of runs (``run.directory``).
        name: A path, a run id, a prefix of one, the hash in one, or ``latest``: the run started last by the wall
            clock, among those with a checkpoint if there are any.

    Raises:
        ConfigError: No run matches, or several do; the error lists the candidates.
    """
    root = Path(root)
    if name and is_run(Path(name)):
        return Path(name)
    run = run_of_checkpoint(Path(name))
    if run is not None and is_run(run):
        raise ConfigError(f"{name} is a checkpoint, not a run", where=name, hint=f"name its run: {run_argument(run)}")
    if name and (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"{name} holds model files of Hugging Face, not a run or a checkpoint of one", where=name,
            hint=f"train from its weights with `vorox train CONFIG --from-weights {shlex.quote(name)}`; to generate or "
            "evaluate, name a run (runs/NAME) or a checkpoint (runs/NAME/checkpoints/step-N)",
        )  # fmt: skip
    runs = run_directories(root)
    if not runs:
        raise ConfigError(
            f"Run {name} not found: {root.absolute()} contains no runs", where=str(root.absolute()),
            hint="give the path of the run, name its folder by --root FOLDER (run.directory=FOLDER for `vorox train`), "
            "or start a run with `vorox train quickstart`",
        )  # fmt: skip
    if name == "latest":
        return max(runs, key=lambda path: (has_checkpoint(path), _last_start(path), path.name))
    exact = [path for path in runs if path.name == name]
    if exact:
        return exact[0]
    matching = [path for path in runs if name and (path.name.startswith(name) or name in path.name.split("-"))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(
            f"{name} is ambiguous: it matches {len(matching)} runs, {', '.join(path.name for path in matching)}",
            where=str(root),
            hint="use a longer prefix of the id",
        )
    near = nearest(name, [path.name for path in runs])
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"the latest run is {find_run(root, 'latest').name}; list all with `vorox runs list`"
    )
    if Path(name).suffix in {".yaml", ".yml"} and Path(name).is_file():
        hint = f"{name} is a configuration, not a run; {hint}"
    raise ConfigError(f"Run {name} not found", where=str(root.absolute()), hint=hint)


def refuse_links(run_directory: Path) -> None:
    """Refuse symbolic links in a run directory, except to directories inside it.

    Writing through a link would change files elsewhere.

    Raises:
        ConfigError: The directory contains such a link.
    """
    home = run_directory.resolve()
    for path in sorted(run_directory.iterdir()) if run_directory.is_dir() else ():
        if path.is_symlink() and not (path.is_dir() and path.resolve().is_relative_to(home)):
            raise ConfigError(
                f"{path.name} in the run directory is a symbolic link to {path.readlink()}; runs write through none",
                where=str(path),
                hint="replace the link by its target; to keep runs on another disk, set run.directory",
                saved="nothing was written",
            )


def short_path(path: Path | str) -> str:
    """Return a path relative to the working directory if it is inside, else as it is."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return str(path)
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def run_argument(directory: Path) -> str:
    """Return what every command accepts for a run, quoted for a shell: its name if in ``./runs``, else its path."""
    name = directory.name
    with contextlib.suppress(OSError):
        if Path("runs", name).samefile(directory) and not is_run(Path(name)):
            return shlex.quote(name)
    return shlex.quote(short_path(directory))


def is_run(path: Path) -> bool:
    """Whether a directory is a run directory."""
    layout = RunLayout(path)
    return layout.record.is_file() or layout.config.is_file()


def has_checkpoint(directory: Path) -> bool:
    """Whether a run has a checkpoint to resume from; its contents are not verified."""
    names = (
        parse_checkpoint_name(path.parent.name) for path in RunLayout(directory).checkpoints.glob(f"*/{MANIFEST_NAME}")
    )
    return any(name is not None and not name.status for name in names)


def saved_state(layout: RunLayout) -> str:
    """Return up to which step the state of a run is saved, for an error; empty if no checkpoint is complete."""
    found = [
        name.step
        for path in layout.checkpoints.glob(f"*/{MANIFEST_NAME}")
        if (name := parse_checkpoint_name(path.parent.name)) is not None and not name.status
    ]
    if not found:
        return ""
    return f"training state up to step {max(found):,} is safe in {layout.checkpoint(max(found)).name}"


def _last_start(path: Path) -> str:
    attempts = run_attempts(path)
    return str(attempts[-1].get("started_at", "")) if attempts else ""
