"""A run on disk: id, directory, lock, and the record of its attempts.

``runs/<run_id>/`` belongs to one configuration: the id is a readable part and eight digits of the configuration's
digest, so the same command finds the same run. The process that opens a run holds ``LOCK`` until it exits; a second
process is refused, with the holder's name. ``run.json`` records start, code, machine and outcome of every attempt;
``failure.json`` records why the last attempt failed.

An attempt at an existing run is recorded by ``begin``, once the run has accepted the configuration. A ``ConfigError``
before that leaves every file of the run as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from vorox.core import atomic
from vorox.core.config import config_digest, dump_yaml, load_config, model_label, slug
from vorox.core.disk_errors import disk_error
from vorox.core.distributed_context import DistributedContext
from vorox.core.environment import code_record, environment_record, git_record
from vorox.core.errors import ConfigError, Preempted, StalledError, VoroxError
from vorox.core.failure_record import failure_record
from vorox.core.lock import FileLock
from vorox.core.redaction import redact_arguments, redact_value
from vorox.core.run_layout import RunLayout, lock_run, run_of_checkpoint
from vorox.core.run_lookup import has_checkpoint, is_run, refuse_links, run_argument, saved_state
from vorox.core.run_matching import latest_run
from vorox.core.schema import RunConfig

RUN_FORMAT = "vorox-run/1"


def run_id(config: RunConfig) -> str:
    """Return the run id: a readable part and eight digits of the configuration's digest."""
    sources = "-".join(source.name for source in config.data.sources)
    readable = config.run.name or f"{model_label(config)}-{sources}"
    return f"{slug(readable)}-{config_digest(config)[:8]}"


