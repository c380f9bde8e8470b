"""The plan of a run: which row stands at which position, as arithmetic over a short durable log.

``plan.jsonl`` is append-only and hash-chained. ``start`` fixes seed, sources, weights and batch size; each ``segment``
adds whole epochs, or a part of one, over a range of a source's units, with the digest of their content; ``stage``
events change the mixture from a position on. Positions count stored rows from the start of the run; the arithmetic
over them is ``plan_tables``.

Invariants: an event is durable before a step uses it; extending the plan never moves a position; the order depends
on the events and on the caches' content, never on when or how far the plan was extended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.chained_log import HashChainedLog, LogPosition
from vorox.core.errors import ConfigError, DataError
from vorox.data.mixture_stages import Stage
from vorox.data.plan_changes import folded, used_up, without_exhausted
from vorox.data.plan_events import HorizonEvent, PlanSource, PlanStart, Segment, UnitRange, combined_digest
from vorox.data.plan_format import decode_event, decode_start, encode_start
from vorox.data.plan_tables import Addresses, Event, PlanTables, Positions
from vorox.data.records import RowReader

Readers = Sequence[RowReader | None]
"""The caches of the plan's sources, in its order; ``None`` for one that is not drawn from any more."""

__all__ = ["Addresses", "Plan", "Positions", "Readers"]


