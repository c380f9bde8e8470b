"""Checkpoints of a run: when one is due, how it is written, which are kept, and which one is read.

``checkpoints/step-00001000`` holds what the engine wrote, ``state.json`` (progress, horizon) and, where transformers
knows the architecture, what makes the directory a Hugging Face model. It appears whole or not at all
(``core.atomic.StagedDirectory``), carries a hash of every byte, and is read back before an older one goes. "Latest"
is the highest step that verifies, never a clock or a pointer file. A corrupt one is renamed, never deleted, and the
one before it is taken, loudly.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from vorox.core import atomic
from vorox.core.atomic import Buffer, HashingWriter, StagedDirectory
from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError
from vorox.core.log import RunLog
from vorox.core.records import Progress
from vorox.core.schema import CheckpointConfig
from vorox.training.ledger import Ledger
from vorox.training.schedule import Horizon

DIRECTORY_NAME = "checkpoints"
STATE_NAME = "state.json"
STATE_FORMAT = "vorox-state/1"
_STEP = re.compile(r"step-(\d{8,})")
_SET_ASIDE = re.compile(r"step-(\d{8,})\.(corrupt|replaced)-\d+")


class Checkpoint(NamedTuple):
    """A committed checkpoint and the metadata of its manifest."""

    path: Path
    metadata: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds besides the engine's state.

    Attributes:
        progress: How far the run is.
        horizon: The length of the run as fixed at its start.
        nonfinite_in_a_row: Steps up to this one whose loss or gradient was not finite.
    """

    progress: Progress
    horizon: Horizon
    nonfinite_in_a_row: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "progress": self.progress.to_json(),
            "horizon": self.horizon.to_json(),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }


def read_state(checkpoint: Path) -> RunState:
    """The state of a verified checkpoint.

    Raises:
        CheckpointError: It was written by another version of Vorox.
    """
    path = checkpoint / STATE_NAME
    value = json.loads(path.read_bytes())
    if value.get("format") != STATE_FORMAT:
        raise CheckpointError(f"the state has format {value.get('format')}, not {STATE_FORMAT}", where=str(path))
    return RunState(
        Progress.from_json(value["progress"]), Horizon.from_json(value["horizon"]), int(value["nonfinite_in_a_row"])
    )


def checkpoint_path(run_directory: Path, step: int) -> Path:
    return run_directory / DIRECTORY_NAME / f"step-{step:08d}"


