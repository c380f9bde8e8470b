"""A run on disk: id, directory, lock, and the beginning and end of an attempt.

``runs/<run_id>/`` belongs to one configuration: the id is a readable part and eight digits of the configuration's
digest, so the same command finds the same run. The process that opens a run holds ``LOCK`` until it exits; a second
process is refused, with the holder's name. ``run.json`` records start, code, machine and outcome of every attempt;
``failure.json`` records why the last attempt failed.

An attempt at an existing run is recorded by ``begin``, once the run has accepted the configuration. A ``ConfigError``
before that leaves every file of the run as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vorox.core.config import config_digest, config_values, dump_yaml, load_config, model_label, slug
from vorox.core.config.layers.overrides import parse_override
from vorox.core.config.locations import with_absolute_paths
from vorox.core.errors import (
    CheckpointError,
    ConfigError,
    OtherWeightsError,
    Preempted,
    StalledError,
    UnreadableCheckpointError,
    VoroxError,
    saved_of,
    set_saved,
)
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.file_holder import FileLock
from vorox.core.files.json_reader import read_json
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.redaction import MARK
from vorox.core.run_layout import RunLayout, lock_run, run_of_checkpoint, step_directories
from vorox.core.schema import RunConfig
from vorox.core.user_code.trusted_code import mark_recorded, state
from vorox.records.failure_record import failure_record
from vorox.records.log import time_stamp
from vorox.records.run_lookup import (
    CONFIG_NOTE,
    has_checkpoint,
    is_run,
    latest_run,
    refuse_links,
    run_argument,
    saved_state,
    short_path,
)
from vorox.records.run_record import RunRecord


def run_id(config: RunConfig) -> str:
    """Return the run id: a readable part and eight digits of the configuration's digest."""
    sources = "-".join(source.name for source in config.data.sources)
    readable = config.run.name or f"{model_label(config)}-{sources}"
    return f"{slug(readable)}-{config_digest(config)[:8]}"


def expected_directory(config: RunConfig, resume_from: str | Path) -> tuple[Path, bool]:
    """Return the directory that a run will use, as far as it is known before it is opened, and whether it exists."""
    if isinstance(resume_from, Path):
        return (run_of_checkpoint(resume_from) or resume_from), True
    existing = None if resume_from == "never" else latest_run(Path(config.run.directory), run_id(config))
    return (fresh_directory(config), False) if existing is None else (existing, True)


def fresh_directory(config: RunConfig) -> Path:
    """Return the directory of a new run of this configuration."""
    base = Path(config.run.directory) / run_id(config)
    directory, number = base, 2
    while is_run(directory):
        directory, number = base.with_name(f"{base.name}-{number}"), number + 1
    return directory


