"""The plan of a run: which row stands at which position, as arithmetic over a short durable log.

``plan.jsonl`` is append-only and hash-chained. ``start`` fixes seed, sources, weights and batch size; each ``segment``
adds whole epochs over a range of a source's units, with the digest of their content. Positions count rows from the
start of the run and are resolved in four invertible steps: slot within its global batch (keyed permutation) -> draw
(mixture) -> source and epoch -> row (keyed permutation).

Invariants: an event is durable before a step uses it; extending the plan never moves a position; the order depends
on the start and on the caches' content, never on when or how far the plan was extended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json
from vorox.core.chained_log import HashChainedLog
from vorox.core.errors import ConfigError, DataError
from vorox.data.mixture import Mixture
from vorox.data.order import permutation_key, permute, unpermute
from vorox.data.plan_events import PlanStart, Segment, decode_segment, decode_start, encode_segment, encode_start
from vorox.data.records import RowReader

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the rows of some positions are.

    Attributes:
        source_index: Source of each row, in the order of the plan's start.
        epoch: Pass over the source, from 0.
        unit_start: First unit of the segment that the row is drawn from.
        row: Row, counted from the first row of ``unit_start``: it does not change when the cache grows.
    """

    source_index: npt.NDArray[np.int32]
    epoch: npt.NDArray[np.int64]
    unit_start: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Everything derived from the events; replaced as a whole, so that readers in other threads need no lock."""

    digests: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]
    starts: tuple[npt.NDArray[np.int64], ...]
    keys: tuple[tuple[bytes, ...], ...]
    num_positions: int


class Plan:
    """An open plan. Make one with ``create``, ``open`` or ``open_or_create``."""

    def __init__(self, path: Path, events: Sequence[Mapping[str, Any]]) -> None:
        self.path = path
        if not events:
            raise DataError("there is no plan here", where=str(path), hint="a run's first start writes it")
        self.start: PlanStart = decode_start(events[0], path)
        self._mixture = Mixture([source.weight for source in self.start.sources])
        self._slot_key = permutation_key(self.start.seed, "slots")
        self._tables = self._tables_of(events)

    @classmethod
    def create(cls, path: Path, start: PlanStart, readers: Sequence[RowReader]) -> Plan:
        """Begin a plan, durably. It covers no position until ``extend_to``.

        Raises:
            DataError: There is a plan already, or a reader is not the cache that its source names.
        """
        if HashChainedLog(path).read()[0]:
            raise DataError("there is a plan already", where=str(path), hint="open it, or start another run")
        event = encode_start(start)
        plan = cls(path, [event])  # refuses what could not be read again before anything is written
        plan.check(readers)
        HashChainedLog(path).append([event])
        return plan

    @classmethod
    def open(cls, path: Path) -> Plan:
        """Read a plan.

        Raises:
            DataError: There is none, it is damaged, or it holds an event that this version does not know.
        """
        return cls(path, HashChainedLog(path).read()[0])

    @classmethod
    def open_or_create(cls, path: Path, start: PlanStart, readers: Sequence[RowReader]) -> Plan:
        """The plan that a run begins or continues with, whatever an earlier crash left at ``path``.

        Raises:
            ConfigError: The plan there was begun with other settings.
        """
        if not HashChainedLog(path).read()[0]:
            return cls.create(path, start, readers)
        plan = cls.open(path)
        recorded, wanted = encode_start(plan.start), encode_start(start)
        for key in sorted(wanted):
            if recorded[key] != wanted[key]:
                raise ConfigError(
                    f"the run's plan has {key} = {recorded[key]}, the configuration says {wanted[key]}",
                    where=str(path), hint="resume with the configuration that began the run, or start another run",
                )  # fmt: skip
        plan.check(readers)
        return plan

    @property
    def digest(self) -> str:
        """Hash over all events, chained: equal iff the plans are."""
        return self._tables.digests[-1]

    @property
    def num_events(self) -> int:
        return len(self._tables.digests)

    @property
    def num_positions(self) -> int:
        """Positions that the plan covers: a multiple of the global batch."""
        return self._tables.num_positions

    @property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each source, in draw order."""
        return self._tables.segments

    def digest_at(self, num_events: int) -> str | None:
        """The digest when the plan had this many events; None if it never had."""
        digests = self._tables.digests
        return digests[num_events - 1] if 1 <= num_events <= len(digests) else None

    def locate(self, positions: Positions) -> Addresses:
        """The rows at some positions.

        Raises:
            DataError: A position is not covered.
        """
        tables = self._tables
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < tables.num_positions:
            raise DataError(
                f"the plan covers the positions below {tables.num_positions:,}, asked for {positions.max():,}",
                where=str(self.path), hint="extend the plan first",
            )  # fmt: skip
        source_index, draw = self._mixture.locate(self._draws_of(positions))
        epoch, unit_start, row = np.empty_like(draw), np.empty_like(draw), np.empty_like(draw)
        for source, segments in enumerate(tables.segments):
            chosen = np.flatnonzero(source_index == source)
            if not chosen.size:
                continue
            numbers = np.searchsorted(tables.starts[source], draw[chosen], side="right") - 1
            for number in range(int(numbers.min()), int(numbers.max()) + 1):
                segment, key = segments[number], tables.keys[source][number]
                here = chosen[numbers == number]
                passes, offset = np.divmod(draw[here] - segment.start_draw, segment.num_rows)
                epoch[here] = passes + segment.epoch
                unit_start[here] = segment.unit_start
                row[here] = permute(offset, segment.num_rows, key, epoch[here]) if self.start.shuffle else offset
        return Addresses(source_index, epoch, unit_start, row)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Every covered position at which a row of a source stands, ascending: the inverse of ``locate``.

        Args:
            source_index: The source, in the order of the plan's start.
            row: Row of its cache.
            reader: The source's cache.
        """
        tables = self._tables
        found: list[Positions] = [np.empty(0, np.int64)]
        for segment, key in zip(tables.segments[source_index], tables.keys[source_index], strict=True):
            offset = row - int(reader.unit_row_starts[segment.unit_start])
            if not 0 <= offset < segment.num_rows:
                continue
            passes = np.arange(segment.num_epochs)
            offsets = np.full(passes.shape, offset)
            if self.start.shuffle:
                offsets = unpermute(offsets, segment.num_rows, key, passes + segment.epoch)
            draws = segment.start_draw + passes * segment.num_rows + offsets
            sources = np.full(passes.shape, source_index, np.int32)
            found.append(self._positions_of_draws(self._mixture.invert(sources, draws)))
        positions = np.concatenate(found)
        return np.sort(positions[positions < tables.num_positions])

    def check(self, readers: Sequence[RowReader]) -> None:
        """Make sure that the caches still are what the plan was made for.

        Raises:
            DataError: Naming the source, when its rows or their content changed.
        """
        assert len(readers) == len(self.start.sources), "one reader per source"
        for source, segments, reader in zip(self.start.sources, self.segments, readers, strict=True):
            if (reader.recipe.digest, reader.row_tokens) != (source.recipe_digest, source.row_tokens):
                raise DataError(
                    f"the cache of source {source.name!r} has recipe {reader.recipe.digest} and {reader.row_tokens} "
                    f"tokens a row, the plan was made for {source.recipe_digest} and {source.row_tokens}",
                    where=str(self.path), hint="resume with the configuration and cache that began the run",
                )  # fmt: skip
            for first, last, num_rows, digest in sorted(
                {(s.unit_start, s.unit_end, s.num_rows, s.content_digest) for s in segments}
            ):
                known = last < len(reader.unit_row_starts)
                if not known or (reader.rows_in(first, last), reader.content_digest(first, last)) != (num_rows, digest):
                    raise DataError(
                        f"the cache of source {source.name!r} changed: units {first} to {last} no longer hold the "
                        f"{num_rows:,} rows that the plan was made for",
                        where=str(self.path),
                        hint="rebuild the cache from the same files with `vorox data build`, or start another run",
                    )

    def extend_to(self, position: int, readers: Sequence[RowReader]) -> None:
        """Cover all positions below ``position``, by whole epochs over what the caches hold now; durable on return.

        Raises:
            DataError: A source has no rows, or would be passed over more often than ``max_epochs`` allows. Nothing
                is written then.
        """
        batch = self.start.global_batch_sequences
        needed = self._mixture.counts(-(-position // batch) * batch)
        added = [
            segment
            for source_index, reader in enumerate(readers)
            if (segment := self._next_segment(source_index, reader, needed[source_index])) is not None
        ]
        if not added:
            return
        log = HashChainedLog(self.path)
        events = log.read()[0]
        if len(events) != self.num_events:
            raise DataError("another process changed the plan", where=str(self.path), hint="open it again")
        new_events = [encode_segment(segment, self.start) for segment in added]
        tables = self._tables_of([*events, *new_events])
        log.append(new_events)
        self._tables = tables

    def _next_segment(self, source_index: int, reader: RowReader, num_draws: int) -> Segment | None:
        """The segment that lets a source be drawn ``num_draws`` times; None if it can be already."""
        source, segments = self.start.sources[source_index], self.segments[source_index]
        start_draw = segments[-1].end_draw if segments else 0
        epoch = segments[-1].epoch + segments[-1].num_epochs if segments else 0
        if num_draws <= start_draw:
            return None
        num_units = len(reader.unit_row_starts) - 1
        num_rows = reader.rows_in(0, num_units)
        if num_rows == 0:
            raise DataError(f"source {source.name!r} has no rows", where=str(self.path), hint="give it text")
        num_epochs = -(-(num_draws - start_draw) // num_rows)
        if source.max_epochs is not None and epoch + num_epochs > source.max_epochs:
            last_draw = start_draw + max(0, source.max_epochs - epoch) * num_rows
            first_missing = self._mixture.invert(np.array([source_index], np.int32), np.array([last_draw]))
            step = int(first_missing[0]) // self.start.global_batch_sequences
            raise DataError(
                f"source {source.name!r} is used up at step {step:,}: max_epochs is {source.max_epochs} "
                f"and an epoch has {num_rows:,} rows",
                where=f"data.sources.{source_index}.max_epochs",
                hint="train for fewer steps, raise max_epochs, lower the source's weight, or give it more text",
            )  # fmt: skip
        digest = reader.content_digest(0, num_units)
        return Segment(source_index, start_draw, epoch, num_epochs, 0, num_units, num_rows, digest)

    def _draws_of(self, positions: Positions) -> Positions:
        """Shuffle the slots of each global batch: no rank or micro-batch sees the mixture's rhythm."""
        if not self.start.shuffle:
            return positions
        block, slot = np.divmod(positions, self.start.global_batch_sequences)
        return positions - slot + permute(slot, self.start.global_batch_sequences, self._slot_key, block)

    def _positions_of_draws(self, draws: Positions) -> Positions:
        if not self.start.shuffle:
            return draws
        block, slot = np.divmod(draws, self.start.global_batch_sequences)
        return draws - slot + unpermute(slot, self.start.global_batch_sequences, self._slot_key, block)

    def _tables_of(self, events: Sequence[Mapping[str, Any]]) -> _Tables:
        digests = [hashlib.sha256(canonical_json(events[0])).hexdigest()]
        segments: list[list[Segment]] = [[] for _ in self.start.sources]
        for number, event in enumerate(events[1:], 2):
            segment = decode_segment(event, self.start, f"{self.path}:{number}")
            before = segments[segment.source_index]
            end_draw, next_epoch = (before[-1].end_draw, before[-1].epoch + before[-1].num_epochs) if before else (0, 0)
            if (segment.start_draw, segment.epoch) != (end_draw, next_epoch):
                raise DataError("the segment does not follow the one before it", where=f"{self.path}:{number}")
            before.append(segment)
            digests.append(hashlib.sha256(digests[-1].encode() + canonical_json(event)).hexdigest())
        return _Tables(
            digests=tuple(digests),
            segments=tuple(tuple(group) for group in segments),
            starts=tuple(np.array([segment.start_draw for segment in group], np.int64) for group in segments),
            keys=tuple(tuple(self._key_of(segment) for segment in group) for group in segments),
            num_positions=self._covered([group[-1].end_draw if group else 0 for group in segments]),
        )

    def _key_of(self, segment: Segment) -> bytes:
        """By content, not by place in the log: the order is the same however the plan was extended."""
        name = self.start.sources[segment.source_index].name
        units = segment.unit_start, segment.unit_end
        return permutation_key(self.start.seed, "rows", name, *units, segment.content_digest)

    def _covered(self, end_draws: list[int]) -> int:
        """Whole global batches before the first draw that no segment covers."""
        sources = np.arange(len(end_draws), dtype=np.int32)
        first_missing = int(self._mixture.invert(sources, np.array(end_draws, np.int64)).min())
        return first_missing // self.start.global_batch_sequences * self.start.global_batch_sequences