def step_directories(run_directory: Path) -> dict[int, Path]:
    """Every directory that has a checkpoint's name, by step, whatever state it is in."""
    found: dict[int, Path] = {}
    parent = run_directory / DIRECTORY_NAME
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def verify(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint.

    Raises:
        CheckpointError: Anything is missing, changed or unreadable, or it lies under another step's name.
    """
    try:
        checkpoint = Checkpoint(path, atomic.verify_directory(path))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(error.filename or path)) from error
    match = _STEP.fullmatch(path.name)
    if match and checkpoint.metadata.get("step") != int(match[1]):
        raise CheckpointError(f"this is the checkpoint of step {checkpoint.metadata.get('step')}", where=str(path))
    return checkpoint


def latest_valid(
    run_directory: Path,
    *,
    at_or_before: int | None = None,
    on_corrupt: Callable[[Path, CheckpointError], None] | None = None,
) -> Checkpoint | None:
    """The checkpoint of the highest step that verifies; ``None`` if the run never made one.

    Args:
        run_directory: The run.
        at_or_before: Consider only steps up to this one.
        on_corrupt: Told of every corrupt one that is passed over. Whoever owns the run puts it aside (``quarantine``).

    Raises:
        CheckpointError: There are checkpoints but none is valid.
    """
    directories = step_directories(run_directory)
    failures: list[CheckpointError] = []
    for step in sorted(directories, reverse=True):
        if at_or_before is not None and step > at_or_before:
            continue
        try:
            return verify(directories[step])
        except CheckpointError as error:
            failures.append(error)
            if on_corrupt is not None:
                on_corrupt(directories[step], error)
    if failures or (at_or_before is None and _corrupt_before(run_directory)):
        raise CheckpointError(
            "no checkpoint of this run is valid: " + ("; ".join(map(str, failures)) or "all were put aside"),
            where=str(run_directory / DIRECTORY_NAME),
            hint="restore one from a copy, or start again with --resume never",
        )
    return None


def _corrupt_before(run_directory: Path) -> bool:
    parent = run_directory / DIRECTORY_NAME
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    return any((match := _SET_ASIDE.fullmatch(name)) is not None and match[2] == "corrupt" for name in names)


def set_aside(path: Path, why: str, note: str) -> Path:
    """Rename a checkpoint so that nobody takes it, and leave a note in it; ``why`` is ``corrupt`` or ``replaced``."""
    number = 1
    while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    atomic.rename(path, target)
    with contextlib.suppress(OSError):  # the note is a courtesy; the disk may be the reason
        atomic.write_file(target / "REASON.txt", (note + "\n").encode())
    return target


def quarantine(log: RunLog) -> Callable[[Path, CheckpointError], None]:
    """For ``latest_valid``: put corrupt checkpoints aside and say so."""

    def put_aside(path: Path, error: CheckpointError) -> None:
        target = set_aside(path, "corrupt", str(error))
        log.event(
            "checkpoint_corrupt",
            f"checkpoint {path.name} is corrupt, renamed to {target.name} ({error}); falling back to the one before",
            level="warning",
            renamed_to=str(target),
            reason=str(error),
        )

    return put_aside


def request_save(run_directory: Path) -> None:
    """Ask the process that trains this run for a checkpoint after its current step."""
    control = run_directory / "control"
    atomic.make_directory(control)
    atomic.write_file(control / "save", b"")


class Checkpointer:
    """Writes and retains the checkpoints of one running process.

    Args:
        run_directory: The run; this process holds its lock.
        config: When, and what is kept.
        horizon: Length of the run, kept in every state.
        describe: What goes into the manifest besides what this class knows (spec, config digest, environment, ...).
        companions: Files that go into every checkpoint as they are (``config.json``, tokenizer).
        eval_losses: Validation losses by step, filled by the loop; decides about the best.
        saved_step: Step of the checkpoint that the process started from.
        log: Told about every event.
        clock: Seconds that only rise.
    """

    def __init__(
        self,
        run_directory: Path,
        config: CheckpointConfig,
        horizon: Horizon,
        *,
        describe: Mapping[str, Any],
        companions: Mapping[str, bytes],
        eval_losses: Mapping[int, float],
        saved_step: int | None,
        log: RunLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_directory, self._config, self._horizon = run_directory, config, horizon
        self._describe, self._companions, self._eval_losses = describe, companions, eval_losses
        self._log, self._clock = log, clock
        self._control = run_directory / "control" / "save"
        self._saved_step, self._saved_at = saved_step, clock()
        atomic.make_directory(run_directory / DIRECTORY_NAME)
        for left in atomic.sweep_temporary(run_directory / DIRECTORY_NAME):
            log.event("checkpoint_swept", f"removed {left.name}, which an interrupted save had left")

    def due(self, progress: Progress) -> bool:
        """Whether to save now: the step, the time since the last save, the end, or somebody asked."""
        config = self._config
        if progress.step == self._saved_step:
            self._control.unlink(missing_ok=True)
            return False
        return (
            (config.every_steps is not None and progress.step % config.every_steps == 0)
            or (config.every_seconds is not None and self._clock() - self._saved_at >= config.every_seconds)
            or (config.at_end and progress.step >= self._horizon.total_steps)
            or self._control.exists()
        )

    def save(self, engine: Engine, progress: Progress, ledger: Ledger) -> Path:
        """Commit a checkpoint of this very moment, then let old ones go.

        Args:
            engine: Stands after step ``progress.step``.
            progress: With the head of the replay chain.
            ledger: Settled up to this step; made durable first.

        Raises:
            CheckpointError: It could not be written; every older one is as it was.
        """
        path = checkpoint_path(self._run_directory, progress.step)
        if progress.step == self._saved_step:
            return path
        if path.exists():
            aside = set_aside(path, "replaced", "the run resumed from an earlier step and came by again")
            self._log.event("checkpoint_replaced", f"an older {path.name} was renamed to {aside.name}", level="warning")
        try:
            ledger.make_durable()
            with StagedDirectory(path) as directory:
                engine.save(directory)
                for name, data in sorted(self._companions.items()):
                    directory.write(name, data)
                state = RunState(progress, self._horizon, ledger.nonfinite_in_a_row)
                directory.write(STATE_NAME, atomic.pretty_json(state.to_json()))
                directory.commit(self._metadata(engine, progress))
        except OSError as error:
            raise self._failure(engine, progress.step, error) from error
        self._saved_step, self._saved_at = progress.step, self._clock()
        self._control.unlink(missing_ok=True)
        self._retain(path)
        return path

    def seconds_since_save(self) -> float | None:
        """How long ago this process saved, or began from a checkpoint; ``None`` if it did neither."""
        return None if self._saved_step is None else self._clock() - self._saved_at

    def safe(self) -> str:
        """What is on disk by now, for people."""
        step = max(step_directories(self._run_directory), default=None)
        return "nothing yet" if step is None else f"training state up to step {step:,} is safe in step-{step:08d}"

    def _metadata(self, engine: Engine, progress: Progress) -> dict[str, Any]:
        losses = self._eval_losses.items()
        known = {step: loss for step, loss in losses if step <= progress.step and math.isfinite(loss)}
        last = max(known, default=None)
        return {
            **self._describe,
            "step": progress.step,
            "horizon": self._horizon.to_json(),
            "num_tokens": progress.num_tokens,
            "fingerprint": engine.fingerprint(),
            "chain": progress.chain,
            "plan_digest": progress.cursor.plan_digest,
            "plan_events": progress.cursor.plan_events,
            "eval": None if last is None else {"step": last, "loss": known[last]},
        }

    def _retain(self, newest: Path) -> None:
        directories = step_directories(self._run_directory)
        keep = steps_to_keep(sorted(directories), self._config, self._eval_losses)
        leaving = [path for step, path in directories.items() if step not in keep]
        if not leaving:
            return
        verify(newest)  # nothing goes before its successor has been read back
        for path in leaving:
            try:
                atomic.remove_directory(path)
            except OSError as error:
                message = f"{path.name} should go but cannot be removed: {error.strerror}"
                self._log.event("checkpoint_kept", message, level="warning")

    def _failure(self, engine: Engine, step: int, error: OSError) -> CheckpointError:
        path = checkpoint_path(self._run_directory, step)
        saved = self.safe()
        if not atomic.is_disk_full(error):
            what = f"the checkpoint of step {step:,} cannot be written: {error.strerror}"
            return CheckpointError(what, where=str(error.filename or path), hint="repair and resume", saved=saved)
        needed_bytes = state_bytes(engine) + sum(map(len, self._companions.values()))
        free_bytes = shutil.disk_usage(self._run_directory).free
        return CheckpointError(
            f"no room for the checkpoint of step {step:,}: it needs at least {needed_bytes:,} bytes, "
            f"{free_bytes:,} are free",
            where=str(path),
            hint="free some space (vorox checkpoints remove), then resume",
            saved=saved,
        )


def steps_to_keep(steps: list[int], config: CheckpointConfig, eval_losses: Mapping[int, float]) -> set[int]:
    """Which of these checkpoints the retention rules keep."""
    keep = set(steps[-config.keep_last :])
    best = sorted((eval_losses[step], step) for step in steps if math.isfinite(eval_losses.get(step, math.nan)))
    keep.update(step for _, step in best[: config.keep_best])
    if config.keep_every_steps is not None:
        keep.update(step for step in steps if step % config.keep_every_steps == 0)
    return keep


class _ByteCounter:
    """Stands in for a staged directory where only the size matters."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def write(self, name_or_data: str | Buffer, data: Buffer = b"") -> int:
        count = memoryview(data if isinstance(name_or_data, str) else name_or_data).nbytes
        self.size_bytes += count
        return count

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[HashingWriter]:  # noqa: ARG002 - the shape of StagedDirectory.open
        yield cast(HashingWriter, self)


def state_bytes(engine: Engine) -> int:
    """Bytes of the engine's state on disk, without writing any."""
    counter = _ByteCounter()
    engine.save(cast(StagedDirectory, counter))
    return counter.size_bytes
