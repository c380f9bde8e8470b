"""The mirror of a running run: acquire and restore, upload in the background, release.

``open_mirror`` wraps the opening of the run directory. Before it, the mirror is acquired and missing checkpoints are
restored. Inside, ``uploading`` copies checkpoints in the background. Afterwards, the final run snapshot is uploaded and
the mirror is released. Without ``checkpoint.mirror`` all of this does nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vorox.core.config import load_config
from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import CheckpointError, ConfigError, DataError, VoroxError
from vorox.core.log import Echo, Level, RunLog
from vorox.core.run_context import recorded_config, run_id
from vorox.core.run_layout import RunLayout, run_of_checkpoint
from vorox.core.run_lookup import is_run, same_run_directories
from vorox.core.run_matching import latest_run
from vorox.core.schema import RunConfig
from vorox.data.storage import StoreUnreachable, canonical_uri, check_writable, list_objects, remove_object
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
from vorox.training.mirror.restore import restore_run
from vorox.training.mirror.uploader import Uploader
from vorox.training.preemption_notice import seconds_left
from vorox.training.stop import Stop

CLOSE_SECONDS = 20.0
"""Time limit of the final run snapshot, and of releasing the mirror."""

ResumeFrom = Literal["auto", "never"] | Path


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
        self.uploader = Uploader(
            self.uri, directory, self._ownership, self._found, base_step=step, log=log,
            keep=lambda steps: steps_to_keep(steps, checkpoint, losses),
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

    def _seconds_to_wait(self, stop: Stop) -> float:
        checkpoint = self._config.checkpoint
        return min(checkpoint.mirror_wait_seconds, seconds_left(checkpoint.notice_seconds, stop))

    def _enqueue_current(self, uploader: Uploader, directory: Path, step: int) -> None:
        """Enqueue the checkpoint from which the run resumes, unless the mirror has it."""
        assert self._found is not None
        path = RunLayout(directory).checkpoint(step)
        if path.exists() and step not in {entry.step for entry in self._found.lineage()}:
            uploader.enqueue(path)

    def close(self) -> None:
        if self.uploader is not None:
            self.uploader.close(CLOSE_SECONDS)
        if self._ownership is not None:
            self._ownership.release(CLOSE_SECONDS)


@contextlib.contextmanager
def open_mirror(
    config: RunConfig, resume_from: ResumeFrom, distributed: DistributedContext, echo: Echo
) -> Generator[Mirror]:
    """Acquire the mirror of a run and restore what this machine lacks.

    Args:
        config: ``checkpoint.mirror`` is its URI.
        resume_from: As for ``train``.
        distributed: Only rank 0 uses the mirror.
        echo: Shows a message on the terminal.

    Raises:
        ConfigError: The mirror cannot be written, or is in use by another process.
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
        ownership, found = acquire(uri, echo)
    run = Mirror(resume_from, config, uri, ownership, found)
    try:
        if resume_from == "auto":
            with _translate_store_errors(root):
                restore_run(found, directory, echo)
        if not isinstance(resume_from, Path):
            if is_run(directory):
                echo(f"Resuming {directory}, mirrored to {uri}", "info")
            run.resume_from = directory
        yield run
    finally:
        run.close()


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
    earlier = latest_run(config, name) if resume_from == "auto" and not here else None
    if earlier is not None:  # started under an older schema, which gave it another id
        return earlier

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
    uri = canonical_uri(uri)
    folder, _, name = uri.rpartition("/")
    match = CHECKPOINT_NAME.fullmatch(name) if folder.endswith(f"/{CHECKPOINTS}") else None
    run_uri = uri if match is None else folder.removesuffix(f"/{CHECKPOINTS}")
    found = list_mirror(run_uri)
    lineage = found.lineage()
    if not lineage:
        raise ConfigError(
            "There is no mirrored run with a complete checkpoint at this URI", where=uri,
            hint="name the folder below checkpoint.mirror that has the run's id",
        )  # fmt: skip
    directory = Path(root or _mirrored_config(lineage[0]).run.directory) / run_uri.rpartition("/")[2]
    path = restore_run(found, directory, echo, step=None if match is None else int(match["step"]))
    return directory if match is None or path is None else path


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
