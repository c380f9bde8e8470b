"""Lookup of runs on disk: by id, name, prefix or path, or the latest. Reads only; needs no lock.

An exact id or name wins over everything that it is only a part of. What removes finds exact ones only. Commands that
take a checkpoint take ``RUN@STEP`` for the state after a step (``split_step``), kept or not.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.config import slug
from vorox.core.config.schema_fields import nearest
from vorox.core.errors import ConfigError, UnreadableCheckpointError
from vorox.core.files.json_reader import MalformedJson, mapping, read_json, read_regular
from vorox.core.run_layout import RunLayout, run_of_checkpoint, step_directories


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


FORKED_FROM = "forked_from"
"""Entry of ``run.json`` of a fork: run, step and chain of the state that it began with, and its change."""
INHERITED = "inherited"
"""Entry of an attempt that a fork has from its parent."""
_TEXT, _FACTS = (str, None), (dict, None)
_RECORD_TYPES = {
    "config_digest": str,
    FORKED_FROM: ({"run_id": str, "run": str, "step": int, "change": {...: [str]}}, None),
    "attempts": [
        {
            "attempt": int, "started_at": _TEXT, "ended_at": _TEXT, "outcome": _TEXT, "argv": [str], "pid": int,
            "working_directory": str, "config_digest": str, "code": _FACTS, "git": _FACTS, "environment": dict,
            "failure": _FACTS,
            "notes": ({"total_steps": (int, None), "environment": dict, "caches": {...: str},
                       "holdout_caches": {...: str}, "validation_caches": {...: str},
                       "functions": [str], "taps": [str]}, None),
        }
    ],
}  # fmt: skip
"""The types in ``run.json`` that readers rely on."""


RUN_FORMAT = "vorox-run/2"
_RUN_FORMATS = "vorox-run/"
CONFIG_NOTE = "config_sha256"
"""Note of the attempt that wrote ``config.yaml``: its SHA-256."""


def is_config_as_written(directory: Path) -> bool | None:
    """Whether ``config.yaml`` is what the newest attempt that wrote it has written; ``None`` if no attempt says."""
    for digest in attempt_notes(directory, CONFIG_NOTE):
        try:
            return hashlib.sha256(read_regular(RunLayout(directory).config)).hexdigest() == digest
        except (OSError, MalformedJson):
            return False
    return None


def latest_run(root: Path, run_id: str) -> Path | None:
    """Return the directory of a run id that was created last; ``None`` if there is none."""
    same = same_run_directories(root, run_id)
    return same[-1] if same else None


def read_run_record(directory: Path) -> dict[str, Any]:
    """Return the content of ``run.json``, of the types that it should have.

    Raises:
        MalformedJson: It is damaged, of another format, or somebody wrote something else.
        OSError: It cannot be read.
    """
    refuse_other_format(directory)
    value = read_json(RunLayout(directory).record, _RECORD_TYPES)
    if "attempts" not in value:
        raise MalformedJson("The file cannot be read: it names no attempts", where=str(RunLayout(directory).record))
    return value


def refuse_other_format(directory: Path) -> None:
    """Refuse a run in another format: its records, plan and checkpoints are read by the version that wrote it only.

    Raises:
        MalformedJson: The run has another format.
    """
    layout = RunLayout(directory)
    try:
        found = read_json(layout.record, dict).get("format")
    except (OSError, MalformedJson):  # its reader says what is wrong
        return
    if found != RUN_FORMAT and str(found).startswith(_RUN_FORMATS):
        raise MalformedJson(
            f"The run has format {found!r}, but this version reads {RUN_FORMAT!r}", where=str(layout.record),
            hint=f"use the version of Vorox that wrote it, or train it again: {layout.training_command}",
        )  # fmt: skip


def _has_own_format(directory: Path) -> bool:
    try:
        refuse_other_format(directory)
    except MalformedJson:
        return False
    return True


def latest_run_of_name(directory: Path) -> Path | None:
    """Return the run that started last of the others beside a run with its readable name; ``None`` without any."""
    match = _ID.fullmatch(directory.name)
    found = [] if match is None else _exact_matches(run_directories(directory.parent), match["name"])
    others = [path for path in found if path.name != directory.name]
    return max(others, key=lambda path: (_last_start(path), path.name), default=None)


def run_attempts(directory: Path) -> list[dict[str, Any]]:
    """Return the attempts in ``run.json``; empty if there is no readable record."""
    try:
        return read_run_record(directory)["attempts"]
    except (OSError, MalformedJson):
        return []


def notes_of_attempts(directory: Path) -> list[Mapping[str, Any]]:
    """Return the notes of every attempt in ``run.json``, oldest first; empty if there is no readable record."""
    return [mapping(attempt.get("notes")) for attempt in run_attempts(directory)]


def attempt_notes(directory: Path, name: str) -> list[object]:
    """Return the notes of a name that the attempts recorded in ``run.json``, newest first."""
    return [notes[name] for notes in reversed(notes_of_attempts(directory)) if name in notes]


def _is_quantised(directory: Path) -> bool:
    with contextlib.suppress(OSError, MalformedJson):
        return bool(read_json(directory / "config.json", dict).get("quantization_config"))
    return False


def fork_origin(directory: Path) -> Mapping[str, Any]:
    """Return what a run is a fork of; empty if it is none, or if its record cannot be read."""
    try:
        return mapping(read_run_record(directory).get(FORKED_FROM))
    except (OSError, MalformedJson):
        return {}


def fork_lines(directory: Path) -> list[str]:
    """Describe what a run is a fork of, and what it changed; empty if it is none."""
    origin = fork_origin(directory)
    if not origin:
        return []
    changes = fork_changes(origin)
    where = f"{origin.get('run_id', '')} at step {origin.get('step', 0):,}"
    return [f"fork of {where}: {', '.join(changes) or 'nothing is changed'}"]


def fork_changes(origin: Mapping[str, Any]) -> list[str]:
    """Describe what a fork changed, by its ``fork_origin``."""
    change = mapping(origin.get("change"))
    words = {"without_documents": "without ", "without_sources": "without source ", "overrides": ""}
    listed = {key: names if isinstance(names := change.get(key), list) else [] for key in words}
    return [f"{before}{name}" for key, before in words.items() for name in listed[key]]


def run_id_of(directory: Path) -> str:
    """Return the id that a run was created with, which stays when its directory is renamed."""
    try:
        found = read_run_record(directory).get("run_id")
    except (OSError, MalformedJson):
        found = None
    return found if isinstance(found, str) else directory.name


def find_run(root: Path | str, name: str, *, exact: bool = False) -> Path:
    """Return the directory of a run.

    Args:
        root: Parent directory of runs (``run.directory``).
        name: A path, a run id, a name (``run.name``, or the readable part of an id), a prefix of an id, the hash in
            one, or ``latest``: the run started last by the wall clock, among those with a checkpoint if there are any.
        exact: Accept no prefix and no hash.

    Raises:
        ConfigError: No run matches, or several do; the error lists the candidates.
        MalformedJson: The run has another format. One that is found for removal may have any.
    """
    found = _find_run(Path(root), name, exact=exact)
    if not exact:
        refuse_other_format(found)
    return found


def split_step(root: Path | str, name: str, step: int | None = None) -> tuple[str, int | None]:
    """Split ``RUN@STEP`` into the run and the step; the step of any other name is ``step``.

    A path or a run of exactly this name wins, and the ``@`` of a URI is not one of a step.

    Args:
        root: Parent directory of runs.
        name: What a command got.
        step: What ``--step`` of that command got.

    Raises:
        ConfigError: Both name a step.
    """
    match = None if "://" in name or Path(name).exists() else _AT_STEP.fullmatch(name)
    if match is None or _is_name(Path(root), name, match["run"]):
        return name, step
    if step is not None:
        raise ConfigError(
            f"{name} and --step {step} both name a step", where=name, saved="nothing was written",
            hint="leave one of them out",
        )  # fmt: skip
    return match["run"], int(match["step"])


def _is_name(root: Path, name: str, run: str) -> bool:
    """Whether ``RUN@STEP`` is the name of a run itself: of its directory, or one that ids write with a dash for it."""
    runs = run_directories(root)
    whole = _exact_matches(runs, name)
    if not whole or any(path.name == name for path in whole):
        return bool(whole)
    return not (_exact_matches(runs, run) or run == "latest" or is_run(Path(run)))


def _find_run(root: Path, name: str, *, exact: bool) -> Path:
    if name and is_run(Path(name)):
        return Path(name)
    run, step = split_step(root, name)
    if step is not None:
        directory = _find_run(root, run, exact=exact)
        raise ConfigError(
            f"{name} is the state after a step; this needs a run", where=name, saved="nothing was changed",
            hint=f"name its run: {run_argument(directory)}",
        )  # fmt: skip
    run = run_of_checkpoint(Path(name))
    if run is not None and is_run(run):
        raise ConfigError(f"{name} is a checkpoint, not a run", where=name, hint=f"name its run: {run_argument(run)}")
    runs = run_directories(root)
    found = _exact_matches(runs, name)
    if len(found) == 1:
        return found[0]
    if not found and name and (Path(name) / "config.json").is_file():
        if _is_quantised(Path(name)):
            raise ConfigError(
                f"{name} holds quantised weights, which transformers runs and no command does", where=name,
                hint="name the run or the directory that it was made from, or load it in Python: "
                f"vorox.load_quantized({name!r}) if `vorox compress` wrote it, else transformers' from_pretrained",
            )  # fmt: skip
        raise ConfigError(
            f"{name} holds model files of Hugging Face, not a run or a checkpoint of one", where=name,
            hint=f"train from its weights with `vorox train CONFIG --from-weights {shlex.quote(name)}`; generate, "
            "chat, serve, eval and export take it as it is",
        )  # fmt: skip
    if not runs:
        raise ConfigError(
            f"Run {name} not found: {root.absolute()} contains no runs", where=str(root.absolute()),
            hint="give the path of the run, name its folder by --root FOLDER (run.directory=FOLDER for `vorox train`), "
            "or start a run with `vorox train quickstart`",
        )  # fmt: skip
    if name == "latest":
        return max(runs, key=lambda path: (_has_own_format(path), has_checkpoint(path), _last_start(path), path.name))
    matching = found or [path for path in runs if name and (path.name.startswith(name) or name == _hash(path.name))]
    if len(matching) == 1 and not exact:
        return matching[0]
    listed = ", ".join(path.name for path in matching)
    if len(matching) > 1 and (found or not exact):
        raise ConfigError(
            f"{name} is ambiguous: it matches {len(matching)} runs, {listed}", where=str(root.absolute()),
            hint="give the whole id of one",
        )  # fmt: skip
    if matching:
        raise ConfigError(
            f"No run is named {name}; it is only a part of {listed}", where=str(root.absolute()),
            saved="nothing was changed", hint=f"if you mean that run, write {run_argument(matching[0])}"
            if len(matching) == 1 else "write the whole id of the one that you mean",
        )  # fmt: skip
    near = nearest(name, [path.name for path in runs])
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"the latest run is {_find_run(root, 'latest', exact=False).name}; list all with `vorox runs list`"
    )
    if not _PATTERN.isdisjoint(name):
        ids = [path.name for path in runs if fnmatch.fnmatchcase(path.name, name)][:_MAX_LISTED]
        hint = f"no pattern is expanded; write the ids: {' '.join(ids) or 'vorox runs list prints them'}"
    if Path(name).suffix in {".yaml", ".yml"} and Path(name).is_file():
        hint = f"{name} is a configuration, not a run; {hint}"
    if "@" in name:
        hint = f"after @ comes the number of a step, as in latest@340; {hint}"
    raise ConfigError(f"Run {name} not found", where=str(root.absolute()), hint=hint)


_MAX_LISTED = 20
_AT_STEP = re.compile(r"(?P<run>.+)@(?P<step>[0-9]{1,15})", re.DOTALL)
_PATTERN = frozenset("*?[")
_ID = re.compile(r"(?P<name>.+)-(?P<hash>[0-9a-f]{8})(?:-\d+)?")
"""A run id: a readable name, digits of the configuration's digest, and a number if the id existed."""


