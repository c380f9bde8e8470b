"""The replay chain: one hash per step over its batch, loss and gradient norm (``chain.jsonl``).

    chain(N) = blake2b-256(chain(N-1) | N | batch digest | loss bits | gradient norm bits)

Beside it, ``states.jsonl`` chains the fingerprints of the whole state at checkpoints, and keeps them when retention
removes a checkpoint. It has links of its own, because checkpoints may depend on the clock, and a step never does:

    states(N) = blake2b-256(states before | N | chain(N) | fingerprint)

Two runs with the same head computed the same steps on the same rows with the same numbers, bit for bit. Steps count
from 1; the line of step N holds the head that checkpoint N records. Every step is in the chain, logged or not.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vorox.core.batch import Progress
from vorox.core.engine import StepValues
from vorox.core.errors import CheckpointError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.json_lines import StepHistory, last_record, read_history
from vorox.core.files.json_reader import MAX_STEP
from vorox.core.run_layout import RunLayout

_NOT_A_NUMBER = "7ff8000000000000"
_HEX = re.compile("[0-9a-f]+")
_LENGTHS = {"batch": 64, "loss": 16, "grad_norm": 16, "chain": 64}
"""Digits of the fields of an entry."""


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """The entry of one step. Numbers are IEEE double bits in hex, big-endian."""

    step: int
    batch: str
    loss: str
    grad_norm: str
    chain: str

    @classmethod
    def following(cls, previous: str, step: int, batch_digest: str, values: StepValues) -> ChainEntry:
        loss, grad_norm = bits(values.loss), bits(values.grad_norm)
        return cls(step, batch_digest, loss, grad_norm, link(previous, step, batch_digest, loss, grad_norm))


def link(previous: str, step: int, batch: str, loss: str, grad_norm: str) -> str:
    """Return the head after a step, given the previous head."""
    payload = canonical_json([previous, step, batch, loss, grad_norm])
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


def bits(value: float) -> str:
    """Return the bits of a float in hex; all NaN are equal, because their payload has no meaning."""
    return _NOT_A_NUMBER if math.isnan(value) else struct.pack(">d", value).hex()


def number(text: str) -> float:
    """Return the float of ``bits``."""
    return struct.unpack(">d", bytes.fromhex(text))[0]


class ReplayChain:
    """The chain of a running process.

    Args:
        run_directory: The run.
        progress: The state that the process starts from; ``check_chain`` has compared it with the file.
        writes: Whether this rank writes the file; the others keep only the head.
    """

    def __init__(self, run_directory: Path, progress: Progress, *, writes: bool = True) -> None:
        path = RunLayout(run_directory).chain
        self._history = StepHistory(path if writes else None, progress.step)
        self.head = progress.chain

    def record(self, step: int, batch_digest: str, values: StepValues) -> None:
        """Append a step. Steps come in order."""
        entry = ChainEntry.following(self.head, step, batch_digest, values)
        self._history.append({name: getattr(entry, name) for name in ChainEntry.__slots__})
        self.head = entry.chain

    def flush(self) -> None:
        """Make every recorded step durable; raises ``OSError`` if the disk is full or failed."""
        self._history.flush()


class StateChain:
    """The chain of states of a running process (``states.jsonl``); on the main rank.

    Args:
        run_directory: The run.
        step: The step that the process starts from; later states are void once it records one.
    """

    def __init__(self, run_directory: Path, step: int) -> None:
        self._path, self._step = RunLayout(run_directory).states, step
        self._history: StepHistory | None = None
        self._head = ""

    def record(self, progress: Progress, fingerprint: str) -> None:
        """Append the state after a step, durably.

        Raises:
            OSError: The disk is full or failed.
        """
        if self._history is None:
            before = last_record(self._path, self._step)
            self._head = "" if before is None else str(before.get("states"))
            self._history = StepHistory(self._path, self._step)
        head = _state_link(self._head, progress.step, progress.chain, fingerprint)
        entry = {"step": progress.step, "chain": progress.chain, "state": fingerprint, "states": head}
        self._history.append(entry)
        self._history.flush()
        self._head = head


class RecordedState(NamedTuple):
    """The state after a step, as ``states.jsonl`` has it.

    Attributes:
        chain: Head of the replay chain at the step.
        fingerprint: Of the state.
        states: Head of the chain of states.
    """

    chain: str
    fingerprint: str
    states: str


def read_states(run_directory: Path, last_step: int = MAX_STEP) -> dict[int, RecordedState]:
    """Return the recorded states up to a step, by step.

    Raises:
        CheckpointError: The disk failed.
        DataError: The file cannot be read, or a state does not follow from the previous one.
    """
    path, head, found = RunLayout(run_directory).states, "", dict[int, RecordedState]()
    records = _read(path, "Chain of states", "move it away to compare kept checkpoints only")
    for step, record in records.items():
        if step > last_step:
            break
        chain, state = str(record.get("chain")), str(record.get("state"))
        if record.get("states") != _state_link(head, step, chain, state):
            raise DataError(
                f"State of step {step:,} does not follow from the previous one", where=str(path),
                hint="the file was changed; restore it from a copy, or move it away to compare kept checkpoints only",
            )  # fmt: skip
        head = str(record["states"])
        found[step] = RecordedState(chain, state, head)
    return found


def _state_link(previous: str, step: int, chain: str, fingerprint: str) -> str:
    return hashlib.blake2b(canonical_json([previous, step, chain, fingerprint]), digest_size=32).hexdigest()


def last_following(steps: Collection[int]) -> int:
    """Return the last of recorded steps whose previous step is recorded too; 0 without any."""
    return max((step for step in steps if step == 1 or step - 1 in steps), default=0)


@dataclass(frozen=True, slots=True)
class RecordedChain:
    """The content of ``chain.jsonl``, checked link by link.

    Attributes:
        path: The file.
        entries: The readable entry of every step, in step order.
        missing: Steps without an entry, up to the last step that should have one.
        changed: Steps whose entry does not follow from the previous one.
    """

    path: Path
    entries: Mapping[int, ChainEntry]
    missing: tuple[range, ...]
    changed: tuple[int, ...]

    @property
    def last_step(self) -> int:
        """The last step whose previous step is recorded; a damaged line may hold any number."""
        return last_following(self.entries) or max(self.entries, default=0)

    @property
    def last_known_step(self) -> int:
        """The last step that is recorded or missing; 0 without any."""
        return max([*self.entries, *(gap[-1] for gap in self.missing)], default=0)

    def first_damage(self, first_step: int, last_step: int) -> tuple[int, str] | None:
        """Return the first step in a range that cannot be verified, and why."""
        steps = range(first_step, last_step + 1)
        found = [(max(gap.start, first_step), "is not recorded") for gap in self.missing if _overlaps(gap, steps)]
        found += [(step, "does not follow from the previous one") for step in self.changed if step in steps]
        return min(found, default=None)

    def damage(self, last_step: int) -> str:
        """Describe what is lost of the steps up to ``last_step``; empty if nothing is."""
        gaps = [range(gap.start, min(gap.stop, last_step + 1)) for gap in self.missing if gap.start <= last_step]
        lost = [f"{_words(gap)} not recorded" for gap in gaps]
        lost += [f"step {step:,} is changed" for step in self.changed if step <= last_step]
        return "; ".join(lost)


def examine_chain(run_directory: Path, last_step: int = 0) -> RecordedChain:
    """Read and check the chain of a run; damage is part of the result, not an error.

    Args:
        run_directory: The run.
        last_step: A step that the chain must reach.

    Raises:
        CheckpointError: The disk failed.
        DataError: The file cannot be read.
    """
    path = RunLayout(run_directory).chain
    records = _read(path, "Replay chain", "move it away: the run continues, earlier steps cannot be replayed")
    entries = {step: entry for step, record in records.items() if (entry := _entry(record)) is not None}
    missing: list[range] = []
    changed: list[int] = []
    before, head = 0, ""
    for step, entry in entries.items():
        if step > before + 1:
            missing.append(range(before + 1, step))
        elif head is not None and link(head, step, entry.batch, entry.loss, entry.grad_norm) != entry.chain:
            changed.append(step)
        before, head = step, None if changed[-1:] == [step] else entry.chain  # nothing follows from a changed entry
    if last_step > before:
        missing.append(range(before + 1, last_step + 1))
    return RecordedChain(path, entries, tuple(missing), tuple(changed))


def _read(path: Path, what: str, remedy: str) -> dict[int, dict[str, Any]]:
    try:
        return read_history(path, skip_damaged=True)
    except OSError as error:
        raise disk_error(error, str(path)) or DataError(
            f"{what} cannot be read: {error.strerror}", where=str(path), hint=f"check its permissions, or {remedy}"
        ) from error


def check_chain(run_directory: Path, progress: Progress) -> RecordedChain:
    """Compare the chain on disk with the head that a checkpoint recorded.

    Damage does not stop a run, because the checkpoint has its own head; ``RecordedChain.damage`` describes the loss.

    Raises:
        DataError: The file is intact, but the chain belongs to a different run history.
    """
    found = examine_chain(run_directory, progress.step)
    entry = found.entries.get(progress.step)
    if entry is not None and entry.chain != progress.chain and progress.step not in found.changed:
        raise DataError(
            f"Replay chain has {entry.chain} at step {progress.step:,}, the checkpoint {progress.chain}",
            where=str(found.path),
            hint="restore the file from a copy, or move it away: the run continues, earlier steps cannot be replayed",
        )
    return found


def void_later_steps(run_directory: Path, after_step: int) -> None:
    """Void the entries of later steps, durably; the run continues from ``after_step``.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    history = StepHistory(RunLayout(run_directory).chain, after_step)
    try:
        history.flush()
    except OSError as error:
        raise CheckpointError(
            f"Replay chain cannot be written: {error.strerror}", where=str(RunLayout(run_directory).chain),
            hint="free some space, or repair the disk, and run the same command again",
        ) from error  # fmt: skip


def read_chain(run_directory: Path) -> Mapping[int, ChainEntry]:
    """Return the entry of every recorded step, each checked against the previous one.

    Raises:
        DataError: There is no chain, or an entry does not follow from the previous one.
    """
    found = examine_chain(run_directory)
    if found.changed:
        raise DataError(
            f"Entry of step {found.changed[0]:,} does not follow from the previous one",
            where=str(found.path),
            hint="the file was changed; restore it from a copy",
        )
    if not found.entries:
        raise DataError("No step is recorded", where=str(found.path), hint="train the run first")
    return found.entries


def _overlaps(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


def _words(steps: range) -> str:
    last = steps.stop - 1
    return f"step {last:,} is" if len(steps) == 1 else f"steps {steps.start:,} to {last:,} are"


def _entry(record: Mapping[str, Any]) -> ChainEntry | None:
    if record["step"] < 1:
        return None
    for name, length in _LENGTHS.items():  # later versions may add fields
        value = record.get(name)
        if not isinstance(value, str) or len(value) != length or not _HEX.fullmatch(value):
            return None
    return ChainEntry(record["step"], **{name: record[name] for name in _LENGTHS})
