"""The layout of a run directory: the names of all its files and folders.

The path of a run directory goes in; the paths of its files, its checkpoints, the files that removing the run deletes,
and those that its mirror copies come out. ``RunLayout(directory).plan`` is a path; ``RunLayout.plan`` is the entry of
the table.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, overload

from vorox.core.files.atomic import TEMPORARY_PREFIX
from vorox.core.files.file_holder import FileLock
from vorox.core.files.staged_directory import has_manifest, unreadable_error

ResumeFrom = Literal["auto", "never"] | Path
"""What a run continues: its newest checkpoint if it has one, nothing, or a run or checkpoint by path."""

_CHECKPOINT = re.compile(r"step-(?P<step>[0-9]{8,16})(?:\.(?P<status>corrupt|replaced|incomplete)-[0-9]+)?")


@dataclass(frozen=True, slots=True)
class RunFile:
    """One kind of file or folder directly inside a run directory.

    Attributes:
        name: Its name.
        pattern: Glob of its names where there are several, such as one per rank.
        mirrored: Glob of what a mirror copies of it besides checkpoints; empty for what can be rebuilt and for what
            is specific to one machine.
    """

    name: str
    pattern: str = ""
    mirrored: str = ""

    @overload
    def __get__(self, layout: None, owner: type) -> RunFile: ...
    @overload
    def __get__(self, layout: RunLayout, owner: type) -> Path: ...
    def __get__(self, layout: RunLayout | None, owner: type) -> RunFile | Path:
        return self if layout is None else layout.directory / self.name


class CheckpointName(NamedTuple):
    """The name of a checkpoint directory, parsed.

    Attributes:
        step: Finished steps.
        status: ``corrupt``, ``replaced`` or ``incomplete`` of a quarantined checkpoint; empty for one in use.
    """

    step: int
    status: str


class RunLayout:
    """The paths of one run directory.

    Args:
        directory: ``runs/<run_id>``.
    """

    attempts = RunFile("attempts.bin", mirrored="attempts.bin")
    chain = RunFile("chain.jsonl", mirrored="chain.jsonl")
    checkpoints = RunFile("checkpoints")
    config = RunFile("config.yaml", mirrored="config.yaml")
    configs = RunFile("configs", mirrored="configs/*.yaml")
    control = RunFile("control")
    evaluations = RunFile("evaluations.jsonl", mirrored="evaluations.jsonl")
    events = RunFile("events.jsonl", "events*.jsonl", mirrored="events*.jsonl")
    exports = RunFile("export")
    failure = RunFile("failure.json")
    lock = RunFile("LOCK")
    log = RunFile("log.txt", "log*.txt", mirrored="log*.txt")
    metadata_database = RunFile("metadata.sqlite", "metadata.sqlite*")
    metrics = RunFile("metrics.jsonl", mirrored="metrics.jsonl")
    mlflow = RunFile("mlflow.db", "mlflow.db*")
    nonfinite = RunFile("nonfinite", mirrored="nonfinite/*")
    pins = RunFile("pins")
    plan = RunFile("plan.jsonl", mirrored="plan.jsonl")
    profile = RunFile("profile")
    record = RunFile("run.json", mirrored="run.json")
    signatures = RunFile("signatures", mirrored="signatures/*.json")
    statements = RunFile("statements", mirrored="statements/*.json")
    states = RunFile("states.jsonl", mirrored="states.jsonl")
    tasks = RunFile("tasks", mirrored="tasks/*.json")
    tensorboard = RunFile("tensorboard")
    times = RunFile("times.bin", mirrored="times.bin")
    tokenizer = RunFile("tokenizer", mirrored="tokenizer/*")
    verdicts = RunFile("verdicts.jsonl", mirrored="verdicts.jsonl")
    views = RunFile("views", mirrored="views/*.json")
    wandb = RunFile("wandb")
    watchdog = RunFile("watchdog")
    temporary = RunFile(f"{TEMPORARY_PREFIX}*", f"{TEMPORARY_PREFIX}*")

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def save_request(self) -> Path:
        """The file that requests a checkpoint; removed when there is one."""
        return self.control / "save"

    @property
    def training_command(self) -> str:
        """The command that trains the run again from its configuration, as a run of its own."""
        return f"vorox train {shlex.quote(str(self.config))} --resume never"

    def of_rank(self, path: Path, rank: int) -> Path:
        """Return the file of one rank: ``log.txt`` of rank 3 is ``log-00003.txt``, of rank 0 ``log.txt``."""
        return path if rank == 0 else path.with_name(f"{path.stem}-{rank:05d}{path.suffix}")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def heartbeat(self, rank: int) -> Path:
        return self.watchdog / f"rank-{rank:05d}.beat"

    def stacks(self, rank: int) -> Path:
        """Return the file of the stacks of a stalled rank."""
        return self.watchdog / f"stacks-{rank:05d}.txt"

    def stall(self, attempt: int) -> Path:
        """Return the record of the stall that ended an attempt."""
        return self.watchdog / f"stall-{attempt:05d}.json"

    def profile_trace(self, step: int, rank: int) -> Path:
        """Return the Chrome trace of a rank that starts with a step."""
        return self.profile / f"step-{step:08d}-rank-{rank:05d}.json.gz"

    def profile_table(self, step: int, rank: int) -> Path:
        return self.profile / f"step-{step:08d}-rank-{rank:05d}.txt"

    def nonfinite_record(self, step: int) -> Path:
        return self.nonfinite / f"step-{step:08d}.json"

    def task_results(self, step: int) -> Path:
        return self.tasks / f"step-{step:08d}.json"

    def signature(self, step: int) -> Path:
        return self.signatures / f"step-{step:08d}.json"

    def statement(self, kind: str, step: int) -> Path:
        """Return a statement about the checkpoint of a step."""
        return self.statements / f"{kind}-step-{step:08d}.json"

    def view(self, name: str) -> Path:
        """Return the record of a view of the run's data."""
        return self.views / f"{name}.json"

    def pin_of_view(self, name: str) -> Path:
        """Return the link to the pin of the run in a view of its data, on this machine."""
        return self.views / f"{name}.pin"

    def config_from(self, step: int) -> Path:
        """Return the path of the configuration in force from a step on."""
        return self.configs / f"step-{step:08d}.yaml"

    def configs_by_step(self) -> dict[int, Path]:
        """Return every recorded configuration by the step that it is in force from."""
        files = sorted(self.configs.glob("*"))
        found = ((re.fullmatch(r"step-([0-9]{1,16})\.yaml", path.name), path) for path in files)
        return {int(match[1]): path for match, path in found if match}

    def foreign_files(self) -> list[str]:
        """Return the names in the run directory that no run writes."""
        patterns = [file.pattern or file.name for file in RUN_FILES]
        names = sorted(path.name for path in self.directory.iterdir())
        return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    def mirrored_files(self) -> list[Path]:
        """Return what a mirror keeps besides checkpoints: all that a run needs to resume on another machine.

        The record of attempts is the last one, so that a copy of a live run has in it all steps of the other files; the
        views come after the plan, so that they have all files of it.
        """
        patterns = sorted((file.mirrored for file in RUN_FILES if file.mirrored), key=self.attempts.name.__eq__)
        found = [path for pattern in patterns for path in sorted(self.directory.glob(pattern))]
        return [path for path in found if path.is_file() and not path.name.startswith(TEMPORARY_PREFIX)]