def _exact_matches(runs: list[Path], name: str) -> list[Path]:
    """Return the run with this id, else the runs with this name.

    A name is written in ids with a dash in the place of each character that a directory cannot have. A part that this
    would cut off or shorten, such as the dash of ``exp-``, makes it another name.
    """
    exact = [path for path in runs if path.name == name]
    written = slug(name)
    if exact or len(written) != len(name):
        return exact
    return [path for path in runs if (match := _ID.fullmatch(path.name)) and match["name"] == written]


def _hash(run_id: str) -> str:
    match = _ID.fullmatch(run_id)
    return match["hash"] if match else ""


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
    """Whether a directory is a run directory; one that may not be read is none."""
    layout = RunLayout(path)
    try:
        return layout.record.is_file() or layout.config.is_file()
    except PermissionError:
        return False


def has_checkpoint(directory: Path) -> bool:
    """Whether a run has a checkpoint to resume from, or a disk that does not tell; contents are not verified."""
    try:
        return bool(step_directories(directory))
    except UnreadableCheckpointError:
        return True


def saved_state(layout: RunLayout) -> str:
    """Return up to which step the state of a run is saved, for an error; empty if no checkpoint is complete."""
    try:
        step = max(step_directories(layout.directory), default=None)
    except UnreadableCheckpointError as error:
        return f"unknown: {error.what}"
    return "" if step is None else f"training state up to step {step:,} is safe in {layout.checkpoint(step).name}"


def _last_start(path: Path) -> str:
    attempts = run_attempts(path)
    return str(attempts[-1].get("started_at", "")) if attempts else ""