class RunContext:
    """An open run: the paths of its files, and the record of this attempt. Use it as a context manager.

    Attributes:
        directory: ``runs/<run_id>``, absolute.
        layout: The paths of its files.
        config: The configuration of this attempt.
        attempt: Number of this attempt, from 1; each start, resume or rollback is an attempt.
        has_begun: Whether this attempt may write to the run; a new run has begun when it is created.
        outcome: How the attempt ends if no error does.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        *,
        argv: Sequence[str],
        distributed: DistributedContext,
        lock: FileLock | None,
    ) -> None:
        self.directory, self.layout = directory, RunLayout(directory)
        self.config = config
        self.has_begun = False
        self.outcome = "finished"
        self._distributed, self._is_main = distributed, distributed.is_main
        self._lock = lock
        self._at_begin: list[Callable[[], None]] = []
        self._closed = False
        self._is_new = False
        self._record = RunRecord(self.layout, config, argv) if self._is_main else None
        self.attempt = 1 if self._record is None else self._record.attempt

    # Opening

    @classmethod
    def join(cls, directory: Path, config: RunConfig, attempt: int, distributed: DistributedContext) -> RunContext:
        """Open, on another rank, the run that rank 0 has opened. Writes nothing.

        Raises:
            ConfigError: The directory is not visible to this process.
        """
        if not directory.is_dir():
            raise ConfigError(
                "Run directory of rank 0 is not visible on this machine", where=str(directory),
                hint="set run.directory to a file system that all ranks share",
            )  # fmt: skip
        run = cls(directory, config, argv=(), distributed=distributed, lock=None)
        run.attempt = attempt
        return run

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        argv: Sequence[str] | None = None,
        distributed: DistributedContext | None = None,
    ) -> RunContext:
        """Create a new run directory; its name gets a number if the id exists.

        Raises:
            ConfigError: The directory cannot be written.
        """
        return cls._enter(fresh_directory(config), config, argv, distributed)

    @classmethod
    def open(
        cls,
        directory: Path,
        config: RunConfig | None = None,
        *,
        argv: Sequence[str] | None = None,
        distributed: DistributedContext | None = None,
        creates: bool = False,
    ) -> RunContext:
        """Open an existing run.

        Args:
            directory: Its directory.
            config: Default: its recorded configuration. Only ``record_config`` writes it, so that a refused resume
                changes nothing.
            creates: Create the run if its directory does not exist.

        Raises:
            ConfigError: The run does not exist, is in use by another process, or cannot be written.
        """
        if not creates and not directory.is_dir():
            raise ConfigError("Run directory does not exist", where=str(directory))
        chosen = config if config is not None else recorded_config(directory)
        return cls._enter(directory, chosen, argv, distributed)

    @classmethod
    def open_or_create(
        cls,
        config: RunConfig,
        *,
        argv: Sequence[str] | None = None,
        distributed: DistributedContext | None = None,
    ) -> RunContext:
        """Open the latest run of this configuration, or create one. A second process is refused."""
        name = run_id(config)
        root = Path(config.run.directory)
        directory = latest_run(root, name) or root / name
        return cls._enter(directory, config, argv, distributed)

    @classmethod
    def _enter(
        cls,
        directory: Path,
        config: RunConfig,
        argv: Sequence[str] | None,
        distributed: DistributedContext | None,
    ) -> RunContext:
        distributed = distributed or DistributedContext()
        directory = directory.absolute()  # independent of later changes of the working directory
        lock: FileLock | None = None
        is_new = distributed.is_main and not directory.exists()
        try:
            if distributed.is_main:
                atomic.make_directory(directory)
                refuse_links(directory)
                lock = lock_run(directory).acquire()
            run = cls(directory, config, argv=sys.argv if argv is None else argv, distributed=distributed, lock=lock)
            run._is_new = is_new
            if is_new:
                run.begin()
            return run
        except OSError as error:
            _release(directory if is_new else None, lock)
            error.filename = error.filename or str(directory)  # a failed read or lock names none
            raise disk_error(error, str(directory)) or ConfigError(
                f"Run directory cannot be written: {error.strerror or error}",
                where=str(error.filename or directory),
                hint="set run.directory to a writable folder",
            ) from error
        except BaseException:
            _release(None, lock)
            raise

    def begin(self) -> None:
        """Record this attempt, because the run has accepted it. Idempotent."""
        if self.has_begun:
            return
        self.has_begun = True
        try:
            if self._record is not None:
                atomic.sweep_temporary(self.directory)
                atomic.make_directory(self.layout.control)
                if not self.layout.config.exists():
                    self.record_config()
                self._record.begin()
        finally:
            for action in self._at_begin:
                action()

    def at_begin(self, action: Callable[[], None]) -> None:
        """Call a function that writes to the run once the attempt begins: now, later, or never if it is refused."""
        if self.has_begun:
            action()
        else:
            self._at_begin.append(action)

    def begin_unless_refused(self, error: BaseException) -> bool:
        """Begin, so that the error which ends this attempt is recorded; return whether it has begun.

        A ``ConfigError`` before the attempt begins, or a base with other weights, refuses it, and is not recorded.
        """
        if isinstance(error, ConfigError | OtherWeightsError) and not self.has_begun:
            return False
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
            self.begin()
        return True

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes the run."""
        return self._is_main

    @property
    def is_new(self) -> bool:
        """Whether this process has created the run's directory."""
        return self._is_new

    @property
    def run_id(self) -> str:
        return self.directory.name

    # Record

    def record_config(self, config: RunConfig | None = None) -> None:
        """Write ``config.yaml``: this attempt's configuration, or the given one, becomes the run's."""
        if self._is_main:
            content = dump_yaml(config or self.config).encode()
            atomic.write_file(self.layout.config, content)
            self.note(**{CONFIG_NOTE: hashlib.sha256(content).hexdigest()})

    def note(self, **values: Any) -> None:
        """Add plain values to the record of this attempt, such as determinism level and device."""
        if self._record is not None:
            self._record.add_notes(values)
            if self.has_begun:
                self._record.write()

    def note_later(self, **values: Any) -> None:
        """Add plain values, written with the next ``note`` or when this attempt ends: ``run.json`` has all attempts."""
        if self._record is not None:
            self._record.add_notes(values)

    def keep_lock(self) -> bool:
        """Lock the run again if somebody removed its ``LOCK``; return whether somebody had.

        Raises:
            ConfigError: Another process trains in this directory now.
        """
        try:
            return self._lock is not None and self._lock.reacquire_if_removed()
        except OSError:  # the file system fails for a moment; the next save asks again
            return False

    def record_failure(self, error: BaseException) -> None:
        """Write ``failure.json``. Never raises, so that the original error is reported."""
        if not self._is_main or self._recorded_stall():
            return  # a watchdog ends the ranks, so what they report after its record is a consequence
        failure = {**failure_record(error), "attempt": self.attempt, "at": time_stamp()}
        with contextlib.suppress(OSError):
            atomic.write_file(self.layout.failure, atomic.pretty_json(failure), private=True)

    @contextlib.contextmanager
    def explaining_lost_ranks(self) -> Generator[None]:
        """Replace a framework's error because another rank has ended: by the stall that ended it, if one is recorded.

        Raises:
            StalledError: A watchdog has ended this attempt.
            VoroxError: The rank ended for another reason.
        """
        try:
            yield
        except RuntimeError as error:
            lost = self._distributed.lost_rank(error)
            if lost is None:
                raise
            lost.saved = saved_state(self.layout)
            raise self._recorded_stall() or lost from error

    @contextlib.contextmanager
    def explaining_moved_directory(self) -> Generator[None]:
        """Replace an error of the disk if the run directory is not there any more.

        Raises:
            CheckpointError: It was moved or removed.
        """
        try:
            yield
        except (OSError, CheckpointError) as error:
            place = self._moved_to()
            if place is not None:
                raise CheckpointError(
                    f"The run directory was moved to {place} while the run trained", where=str(self.directory),
                    saved=saved_state(RunLayout(place)) or "nothing yet",
                    hint=f"continue the run there: vorox train --resume {run_argument(place)}; or move it back and run "
                    "the same command again",
                ) from error  # fmt: skip
            if self.directory.exists():
                raise
            raise CheckpointError(
                "The run directory was moved or removed while the run trained", where=str(self.directory),
                saved=saved_of(error),
                hint="if it was moved, continue the run where it is now: vorox train --resume DIRECTORY",
            ) from error  # fmt: skip

    def _moved_to(self) -> Path | None:
        """Return where the run directory is now if it was moved; ``None`` if that is not known."""
        place = None if self._lock is None else self._lock.moved_to()
        is_run_lock = place is not None and place.name == self.layout.lock.name
        return place.parent if place is not None and is_run_lock else None

    def _recorded_stall(self) -> StalledError | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            failure: dict[str, Any] = read_json(self.layout.failure, dict)
            if (failure["attempt"], failure["exit_code"]) == (self.attempt, StalledError.exit_code):
                parts = {name: str(failure[name]) for name in ("where", "saved", "hint")}
                return StalledError(str(failure["what"]), **parts)
        return None

    def close(self, outcome: str) -> None:
        """End this attempt: finished, stopped, interrupted, failed or rolled_back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.begin()
            if self._record is not None:
                self._record.end(outcome)
        finally:
            if self._lock is not None:
                self._lock.release()

    @contextlib.contextmanager
    def removing_if_refused(self) -> Generator[None]:
        """Remove a directory created by this process if the run is refused or stopped before its first step is done."""
        try:
            yield
        except (VoroxError, KeyboardInterrupt):
            # The chain is buffered; metrics of step 1 and records of non-finite steps are not.
            evidence = (self.layout.chain, self.layout.metrics, self.layout.nonfinite)
            has_steps = any(path.exists() and path.stat().st_size for path in evidence)
            if self._is_new and self._moved_to() is None and not has_steps and not has_checkpoint(self.directory):
                self._closed = True
                _release(self.directory, self._lock)
            raise

    def __enter__(self) -> RunContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self.explaining_moved_directory():
                self.close(self.outcome)
            return
        with contextlib.suppress(OSError):
            set_saved(error, saved_state(self.layout))
        if not self.begin_unless_refused(error):
            self._closed = True
            _release(None, self._lock)
            return
        outcome = "failed"
        if isinstance(error, Preempted):
            outcome = "stopped"
        elif isinstance(error, KeyboardInterrupt):
            outcome = "interrupted"
        elif not self._closed:
            self.record_failure(error)
        with contextlib.suppress(OSError):
            self.close(outcome)


def recorded_config(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the recorded configuration of a run, under overrides.

    Raises:
        ConfigError: It is missing or invalid.
    """
    path = RunLayout(directory).config
    if not path.exists():
        hint = f"restore the file, or name the configuration: vorox train CONFIG --resume {run_argument(directory)}"
        raise ConfigError("config.yaml of the run is missing", where=str(path), hint=hint)
    found = with_absolute_paths(read_config(directory, overrides))
    state([parse_override(text).value for text in overrides])
    mark_recorded(config_values(found), directory)
    return found