def expected_directory(config: RunConfig, resume_from: str | Path) -> tuple[Path, bool]:
    """Return the directory that a run will use, as far as it is known before it is opened, and whether it exists."""
    if isinstance(resume_from, Path):
        return (run_of_checkpoint(resume_from) or resume_from), True
    existing = None if resume_from == "never" else latest_run(config, run_id(config))
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
        self.attempt = 1
        self.has_begun = False
        self.outcome = "finished"
        self._distributed, self._is_main = distributed, distributed.is_main
        self._lock = lock
        self._record: dict[str, Any] = {}
        self._failure: dict[str, Any] | None = None
        self._at_begin: list[Callable[[], None]] = []
        self._closed = False
        self._is_new = False
        if self._is_main:
            self._prepare_record(argv)

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
        directory = latest_run(config, name) or Path(config.run.directory) / name
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
            raise disk_error(error, str(directory)) or ConfigError(
                f"Run directory cannot be written: {error.strerror or error}",
                where=str(error.filename or directory),
                hint="set run.directory to a writable folder",
            ) from error
        except BaseException:
            _release(None, lock)
            raise

    def _prepare_record(self, argv: Sequence[str]) -> None:
        """Read the record of the run and add this attempt to it, in memory."""
        record = self._read_record()
        attempts = cast("list[dict[str, Any]]", record["attempts"])
        if attempts and attempts[-1]["outcome"] == "running":
            attempts[-1]["outcome"] = "killed"  # this process holds its lock, so it is dead
        self._failure = _read_json(self.layout.failure)
        if attempts and self._failure is not None:
            attempts[-1]["failure"] = self._failure
        self.attempt = len(attempts) + 1
        attempts.append(
            {
                "attempt": self.attempt, "started_at": _now(), "ended_at": None, "outcome": "running",
                "argv": redact_arguments(argv), "pid": os.getpid(), "working_directory": str(Path.cwd()),
                "config_digest": config_digest(self.config), "code": code_record(), "git": git_record(Path.cwd()),
                "environment": redact_value(environment_record()), "notes": {},
            }
        )  # fmt: skip
        self._record = record

    def begin(self) -> None:
        """Record this attempt, because the run has accepted it. Idempotent."""
        if self.has_begun:
            return
        self.has_begun = True
        try:
            if self._is_main:
                self._write_attempt()
        finally:
            for action in self._at_begin:
                action()

    def _write_attempt(self) -> None:
        atomic.sweep_temporary(self.directory)
        atomic.make_directory(self.layout.control)
        if not self.layout.config.exists():
            self.record_config()
        self._write_record()
        if self._failure is not None:
            atomic.remove_file(self.layout.failure)

    def at_begin(self, action: Callable[[], None]) -> None:
        """Call a function that writes to the run once the attempt begins: now, later, or never if it is refused."""
        if self.has_begun:
            action()
        else:
            self._at_begin.append(action)

    def begin_unless_refused(self, error: BaseException) -> bool:
        """Begin, so that the error which ends this attempt is recorded; return whether it has begun.

        A ``ConfigError`` before the attempt begins refuses it, and is not recorded.
        """
        if isinstance(error, ConfigError) and not self.has_begun:
            return False
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
            self.begin()
        return True

    def _read_record(self) -> dict[str, Any]:
        record = _read_json(self.layout.record)
        if record is None or record.get("format") != RUN_FORMAT or not isinstance(record.get("attempts"), list):
            if self.layout.record.exists():
                raise ConfigError(
                    "Record of the run is damaged",
                    where=str(self.layout.record),
                    hint="move the file away to start a new record; checkpoints and plan are not affected",
                )
            return {
                "format": RUN_FORMAT,
                "run_id": self.directory.name,
                "config_digest": config_digest(self.config),
                "created_at": _now(),
                "attempts": [],
            }
        return record

    def _write_record(self) -> None:
        atomic.write_file(self.layout.record, atomic.pretty_json(self._record))

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes the run."""
        return self._is_main

    @property
    def run_id(self) -> str:
        return self.directory.name

    # Record

    def record_config(self) -> None:
        """Write ``config.yaml``: this attempt's configuration becomes the run's."""
        if self._is_main:
            atomic.write_file(self.layout.config, dump_yaml(self.config).encode())

    def note(self, **values: Any) -> None:
        """Add plain values to the record of this attempt, such as determinism level and device."""
        if self._is_main:
            self._record["attempts"][-1]["notes"].update(redact_value(values))
            if self.has_begun:
                self._write_record()

    def record_failure(self, error: BaseException) -> None:
        """Write ``failure.json``. Never raises, so that the original error is reported."""
        if not self._is_main:
            return
        failure = {**failure_record(error), "attempt": self.attempt, "at": _now()}
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

    def _recorded_stall(self) -> StalledError | None:
        with contextlib.suppress(OSError, ValueError):
            failure: dict[str, Any] = json.loads(self.layout.failure.read_bytes())
            if (failure["attempt"], failure["exit_code"]) == (self.attempt, StalledError.exit_code):
                parts = {name: str(failure[name]) for name in ("where", "saved", "hint")}
                return StalledError(str(failure["what"]), **parts)
        return None

    def close(self, outcome: str) -> None:
        """End this attempt: finished, stopped, preempted, interrupted, failed or rolled_back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.begin()
            if self._is_main:
                self._record["attempts"][-1].update(ended_at=_now(), outcome=outcome)
                self._write_record()
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
            if self._is_new and not has_steps and not has_checkpoint(self.directory):
                self._closed = True
                _release(self.directory, self._lock)
            raise

    def __enter__(self) -> RunContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close(self.outcome)
            return
        if not self.begin_unless_refused(error):
            self._closed = True
            _release(None, self._lock)
            return
        outcome = "failed"
        if isinstance(error, Preempted):
            outcome = "preempted"
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
    return load_config(path, overrides)


def _release(directory: Path | None, lock: FileLock | None) -> None:
    """Remove the directory, if given, as far as the disk allows; then release the lock."""
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    if lock is not None:
        lock.release()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # other I/O errors do not mean that the file is damaged
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