class Plan:
    """An open plan. Make one with ``create``, ``open`` or ``open_or_create``."""

    def __init__(self, path: Path, events: Sequence[Mapping[str, Any]], end: LogPosition | None = None) -> None:
        self.path = path
        if not events:
            raise DataError("there is no plan here", where=str(path), hint="a run's first start writes it")
        self.start: PlanStart = decode_start(events[0], path)
        self._log, self._end = HashChainedLog(path), end or LogPosition()
        self._tables = self._after(PlanTables.of(self.start, events[0]), events[1:])
        assert self._tables.mixture is not None  # refuses weights that cannot be

    @classmethod
    def create(cls, path: Path, start: PlanStart, readers: Readers) -> Plan:
        """Begin a plan, durably. It covers no position until ``extend_to``.

        Raises:
            DataError: There is a plan already, or a reader is not the cache that its source names.
        """
        log = HashChainedLog(path)
        if log.read()[0]:
            raise DataError("there is a plan already", where=str(path), hint="open it, or start another run")
        event = encode_start(start)
        plan = cls(path, [event])
        plan.check(readers)  # refuses what could not be read again before anything is written
        plan._end = log.append([event])
        return plan

    @classmethod
    def open(cls, path: Path) -> Plan:
        """Read a plan.

        Raises:
            DataError: There is none, it is damaged, or it holds an event that this version does not know.
        """
        return cls(path, *HashChainedLog(path).read_after(LogPosition()))

    @classmethod
    def open_or_create(cls, path: Path, start: PlanStart, readers: Readers) -> Plan:
        """The plan that a run begins or continues with, whatever an earlier crash left at ``path``.

        The sources and weights of a plan that was begun stay as they are; ``plan_changes.declare`` changes them.

        Raises:
            ConfigError: The plan there was begun with other settings.
        """
        if not HashChainedLog(path).read()[0]:
            return cls.create(path, start, readers)
        plan = cls.open(path)
        recorded, wanted = encode_start(plan.start), encode_start(start)
        for key in sorted({*wanted, *recorded} - {"sources"}):
            if recorded.get(key) != wanted.get(key):
                raise ConfigError(
                    f"the run's plan has {key} = {recorded.get(key)}, the configuration says {wanted.get(key)}",
                    where=str(path), hint="resume with the configuration that began the run, or start another run",
                )  # fmt: skip
        by_name = dict(zip([source.name for source in start.sources], readers, strict=True))
        plan.check([by_name.get(source.name) for source in plan.sources])
        return plan

    @property
    def tables(self) -> PlanTables:
        """The state by now; it never changes, the plan gets another one."""
        return self._tables

    @property
    def sources(self) -> tuple[PlanSource, ...]:
        """Every source that is or was drawn from; ``source_index`` counts in this order."""
        return self._tables.sources

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The mixtures in force, by position."""
        return self._tables.stages

    def horizon_at(self, position: int) -> HorizonEvent | None:
        """The length of the run that its schedule knew at a position; ``None`` where an earlier version began it."""
        return max(
            (known for known in self._tables.horizons if known.start_position <= position),
            key=lambda known: known.start_position, default=None,
        )  # fmt: skip

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

    def row_pieces_at(self, position: int) -> int:
        """Pieces that the stored row of a position is cut into."""
        return self._tables.mixture.stage_at(position).row_pieces

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
        return tables.locate(positions)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Every covered position at which a row of a source stands, ascending: the inverse of ``locate``.

        Args:
            source_index: The source, in the order of ``sources``.
            row: Row of its cache.
            reader: The source's cache.
        """
        return self._tables.positions_of(source_index, row, reader)

    def check(self, readers: Readers) -> None:
        """Make sure that the caches still are what the plan was made for.

        Raises:
            DataError: Naming the source, when its rows or their content changed.
        """
        assert len(readers) == len(self.sources), "one reader, or None, per source"
        for source, segments, reader in zip(self.sources, self.segments, readers, strict=True):
            if reader is None:
                continue
            if (reader.recipe.digest, reader.row_tokens) != (source.recipe_digest, source.row_tokens):
                raise DataError(
                    f"the cache of source {source.name!r} has recipe {reader.recipe.digest} and {reader.row_tokens} "
                    f"tokens a row, the plan was made for {source.recipe_digest} and {source.row_tokens}",
                    where=str(self.path), hint="resume with the configuration and cache that began the run",
                )  # fmt: skip
            for ranges, digest in {(segment.ranges, segment.content_digest): None for segment in segments}:
                if not _holds(reader, ranges, digest):
                    raise DataError(
                        f"the cache of source {source.name!r} changed: units {ranges[0].start} to {ranges[-1].end} no "
                        f"longer hold the {sum(part.num_rows for part in ranges):,} rows that the plan was made for",
                        where=str(self.path),
                        hint="bring back the files as they were when the run began, or start a new run on them as "
                        "they are now: vorox train ... --resume never",
                    )

    def add(self, events: Sequence[Event]) -> None:
        """Append events, durable on return and only then in force.

        Raises:
            DataError: They do not fit the plan, or another process changed it. Nothing is written then.
        """
        if not events:
            return
        if self._log.read_after(self._end)[0]:
            raise DataError("another process changed the plan", where=str(self.path), hint="open it again")
        tables, written = self._tables, list[dict[str, Any]]()
        for event in events:
            written.append(tables.written(event))
            tables = self._after(tables, written[-1:])
        self._end = self._log.append(written, after=self._end)
        self._tables = tables

    def refresh(self, prepare: Callable[[PlanTables], None]) -> bool:
        """Take up what the process that decides has appended meanwhile, if there is anything.

        Args:
            prepare: Called with the new state before it is in force: whoever locates by it must see its units.
        """
        bodies, end = self._log.read_after(self._end)
        if not bodies:
            return False
        tables = self._after(self._tables, bodies)
        prepare(tables)
        self._tables, self._end = tables, end
        return True

    def extend_to(self, position: int, readers: Readers) -> list[Event]:
        """Cover all positions below ``position``, by whole epochs over what the caches hold now; durable on return.

        Returns:
            What was added.

        Raises:
            DataError: A source has no rows, or is used up and its policy is ``error``. Nothing is written then.
        """
        events = self.covering_events(self._tables, position, readers)
        self.add(events)
        return events

    def covering_events(self, tables: PlanTables, position: int, readers: Readers) -> list[Event]:
        """Return what ``extend_to`` adds to a state of this plan; nothing is written.

        Raises:
            DataError: A source has no rows, or is used up and its policy is ``error``.
        """
        batch = self.start.global_batch_sequences
        target, events = -(-position // batch) * batch, list[Event]()
        while True:
            needed = tables.mixture.counts(target)
            added: list[Event] = [
                segment
                for source_index, reader in enumerate(readers)
                if (segment := self._next_segment(tables, source_index, reader, needed[source_index])) is not None
            ]
            if not added and tables.num_positions < target:
                added = without_exhausted(tables, str(self.path))
            if not added:
                return events
            events += added
            tables = folded(tables, added)

    def _next_segment(
        self, tables: PlanTables, source_index: int, reader: RowReader | None, num_draws: int
    ) -> Segment | None:
        """The segment that lets a source be drawn ``num_draws`` times, or as often as it may; None for nothing."""
        source, start_draw = tables.sources[source_index], tables.end_draw(source_index)
        if num_draws <= start_draw:
            return None
        if reader is None:
            raise DataError(f"the run needs source {source.name!r}, which is not there", where=str(self.path))
        segments = tables.segments[source_index]
        epoch, num_units = segments[-1].next_epoch if segments else 0, len(reader.unit_row_starts) - 1
        num_rows = reader.rows_in(0, num_units)
        if num_rows == 0:
            raise DataError(f"source {source.name!r} has no rows", where=str(self.path), hint="give it text")
        num_epochs = -(-(num_draws - start_draw) // num_rows)
        if source.max_epochs is not None and epoch + num_epochs > source.max_epochs and source.on_exhausted != "repeat":
            num_epochs = max(0, source.max_epochs - epoch)
            if source.on_exhausted == "error":
                raise used_up(tables, source_index, start_draw + num_epochs * num_rows, num_rows)
        if num_epochs == 0:
            return None
        return segment_of(reader, source_index, start_draw, epoch, num_epochs, [(0, num_units)])

    def _after(self, tables: PlanTables, events: Sequence[Mapping[str, Any]]) -> PlanTables:
        for body in events:
            where = f"{self.path}:{len(tables.digests) + 1}"
            tables = tables.after(decode_event(body, tables.names, where), body, where)
        return tables


def segment_of(
    reader: RowReader, source_index: int, start_draw: int, epoch: int, num_epochs: int, units: Sequence[tuple[int, int]]
) -> Segment | None:
    """A segment over some ranges of units that are there; ``None`` if they have no rows."""
    ranges = tuple(UnitRange(a, b, rows) for a, b in units if (rows := reader.rows_in(a, b)))
    if not ranges:
        return None
    digest = combined_digest([reader.content_digest(part.start, part.end) for part in ranges])
    return Segment(source_index, start_draw, epoch, num_epochs, ranges, digest)


def _holds(reader: RowReader, ranges: Sequence[UnitRange], digest: str) -> bool:
    if any(part.end >= len(reader.unit_row_starts) for part in ranges):
        return False
    found = [(reader.rows_in(part.start, part.end), reader.content_digest(part.start, part.end)) for part in ranges]
    return [rows for rows, _ in found] == [part.num_rows for part in ranges] and (
        combined_digest([content for _, content in found]) == digest
    )
