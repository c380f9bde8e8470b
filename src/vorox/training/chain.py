"""The replay chain: one hash per step over everything that the step saw and computed (``chain.jsonl``).

    chain(N) = blake2b-128(chain(N-1) | N | batch digest | loss bits | gradient norm bits)

Two runs with the same head did the same steps on the same rows with the same numbers, bit for bit. Step N is the one
after which N steps are finished; its line holds the head that checkpoint N records. Every step is in the chain,
whatever is logged.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.atomic import canonical_json
from vorox.core.errors import DataError
from vorox.core.records import Progress, StepValues
from vorox.training.history import StepHistory, last_record, read_history

CHAIN_NAME = "chain.jsonl"
_NOT_A_NUMBER = "7ff8000000000000"


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
        progress: The state that the process starts from.
        writes: Off in all processes of a run but one: they keep the head alone.

    Raises:
        DataError: The file's head at this step is not the one that the checkpoint recorded.
    """

    def __init__(self, run_directory: Path, progress: Progress, *, writes: bool = True) -> None:
        path = run_directory / CHAIN_NAME
        last = last_record(path, progress.step) if progress.step else None
        if last is not None and (last["step"], last["chain"]) != (progress.step, progress.chain):
            raise DataError(
                f"the chain says {last['chain']} at step {last['step']:,}, "
                f"the checkpoint {progress.chain} at step {progress.step:,}",
                where=str(path),
                hint="restore the file from a copy, or move it away: the run goes on, earlier steps cannot be replayed",
            )
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


def read_chain(run_directory: Path) -> Mapping[int, ChainEntry]:
    """The valid entry of every recorded step, each checked against the one before it.

    Raises:
        DataError: There is no chain, or an entry does not follow from the one before.
    """
    path = run_directory / CHAIN_NAME
    entries: dict[int, ChainEntry] = {}
    for step, record in read_history(path).items():
        entry = _entry(record, path)
        before = entries.get(step - 1)
        previous = "" if step == 1 else None if before is None else before.chain
        if previous is not None and link(previous, step, entry.batch, entry.loss, entry.grad_norm) != entry.chain:
            raise DataError(
                f"the entry of step {step:,} does not follow from the one before",
                where=str(path),
                hint="the file was changed; restore it from a copy",
            )
        entries[step] = entry
    if not entries:
        raise DataError("no step is recorded", where=str(path), hint="train the run first")
    return entries


def _entry(record: Mapping[str, Any], path: Path) -> ChainEntry:
    try:
        return ChainEntry(**record)
    except TypeError as error:
        raise DataError(f"step {record['step']:,} is not a chain entry", where=str(path)) from error
