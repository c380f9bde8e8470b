"""The mirror of a running run: acquire and restore, upload in the background, release.

``open_mirror`` wraps the opening of the run directory. Before it, the mirror is acquired and missing checkpoints are
restored. Inside, ``uploading`` copies checkpoints in the background. Afterwards, the final run snapshot is uploaded and
the mirror is released. Without ``checkpoint.mirror`` all of this does nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.config import differences, load_config
from vorox.core.config.yaml.writer import write_overrides
from vorox.core.errors import CheckpointError, ConfigError, DataError, VoroxError
from vorox.core.files.file_holder import FileLock
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import (
    ResumeFrom,
    RunLayout,
    lock_run,
    parse_checkpoint_name,
    run_of_checkpoint,
    step_directories,
)
from vorox.core.schema import RunConfig
from vorox.data.storage import StoreUnreachable, canonical_uri, check_writable, list_objects, remove_object
from vorox.records.log import Echo, Level, RunLog
from vorox.records.run_context import recorded_config, run_id
from vorox.records.run_lookup import is_run, refuse_links, same_run_directories
from vorox.records.step_environments import StepEnvironments
from vorox.training.checkpoints.store import steps_to_keep
from vorox.training.mirror.contents import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    Contents,
    MirroredCheckpoint,
    list_mirror,
    read_object,
)
from vorox.training.mirror.ownership import Ownership, acquire
from vorox.training.mirror.restore import fetch_preview, is_same_history, restore_run
from vorox.training.mirror.uploader import Uploader
from vorox.training.steps.stop import Stop, seconds_left

CLOSE_SECONDS = 20.0
"""Time limit of the final run snapshot, and of releasing the mirror."""


@dataclass(slots=True)
class Mirror:
    """The mirror of a run; does nothing for a run without one.

    Attributes:
        resume_from: Where to open the run from, after a restore.
        uri: Where the copy is; empty without one.
        uploader: Uploads committed checkpoints while ``uploading`` is open; ``None`` without a mirror.
    """

    resume_from: ResumeFrom
    _config: RunConfig
    uri: str = ""
    _ownership: Ownership | None = None
    _found: Contents | None = None
    _foreign: Sequence[MirroredCheckpoint] = ()
    uploader: Uploader | None = None

    @contextlib.contextmanager
    def uploading(
        self,
        directory: Path,
        step: int,
        losses: Mapping[int, float],
        log: RunLog,
        stop: Stop,
    ) -> Generator[None]:
        """Upload checkpoints in the background; wait for the last ones at the end, within a time limit.

        Args:
            directory: The run; this process holds its lock.
            step: Step from which the run starts or resumes.
            losses: Validation losses by step, for the retention rules.
            log: The run's log.
            stop: Stop request, whose notice limits the wait.
        """
        if self._ownership is None or self._found is None:
            yield
            return
        checkpoint = self._config.checkpoint
        later = [entry for entry in self._found.lineage() if entry.step > step]

        def keep(steps: list[int]) -> set[int]:
            return steps_to_keep(steps, checkpoint, losses, StepEnvironments.of_run(directory).changes)

        self.uploader = Uploader(
            self.uri, directory, self._ownership, self._found, base_step=step, abandoned=[*later, *self._foreign],
            keep=keep, log=log,
        )  # fmt: skip
        self._enqueue_current(self.uploader, directory, step)
        try:
            yield
        except VoroxError as error:
            status = self.uploader.wait(self._seconds_to_wait(stop))
            error.saved = f"{error.saved}; {status}" if error.saved else status
            raise
        status = self.uploader.wait(self._seconds_to_wait(stop))
        log.event("mirror_settled", status[0].upper() + status[1:], level="warning" if "NOT" in status else "info")

    def abandon_after(self, checkpoint: Path, directory: Path, echo: Echo) -> None:
        """Find the mirrored checkpoints that a resume from a named one abandons, and report them."""
        name = parse_checkpoint_name(checkpoint.name)
        if self._found is None or name is None:
            return
        lineage = self._found.lineage()
        self._foreign = [
            entry for entry in lineage if entry.step <= name.step and not is_same_history(entry, directory)
        ]
        later = [entry for entry in lineage if entry.step > name.step]
        if lost := [*later, *self._foreign]:
            ahead = f"is ahead (step {later[0].step:,})" if later else "has diverged from this run"
            names, uri = ", ".join(entry.name for entry in lost), f"{self.uri}/{CHECKPOINTS}/{lost[0].name}"
            echo(
                f"The mirror {self.uri} {ahead}. Resuming from step {name.step:,} abandons checkpoints that it has of "
                f"another history; they are marked, not removed: {names}. `vorox train --resume {uri} "
                f"run.directory=FOLDER` restores {lost[0].name} into another folder",
                "warning",
            )

    def _seconds_to_wait(self, stop: Stop) -> float:
        checkpoint = self._config.checkpoint
        return min(checkpoint.mirror_wait_seconds, seconds_left(checkpoint.notice_seconds, stop))

    def _enqueue_current(self, uploader: Uploader, directory: Path, step: int) -> None:
        """Enqueue the checkpoint from which the run resumes, unless the mirror has it."""
        assert self._found is not None
        path = RunLayout(directory).checkpoint(step)
        foreign = {entry.name for entry in self._foreign}
        if path.exists() and step not in {entry.step for entry in self._found.lineage() if entry.name not in foreign}:
            uploader.enqueue(path)

    def close(self) -> None:
        if self.uploader is not None:
            self.uploader.close(CLOSE_SECONDS)
        if self._ownership is not None:
            self._ownership.release(CLOSE_SECONDS)


@contextlib.contextmanager
def open_mirror(
    config: RunConfig, resume_from: ResumeFrom, distributed: DistributedContext, echo: Echo, *,
    is_rollback: bool = False,
) -> Generator[Mirror]:  # fmt: skip
    """Acquire the mirror of a run and restore what this machine lacks.

    A run resumes from its newest state, local or mirrored; a named checkpoint resumes from exactly that state.

    Args:
        config: ``checkpoint.mirror`` is its URI.
        resume_from: As for ``train``.
        distributed: Only rank 0 uses the mirror.
        is_rollback: The run returns to an earlier state of its own, so nothing is restored.
        echo: Shows a message on the terminal.

    Raises:
        ConfigError: The mirror cannot be written, is in use by another process, or has diverged from the run.
        CheckpointError: The mirror cannot be reached, or has no valid checkpoint.
    """
    root = config.checkpoint.mirror
    if root is None or not distributed.is_main:
        yield Mirror(resume_from, config)
        return
    with _translate_store_errors(root):
        check_writable(root)
        root = canonical_uri(root)
        directory = _directory(config, resume_from, root)
        uri = f"{root}/{directory.name}"
        with _unused(directory):
            ownership, found = acquire(uri, echo)
    run = Mirror(resume_from, config, uri, ownership, found)
    try:
        with _translate_store_errors(root):
            if isinstance(resume_from, Path) and run_of_checkpoint(resume_from) is not None:
                run.abandon_after(resume_from.absolute(), directory, echo)
            elif resume_from != "never" and not is_rollback:
                restore_run(found, directory, echo, typed=_typed(config, directory))
        if not isinstance(resume_from, Path):
            run.resume_from = directory
        if is_run(directory) and not is_rollback:
            echo(f"Resuming {run.resume_from}, mirrored to {uri}", "info")
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def _unused(directory: Path) -> Generator[None]:
    """Lock a run while its mirror is acquired: a start that is refused must not take it from the process that trains.

    Raises:
        ConfigError: Another process on this machine trains the run.
    """
    lock: FileLock | None = None
    if is_run(directory):
        refuse_links(directory)
        with contextlib.suppress(OSError):  # explained where the run is opened
            lock = lock_run(directory).acquire()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextlib.contextmanager
def _translate_store_errors(uri: str) -> Generator[None]:
    """Translate errors of the store into errors about ``checkpoint.mirror``."""
    try:
        yield
    except StoreUnreachable as error:
        raise CheckpointError(
            f"The mirror cannot be reached, so it is unknown whether it is ahead of this machine: {error.what}",
            where=error.where, hint="run the same command again, or train without a mirror: checkpoint.mirror=null",
        ) from error  # fmt: skip
    except DataError as error:
        raise ConfigError(
            f"checkpoint.mirror={uri} cannot be used: {error.what}", where=error.where, hint=error.hint
        ) from error
    except ConfigError as error:
        error.where = error.where or "checkpoint.mirror"
        raise


def _directory(config: RunConfig, resume_from: ResumeFrom, mirror_root: str) -> Path:
    """Return the run directory, considering local runs and those in the store."""
    if isinstance(resume_from, Path):
        path = resume_from.absolute()
        return run_of_checkpoint(path) or path
    root, name = Path(config.run.directory), run_id(config)
    here = [path.name.removeprefix(name).removeprefix("-") for path in same_run_directories(root, name)]
    number = max((int(suffix or 1) for suffix in here), default=0)

    def numbered(number: int) -> str:
        return name if number == 1 else f"{name}-{number}"

    while list_objects(f"{mirror_root}/{numbered(number + 1)}"):
        number += 1
    return root / numbered(max(1, number) if resume_from == "auto" else number + 1)


def resume_from_store(uri: str, root: str | None, echo: Echo) -> Path:
    """Restore a mirrored run to this machine, to resume it.

    Args:
        uri: The run's folder in a store, or one of its checkpoints.
        root: Parent of run directories; by default, ``run.directory`` of the mirrored run.
        echo: Reports restored and skipped checkpoints.

    Returns:
        The run directory, or the path of the checkpoint if ``uri`` is one.

    Raises:
        ConfigError: The URI is not a mirrored run, or the local run has diverged from it.
        CheckpointError, DataError: As ``restore_run``.
    """
    found, chosen, is_named = _find(uri)
    directory = _target(found, chosen, root)
    path = restore_run(found, directory, echo, only=chosen if is_named else None)
    return path if is_named and path is not None else directory


def preview_from_store(uri: str, root: str | None, folder: Path) -> tuple[Path, Path | None]:
    """Return what ``resume_from_store`` would, for a dry run: nothing is written outside ``folder``.

    Returns:
        The run directory or checkpoint to read, in ``folder`` if it would be restored; and the directory that it would
        be restored to, ``None`` if the local run is not behind.

    Raises:
        ConfigError: The URI is not a mirrored run.
    """
    found, chosen, is_named = _find(uri)
    directory = _target(found, chosen, root)
    if not is_named and chosen.step <= max(step_directories(directory), default=-1):
        return directory, None
    path = fetch_preview(chosen, folder / directory.name)
    return (path if is_named else folder / directory.name), directory


def _find(uri: str) -> tuple[Contents, MirroredCheckpoint, bool]:
    """Return the mirror of a URI, its checkpoint that the URI names or the newest one, and whether it is named."""
    uri = canonical_uri(uri)
    folder, _, name = uri.rpartition("/")
    is_named = folder.endswith(f"/{CHECKPOINTS}") and CHECKPOINT_NAME.fullmatch(name) is not None
    found = list_mirror(folder.removesuffix(f"/{CHECKPOINTS}") if is_named else uri)
    named = [entry for entry in found.checkpoints if entry.is_complete and entry.name == name]
    chosen = named if is_named else found.lineage()
    if not chosen:
        raise ConfigError(
            "There is no mirrored run with a complete checkpoint at this URI", where=uri,
            hint="name the folder below checkpoint.mirror that has the run's id",
        )  # fmt: skip
    return found, chosen[0], is_named


def _target(found: Contents, chosen: MirroredCheckpoint, root: str | None) -> Path:
    return Path(root or _mirrored_config(chosen).run.directory) / found.uri.rpartition("/")[2]


def restore_newer(directory: Path, root: str, config: RunConfig, echo: Echo) -> None:
    """Restore a local run, with its configuration, if its mirror is ahead.

    Args:
        directory: The run.
        root: Its ``checkpoint.mirror``.
        config: Its configuration with the settings of the command.
        echo: Reports restored and skipped checkpoints.

    Raises:
        ConfigError: The local run has diverged from the mirror, or the mirror cannot be read.
        CheckpointError, DataError: As ``restore_run``.
    """
    with _translate_store_errors(root):
        found = list_mirror(f"{canonical_uri(root)}/{directory.absolute().name}")
        mirrored = max((entry.step for entry in found.lineage()), default=0)
        if mirrored > max(step_directories(directory), default=0):  # otherwise ``open_mirror`` compares them
            restore_run(found, directory, echo, typed=_typed(config, directory))


def _typed(config: RunConfig, directory: Path) -> str:
    """Return the settings that a command changes of a run, as they are typed."""
    try:
        recorded = recorded_config(directory)
    except ConfigError:  # there is none yet, or it is of another version
        return ""
    return write_overrides({
        entry.key: entry.after for entry in differences(recorded, config) if entry.key != "run.directory"
    })  # fmt: skip


def _mirrored_config(checkpoint: MirroredCheckpoint) -> RunConfig:
    """Read the configuration of a mirrored run."""
    assert checkpoint.snapshot is not None
    with tempfile.TemporaryDirectory() as folder:
        file = RunLayout(Path(folder)).config
        file.write_bytes(read_object(checkpoint.snapshot[file.name]))
        return load_config(file)


def mirror_uri(directory: Path) -> str | None:
    """Return the URI of a local run's mirror; ``None`` if it has none, or its configuration cannot be read."""
    try:
        root = recorded_config(directory).checkpoint.mirror
        return None if root is None else f"{canonical_uri(root)}/{directory.resolve().name}"
    except ConfigError:
        return None  # written by another version


def silent_echo(text: str, level: Level = "info") -> None:
    """Discard messages; for commands that print their own."""


def remove_mirror(uri: str) -> int:
    """Remove the mirror of a run and return its size in bytes.

    Raises:
        ConfigError: Another process writes to it.
    """
    ownership, found = acquire(uri, silent_echo)
    ownership.release(CLOSE_SECONDS)
    if ownership.lost:
        raise ConfigError("Another process has taken over this mirror", where=uri, hint="find the process that uses it")
    size_bytes = 0
    for entry in found.checkpoints:
        for file in entry.objects():
            size_bytes += file.size_bytes
            remove_object(file.uri)
    for file in list_mirror(uri).others.values():
        size_bytes += file.size_bytes
        remove_object(file.uri)
    return size_bytes