RUN_FILES = tuple(value for value in vars(RunLayout).values() if isinstance(value, RunFile))


def parse_checkpoint_name(name: str) -> CheckpointName | None:
    """Parse the name of a directory among the checkpoints; ``None`` if no run gives a checkpoint such a name."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    return CheckpointName(int(match["step"]), match["status"] or "")


def checkpoint_directories(run_directory: Path) -> list[tuple[CheckpointName, Path]]:
    """Return every directory with the name of a checkpoint, or link to one, by step; also quarantined ones.

    Raises:
        UnreadableCheckpointError: The folder cannot be listed.
    """
    parent = RunLayout(run_directory).checkpoints
    try:
        paths = [parent / entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except FileNotFoundError:  # any other error leaves open whether there are checkpoints
        return []
    except OSError as error:
        raise unreadable_error(error, parent) from error
    found = ((parse_checkpoint_name(path.name), path) for path in paths)
    return sorted((name, path) for name, path in found if name is not None)


def step_directories(run_directory: Path) -> dict[int, Path]:
    """Return every checkpoint by step, valid or not; a directory without a manifest is none.

    Raises:
        UnreadableCheckpointError: The folder cannot be listed.
    """
    found = checkpoint_directories(run_directory)
    return {name.step: path for name, path in found if not name.status and has_manifest(path)}


def run_of_checkpoint(path: Path) -> Path | None:
    """Return the run directory of a path that names a checkpoint; ``None`` if it names none."""
    return path.parent.parent if path.parent.name == RunLayout.checkpoints.name else None


def lock_run(run_directory: Path) -> FileLock:
    """Return the lock that the process which writes a run holds; a second process is refused immediately."""
    return FileLock(RunLayout(run_directory).lock, blocking=False, purpose=f"run {run_directory.name}")
