"""Opening a run that has a mirror: where it lies, whether the store is ahead, and the copying while it runs.

``open_mirror`` goes around the opening of the run directory. Before: the mirror is taken over (or the run is refused),
and what this machine lacks is brought back. Inside: ``following`` copies checkpoints in the background. After: the
record of how the run ended goes up, and the mirror is let go. Without ``checkpoint.mirror`` all of it is nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vorox.core import atomic
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
from vorox.training.checkpoint_store import steps_to_keep
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

CLOSE_SECONDS = 20.0
"""For the record of how the run ended, and for letting the mirror go."""

ResumeFrom = Literal["auto", "never"] | Path


@dataclass(slots=True)
class Mirror:
    """A run and its mirror, if it has one.

    Attributes:
        resume_from: What the run is to be opened from, now that the mirror has been asked.
    """

    resume_from: ResumeFrom
    _config: RunConfig
    _uri: str = ""
    _ownership: Ownership | None = None
    _found: Contents | None = None
    _uploader: Uploader | None = None

    def committed(self, path: Path) -> None:
        """A checkpoint was committed; constant time, from any thread."""
        if self._uploader is not None:
            self._uploader.committed(path)

    def removed(self, path: Path) -> None:
        """A checkpoint was removed; constant time, from any thread."""
        if self._uploader is not None:
            self._uploader.removed(path)

    def metrics(self) -> dict[str, float]:
        return {} if self._uploader is None else self._uploader.metrics()

    @contextlib.contextmanager
    def following(self, directory: Path, step: int, losses: Mapping[int, float], log: RunLog) -> Generator[None]:
        """While inside, checkpoints go to the mirror; at the end the last ones are waited for, within bounds.

        Args:
            directory: The run; this process holds its lock.
            step: Finished steps of the state that it goes on from.
            losses: Validation losses by step, for the retention.
            log: Told about everything.
        """
        if self._ownership is None or self._found is None:
            yield
            return
        checkpoint = self._config.checkpoint
        self._uploader = Uploader(
            self._uri, directory, self._ownership, self._found, base_step=step, log=log,
            keep=lambda steps: steps_to_keep(steps, checkpoint, losses),
        )  # fmt: skip
        self._mirror_what_is_here(self._uploader, directory, step)
        try:
            yield
        except VoroxError as error:
            there = self._uploader.settle(checkpoint.mirror_wait_seconds)
            error.saved = f"{error.saved}; {there}" if error.saved else there
            raise
        there = self._uploader.settle(checkpoint.mirror_wait_seconds)
        log.event("mirror_settled", there[0].upper() + there[1:], level="warning" if "NOT" in there else "info")

    def _mirror_what_is_here(self, uploader: Uploader, directory: Path, step: int) -> None:
        """Have the state that the run goes on from mirrored, if it is not."""
        assert self._found is not None
        path = RunLayout(directory).checkpoint(step)
        if path.exists() and step not in {entry.step for entry in self._found.lineage()}:
            uploader.committed(path)

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close(CLOSE_SECONDS)
        if self._ownership is not None:
            self._ownership.release(CLOSE_SECONDS)


@contextlib.contextmanager
def open_mirror(
    config: RunConfig, resume_from: ResumeFrom, distributed: DistributedContext, tell: Echo
) -> Generator[Mirror]:
    """Take over the mirror of a run and bring back what this machine lacks.

    Args:
        config: ``checkpoint.mirror`` says where it is.
        resume_from: As for ``train``.
        distributed: Only the main process of a run does anything.
        tell: Shows a message to the person at the terminal.

    Raises:
        ConfigError: The mirror cannot be written, or is in use by another process.
        CheckpointError: It cannot be reached, or nothing valid is in it.
    """
    place = config.checkpoint.mirror
    if place is None or not distributed.is_main:
        yield Mirror(resume_from, config)
        return
    with _as_ours(place):
        check_writable(place)
        place = canonical_uri(place)
        directory = _directory(config, resume_from, place)
        uri = f"{place}/{directory.name}"
        ownership, found = acquire(uri, tell)
    run = Mirror(resume_from, config, uri, ownership, found)
    try:
        if resume_from == "auto":
            with _as_ours(place):
                restore_run(found, directory, tell)
        if not isinstance(resume_from, Path):
            tell(f"{'Going on' if is_run(directory) else 'Writing'} in {directory}, mirrored to {uri}", "info")
            atomic.make_directory(directory)
            run.resume_from = directory
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def _as_ours(place: str) -> Generator[None]:
    """What a store says against the mirror is said of the setting, and whether it may pass by itself."""
    try:
        yield
    except StoreUnreachable as error:
        raise CheckpointError(
            f"the mirror cannot be reached, and whether it is ahead of this machine is unknown: {error.what}",
            where=error.where, hint="run the same command again, or train without: checkpoint.mirror=null",
        ) from error  # fmt: skip
    except DataError as error:
        raise ConfigError(
            f"checkpoint.mirror={place} cannot be used: {error.what}", where=error.where, hint=error.hint
        ) from error
    except ConfigError as error:
        error.where = error.where or "checkpoint.mirror"
        raise


def _directory(config: RunConfig, resume_from: ResumeFrom, place: str) -> Path:
    """The run directory, by what is here and what is in the store."""
    if isinstance(resume_from, Path):
        path = resume_from.absolute()
        return run_of_checkpoint(path) or path
    root, name = Path(config.run.directory), run_id(config)
    here = [path.name.removeprefix(name).removeprefix("-") for path in same_run_directories(root, name)]
    number = max((int(suffix or 1) for suffix in here), default=0)
    earlier = latest_run(config, name) if resume_from == "auto" and not here else None
    if earlier is not None:  # it began before the schema had all of today's settings, which gave it another id
        return earlier

    def numbered(number: int) -> str:
        return name if number == 1 else f"{name}-{number}"

    while list_objects(f"{place}/{numbered(number + 1)}"):
        number += 1
    return root / numbered(max(1, number) if resume_from == "auto" else number + 1)


def resume_from_store(uri: str, root: str | None, tell: Echo) -> Path:
    """Bring a mirrored run to this machine, to go on with it.

    Args:
        uri: The run's folder in a store, or one of its checkpoints.
        root: Where run directories are; ``None``: where the run itself says.
        tell: Told what was brought, and what was passed over.

    Returns:
        The run directory; of one checkpoint, its path.

    Raises:
        ConfigError: There is no mirrored run, or what is here is another line of work.
        CheckpointError, DataError: As ``restore_run``.
    """
    uri = canonical_uri(uri)
    folder, _, name = uri.rpartition("/")
    match = CHECKPOINT_NAME.fullmatch(name) if folder.endswith(f"/{CHECKPOINTS}") else None
    run_uri = uri if match is None else folder.removesuffix(f"/{CHECKPOINTS}")
    found = list_mirror(run_uri)
    line = found.lineage()
    if not line:
        raise ConfigError(
            "there is no mirrored run with a whole checkpoint", where=uri,
            hint="name the folder below checkpoint.mirror that has the run's id",
        )  # fmt: skip
    directory = Path(root or _recorded(line[0]).run.directory) / run_uri.rpartition("/")[2]
    path = restore_run(found, directory, tell, step=None if match is None else int(match["step"]))
    return directory if match is None or path is None else path


def _recorded(checkpoint: MirroredCheckpoint) -> RunConfig:
    """The configuration that a mirrored run was made with."""
    assert checkpoint.record is not None
    with tempfile.TemporaryDirectory() as folder:
        file = RunLayout(Path(folder)).config
        file.write_bytes(read_object(checkpoint.record[file.name]))
        return load_config(file)


def mirror_uri(directory: Path) -> str | None:
    """Where the mirror of a run on this machine is; ``None`` if it has none, or its record cannot be read."""
    try:
        place = recorded_config(directory).checkpoint.mirror
        return None if place is None else f"{canonical_uri(place)}/{directory.resolve().name}"
    except ConfigError:
        return None  # of another version


def silent_echo(text: str, level: Level = "info") -> None:
    """The echo of a command that says by itself what it did."""


def remove_mirror(uri: str) -> int:
    """Remove everything that the mirror of a run holds; returns the bytes that it held.

    Raises:
        ConfigError: A process writes to it.
    """
    ownership, found = acquire(uri, silent_echo)
    ownership.release(CLOSE_SECONDS)
    if ownership.lost:
        raise ConfigError("another process has taken over this mirror", where=uri, hint="see what writes to it")
    size_bytes = 0
    for entry in found.checkpoints:
        for file in entry.objects():
            size_bytes += file.size_bytes
            remove_object(file.uri)
    for file in list_mirror(uri).others.values():
        size_bytes += file.size_bytes
        remove_object(file.uri)
    return size_bytes