def read_config(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return what ``config.yaml`` of a run says now, under overrides; its functions are not trusted by that.

    Raises:
        ConfigError: The file is damaged; or an override is wrong.
    """
    layout = RunLayout(directory)
    try:
        return load_config(layout.config, overrides)
    except ConfigError as error:
        if overrides:
            read_config(directory)  # else an override is what is wrong
            raise
        is_empty = layout.config.is_file() and not layout.config.read_bytes().strip(b"\0 \n")
        raise ConfigError(
            "config.yaml of the run is empty" if is_empty else f"config.yaml of the run is damaged: {error.what}",
            where=str(layout.config) if is_empty else error.where or str(layout.config), saved=saved_state(layout),
            hint=_restore_config(layout),
        ) from error  # fmt: skip


def _restore_config(layout: RunLayout) -> str:
    """Return how to restore ``config.yaml``: from the newest checkpoint, whose manifest has it, or from a copy."""
    checkpoints: Iterable[Path] = ()
    with contextlib.suppress(UnreadableCheckpointError):
        checkpoints = reversed(step_directories(layout.directory).values())
    for path in checkpoints:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            settings = read_json(path / MANIFEST_NAME, dict)["metadata"]["settings"]
            if MARK in str(settings):
                continue  # without its secrets
            manifest, config = json.dumps(short_path(path / MANIFEST_NAME)), json.dumps(short_path(layout.config))
            code = (
                f'import json; s = json.load(open({manifest}))["metadata"]["settings"]; '
                f'json.dump(s, open({config}, "w"), indent=1)'
            )
            return f"restore it from the checkpoint: python -c {shlex.quote(code)}; then run the same command again"
    return f"restore {layout.config.name} from a copy of the run"


def _release(directory: Path | None, lock: FileLock | None) -> None:
    """Remove the directory, if given, as far as the disk allows; then release the lock."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    if lock is not None:
        lock.release()
