"""The replay chain: one hash per step over everything that the step saw and computed (``chain.jsonl``).

    chain(N) = blake2b-128(chain(N-1) | N | batch digest | loss bits | gradient norm bits)

Two runs with the same head did the same steps on the same rows with the same numbers, bit for bit. Step N is the one
after which N steps are finished; its line holds the head that checkpoint N records. Every step is in the chain,
whatever is logged.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.atomic import canonical_json
from vorox.core.batch import Progress
from vorox.core.disk_errors import disk_error
from vorox.core.engine import StepValues
from vorox.core.errors import CheckpointError, DataError
from vorox.core.run_layout import RunLayout
from vorox.training.step_history import StepHistory, read_history

_NOT_A_NUMBER = "7ff8000000000000"
_HEX = re.compile("[0-9a-f]+")
_LENGTHS = {"batch": 32, "loss": 16, "grad_norm": 16, "chain": 32}
"""Digits of the fields of an entry."""


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """What the chain holds of one step. Numbers are their IEEE double bits in hex, big end first."""

    step: int
    batch: str
    loss: str
    grad_norm: str
    chain: str

    @classmethod
    def of(cls, previous: str, step: int, batch_digest: str, values: StepValues) -> ChainEntry:
        loss, grad_norm = bits(values.loss), bits(values.grad_norm)
        return cls(step, batch_digest, loss, grad_norm, link(previous, step, batch_digest, loss, grad_norm))


def link(previous: str, step: int, batch: str, loss: str, grad_norm: str) -> str:
    """The head after a step, given the head before it."""
    payload = canonical_json([previous, step, batch, loss, grad_norm])
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def bits(value: float) -> str:
    """The bits of a float as hex; all NaN are one, as their payload means nothing."""
    return _NOT_A_NUMBER if math.isnan(value) else struct.pack(">d", value).hex()


def number(text: str) -> float:
    """The float that ``bits`` was given."""
    return struct.unpack(">d", bytes.fromhex(text))[0]


class ReplayChain:
    """The chain of a running process.

    Args:
        run_directory: Where ``chain.jsonl`` is.
        progress: The state that the process starts from; ``check_chain`` has compared it with the file.
        writes: Off in all processes of a run but one: they keep the head alone.
    """

    def __init__(self, run_directory: Path, progress: Progress, *, writes: bool = True) -> None:
        path = RunLayout(run_directory).chain
        self._history = StepHistory(path if writes else None, progress.step)
        self.head = progress.chain

    def record(self, step: int, batch_digest: str, values: StepValues) -> None:
        """Add the step after which ``step`` are finished. Steps come in order."""
        entry = ChainEntry.of(self.head, step, batch_digest, values)
        self._history.append({name: getattr(entry, name) for name in ChainEntry.__slots__})
        self.head = entry.chain

    def flush(self) -> None:
        """Make every recorded step durable; raises ``OSError`` if the disk is full or gone."""
        self._history.flush()


@dataclass(frozen=True, slots=True)
class RecordedChain:
    """What ``chain.jsonl`` holds, checked link by link.

    Attributes:
        path: The file.
        entries: The readable entry of every step that is in force, in step order.
        missing: Steps without one, up to the last step that should have one.
        changed: Steps whose entry does not follow from the one before it.
    """

    path: Path
    entries: Mapping[int, ChainEntry]
    missing: tuple[range, ...]
    changed: tuple[int, ...]

    @property
    def last_step(self) -> int:
        """The last step that follows a recorded one; a damaged line may claim any number."""
        following = (step for step in self.entries if step == 1 or step - 1 in self.entries)
        return max(following, default=max(self.entries, default=0))

    def first_damage(self, first_step: int, last_step: int) -> tuple[int, str] | None:
        """The first of some steps that cannot be verified, and why."""
        asked = range(first_step, last_step + 1)
        found = [(max(gap.start, first_step), "is not recorded") for gap in self.missing if _overlaps(gap, asked)]
        found += [(step, "does not follow from the one before") for step in self.changed if step in asked]
        return min(found, default=None)

    def damage(self, last_step: int) -> str:
        """What is lost of the steps up to ``last_step``, for people; empty if nothing is."""
        gaps = [range(gap.start, min(gap.stop, last_step + 1)) for gap in self.missing if gap.start <= last_step]
        lost = [f"{_words(gap)} not recorded" for gap in gaps]
        lost += [f"step {step:,} is changed" for step in self.changed if step <= last_step]
        return "; ".join(lost)


def examine_chain(run_directory: Path, last_step: int = 0) -> RecordedChain:
    """Read the chain of a run, whatever state it is in.

    Args:
        run_directory: The run.
        last_step: The step that it should reach at least.

    Raises:
        CheckpointError: The disk did not deliver the file.
        DataError: It cannot be read.
    """
    path = RunLayout(run_directory).chain
    try:
        records = read_history(path, skip_damaged=True)
    except OSError as error:
        raise disk_error(error, str(path)) or DataError(
            f"the chain cannot be read: {error.strerror}", where=str(path),
            hint="check its permissions, or move it away: the run goes on, earlier steps cannot be replayed",
        ) from error  # fmt: skip
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


def check_chain(run_directory: Path, progress: Progress) -> RecordedChain:
    """Compare the chain on disk with the head that a checkpoint recorded.

    Damage does not stop a run, because the checkpoint has its own head: ``RecordedChain.damage`` says what it costs.

    Raises:
        DataError: The file is intact and of another history.
    """
    found = examine_chain(run_directory, progress.step)
    entry = found.entries.get(progress.step)
    if entry is not None and entry.chain != progress.chain and progress.step not in found.changed:
        raise DataError(
            f"the chain says {entry.chain} at step {progress.step:,}, the checkpoint {progress.chain}",
            where=str(found.path),
            hint="restore the file from a copy, or move it away: the run goes on, earlier steps cannot be replayed",
        )
    return found


def abandon_steps(run_directory: Path, after_step: int) -> None:
    """Void, durably, what is recorded of the steps after a state: the run goes on from there another way.

    Raises:
        CheckpointError: The disk is full or gone.
    """
    history = StepHistory(RunLayout(run_directory).chain, after_step)
    try:
        history.flush()
    except OSError as error:
        raise CheckpointError(
            f"the chain cannot be written: {error.strerror}", where=str(RunLayout(run_directory).chain),
            hint="free some space, or repair the disk, and run the same command again",
        ) from error  # fmt: skip


def read_chain(run_directory: Path) -> Mapping[int, ChainEntry]:
    """Return the entry of every recorded step, each checked against the one before it.

    Raises:
        DataError: There is no chain, or an entry does not follow from the one before.
    """
    found = examine_chain(run_directory)
    if found.changed:
        raise DataError(
            f"the entry of step {found.changed[0]:,} does not follow from the one before",
            where=str(found.path),
            hint="the file was changed; restore it from a copy",
        )
    if not found.entries:
        raise DataError("no step is recorded", where=str(found.path), hint="train the run first")
    return found.entries


def _overlaps(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


def _words(steps: range) -> str:
    last = steps.stop - 1
    return f"step {last:,} is" if len(steps) == 1 else f"steps {steps.start:,} to {last:,} are"


def _entry(record: Mapping[str, Any]) -> ChainEntry | None:
    if set(record) != {"step", *_LENGTHS} or record["step"] < 1:
        return None
    for name, length in _LENGTHS.items():
        value = record[name]
        if not isinstance(value, str) or len(value) != length or not _HEX.fullmatch(value):
            return None
    return ChainEntry(**record)
