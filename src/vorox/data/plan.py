"""The plan of a run: which row stands at which position, as arithmetic over a short durable log.

``plan.jsonl`` is append-only and hash-chained (``core/chained_log.py``). Its events are those of ``plan_events``;
``plan_state`` folds them into a state; ``plan_changes`` and ``growth`` decide which events come next. Positions count
stored rows from the start of the run.

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
from vorox.data.plan_changes import Readers, covering_events
from vorox.data.plan_events import (
    HorizonEvent,
    PlanEvent,
    PlanSource,
    PlanStart,
    Segment,
    UnitRange,
    combined_digest,
    decode_event,
    encode_event,
)
from vorox.data.plan_state import Addresses, PlanState, Positions
from vorox.data.rows import RowReader

__all__ = ["Addresses", "Plan", "Positions", "Readers"]


class Plan:
    """An open plan. Make one with ``create``, ``open`` or ``open_or_create``."""

    def __init__(self, path: Path, state: PlanState, end: LogPosition) -> None:
        self.path, self._state, self._end = path, state, end
        self._log = HashChainedLog(path)

    @classmethod
    def create(cls, path: Path, start: PlanStart, readers: Readers) -> Plan:
        """Begin a plan, durably. It covers no position until ``extend_to``.

        Raises:
            ConfigError: The start is impossible: two sources of one name, no weight above zero.
            DataError: There is a plan already, or a reader is not the cache that its source names.
        """
        log = HashChainedLog(path)
        if log.read()[0]:
            raise DataError("there is a plan already", where=str(path), hint="open it, or start another run")
        plan = cls(path, PlanState.initial(start), LogPosition())
        plan.check(readers)
        plan._end = log.append([encode_event(start)])
        return plan

    @classmethod
    def open(cls, path: Path) -> Plan:
        """Read a plan.

        Raises:
            DataError: There is none, it is damaged, or it holds an event that this version does not know.
        """
        plan = cls.find(path)
        if plan is None:
            raise DataError("there is no plan here", where=str(path), hint="a run's first start writes it")
        return plan

    @classmethod
    def find(cls, path: Path) -> Plan | None:
        """Read a plan; ``None`` if there is none, or a crash left no complete event of it.

        Raises:
            DataError: It is damaged, or holds an event that this version does not know.
        """
        bodies, end = HashChainedLog(path).read_after(LogPosition())
        if not bodies:
            return None
        start = decode_event(bodies[0], f"{path}:1")
        if not isinstance(start, PlanStart):
            raise DataError(f"the plan begins with an event of kind {start.kind!r}", where=f"{path}:1")
        return cls(path, _applied(PlanState.initial(start), bodies[1:], path), end)

    @classmethod
    def open_or_create(cls, path: Path, start: PlanStart, readers: Readers) -> Plan:
        """Open the plan of a run, whatever an earlier crash left at ``path``, or begin it.

        Raises:
            ConfigError: The plan was begun with other settings.
        """
        plan = cls.find(path)
        if plan is None:
            return cls.create(path, start, readers)
        plan.check_start(start, readers)
        return plan

    def check_start(self, start: PlanStart, readers: Readers) -> None:
        """Compare this plan with the start that a configuration asks for, and with its caches.

        Sources and weights of an existing plan stay as they are; ``mixture_update_events`` changes them.

        Args:
            start: What a new plan would start with.
            readers: The caches of its sources, in its order.

        Raises:
            ConfigError: The plan was begun with other settings.
            DataError: A cache is no longer what the plan was made for.
        """
        recorded, wanted = encode_event(self.start), encode_event(start)
        for key in sorted({*wanted, *recorded} - {"sources"}):
            if recorded.get(key) != wanted.get(key):
                raise ConfigError(
                    f"the run's plan has {key} = {recorded.get(key)}, the configuration says {wanted.get(key)}",
                    where=str(self.path), hint="resume with the configuration that began the run, or start another run",
                )  # fmt: skip
        by_name = dict(zip([source.name for source in start.sources], readers, strict=True))
        self.check([by_name.get(source.name) for source in self.sources])

    @property
    def state(self) -> PlanState:
        """The state by now; it is immutable, ``add`` and ``refresh`` replace it."""
        return self._state

    @property
    def start(self) -> PlanStart:
        """What the run never changes."""
        return self._state.start

    @property
    def sources(self) -> tuple[PlanSource, ...]:
        """Every source that is or was drawn; ``source_index`` counts in this order."""
        return self._state.sources

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The mixtures in force, by position."""
        return self._state.stages

    @property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each source, in draw order."""
        return self._state.segments

    @property
    def digest(self) -> str:
        """Hash over all events, chained: equal iff the plans are."""
        return self._state.digests[-1]

    @property
    def num_events(self) -> int:
        """Events so far."""
        return len(self._state.digests)

    @property
    def num_positions(self) -> int:
        """Positions that the plan covers: a multiple of the global batch."""
        return self._state.num_positions

    def digest_at(self, num_events: int) -> str | None:
        """Return the digest when the plan had this many events; ``None`` if it never had."""
        digests = self._state.digests
        return digests[num_events - 1] if 1 <= num_events <= len(digests) else None

    def horizon_at(self, position: int) -> HorizonEvent | None:
        """Return the length of the run that its schedule used at a position; ``None`` if it is not recorded."""
        known = [horizon for horizon in self._state.horizons if horizon.start_position <= position]
        return known[-1] if known else None

    def row_pieces_at(self, position: int) -> int:
        """Return how many pieces the stored row of a position is cut into."""
        return self._state.mixture.stage_at(position).row_pieces

    def locate(self, positions: Positions) -> Addresses:
        """Return the rows at some positions.

        Raises:
            DataError: A position is not covered.
        """
        state = self._state
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < state.num_positions:
            raise DataError(
                f"the plan covers the positions below {state.num_positions:,}, asked for {positions.max():,}",
                where=str(self.path), hint="extend the plan first",
            )  # fmt: skip
        return state.locate(positions)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Return every covered position of a row of a source, ascending: the inverse of ``locate``.

        Args:
            source_index: The source, in the order of ``sources``.
            row: Row of its cache.
            reader: The source's cache.
        """
        return self._state.positions_of(source_index, row, reader)

    def check(self, readers: Readers) -> None:
        """Check that the caches still hold what the plan was made for.

        Raises:
            DataError: Naming the source, when its rows or their content changed.
        """
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

    def add(self, events: Sequence[PlanEvent]) -> None:
        """Append events, durable on return and only then in force.

        Raises:
            DataError: They do not fit the plan, or another process changed it. Nothing is written then.
        """
        if not events:
            return
        if self._log.read_after(self._end)[0]:
            raise DataError("another process changed the plan", where=str(self.path), hint="open it again")
        bodies = list[dict[str, Any]]()
        state = self._state
        for event in events:
            bodies.append(state.encode(event))
            state = _applied(state, bodies[-1:], self.path)
        self._end = self._log.append(bodies, after=self._end)
        self._state = state

    def refresh(self, prepare: Callable[[PlanState], None]) -> bool:
        """Apply the events that the deciding process has appended since; return whether there were any.

        Args:
            prepare: Called with the new state before it is in force: whoever locates by it must see its units.
        """
        bodies, end = self._log.read_after(self._end)
        if not bodies:
            return False
        state = _applied(self._state, bodies, self.path)
        prepare(state)
        self._state, self._end = state, end
        return True

    def extend_to(self, position: int, readers: Readers) -> list[PlanEvent]:
        """Cover all positions below ``position`` by whole passes over complete caches; durable on return.

        Returns:
            The events that were added.

        Raises:
            DataError: A source has no rows, or is used up and its policy is ``error``. Nothing is written then.
        """
        events = covering_events(self._state, position, readers, str(self.path))
        self.add(events)
        return events


def _applied(state: PlanState, bodies: Sequence[Mapping[str, Any]], path: Path) -> PlanState:
    """Return the state after the events of some more lines."""
    for body in bodies:
        where = f"{path}:{len(state.digests) + 1}"
        state = state.apply(decode_event(body, where), where)
    return state


def _holds(reader: RowReader, ranges: Sequence[UnitRange], digest: str) -> bool:
    """Return whether a cache holds the units of a segment, with their rows and their content."""
    if any(part.end >= len(reader.unit_row_starts) for part in ranges):
        return False
    found = [(reader.rows_in(part.start, part.end), reader.content_digest(part.start, part.end)) for part in ranges]
    return [rows for rows, _ in found] == [part.num_rows for part in ranges] and (
        combined_digest([content for _, content in found]) == digest
    )
