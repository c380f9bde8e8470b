"""The data plan of a run: the row at each position, as arithmetic over a short durable log.

``plan.jsonl`` is an append-only, hash-chained log (``core/files/chained_log.py``). ``plan_events`` defines its events;
``plan_state`` folds them into a state; ``plan_changes`` and ``growth`` decide which events to append. Positions count
stored rows from the start of the run.

Invariants: an event is durable before a step uses it; extending the plan never moves a position; the order depends
on the events and on the content of the caches, not on when or how far the plan was extended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.core.run_layout import RunLayout
from vorox.data.order.mixture import MixtureStage
from vorox.data.order.plan_changes import Readers, covering_events
from vorox.data.order.plan_events import (
    FORMAT,
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
from vorox.data.order.plan_state import Addresses, PlanState, Positions
from vorox.data.rows import RowReader

__all__ = ["Addresses", "DataPlan", "Positions", "Readers"]


class DataPlan:
    """An open data plan (``plan.jsonl``). Construct it with ``create``, ``open`` or ``open_or_create``."""

    def __init__(self, path: Path, state: PlanState, end: LogPosition) -> None:
        self.path, self._state, self._end = path, state, end
        self._log = HashChainedLog(path)
        self._adding = threading.Lock()

    @classmethod
    def create(cls, path: Path, start: PlanStart, readers: Readers) -> DataPlan:
        """Create a plan; durable on return. It covers no position until it is extended.

        Raises:
            ConfigError: The start is invalid: duplicate source names, or no weight above zero.
            DataError: A plan already exists, or a reader is not the cache that its source names.
        """
        log = HashChainedLog(path)
        if log.read()[0]:
            raise DataError("A data plan already exists", where=str(path), hint="open it, or start a new run")
        plan = cls(path, PlanState.initial(start), LogPosition())
        plan.check(readers)
        plan._end = log.append([encode_event(start)])
        return plan

    @classmethod
    def open(cls, path: Path) -> DataPlan:
        """Read a plan.

        Raises:
            DataError: The plan is missing or damaged, or contains an event that this version does not know.
        """
        plan = cls.find(path)
        if plan is None:
            raise DataError(
                f"Run has no data plan: {path.name} is missing or empty", where=str(path),
                hint="a run writes it before its first step; if the run has trained, restore the file from a copy: "
                "without it the order of the data is unknown",
            )  # fmt: skip
        return plan

    @classmethod
    def find(cls, path: Path) -> DataPlan | None:
        """Read a plan; ``None`` if it does not exist, or a crash left no complete event.

        Raises:
            DataError: The plan is damaged, or contains an event that this version does not know.
        """
        bodies, end = HashChainedLog(path).read_after(LogPosition())
        return cls(path, _folded(bodies, path), end) if bodies else None

    @classmethod
    def open_or_create(cls, path: Path, start: PlanStart, readers: Readers) -> DataPlan:
        """Open the plan of a run, or create it if it does not exist or a crash left it empty.

        Raises:
            ConfigError: The plan was created with different settings.
        """
        plan = cls.find(path)
        if plan is None:
            return cls.create(path, start, readers)
        plan.check_start(start, readers)
        return plan

    def check_start(self, start: PlanStart, readers: Readers) -> None:
        """Check that this plan matches a configuration and its caches.

        Sources and weights are not compared; ``mixture_update_events`` changes those of an existing plan.

        Args:
            start: The start of a new plan for the configuration.
            readers: The caches of its sources, in its order.

        Raises:
            ConfigError: The plan was created with different settings.
            DataError: The content of a cache has changed since the plan was made.
        """
        recorded, wanted = encode_event(self.start), encode_event(start)
        for key in sorted({*wanted, *recorded} - {"sources"}):
            if recorded.get(key) != wanted.get(key):
                raise ConfigError(
                    f"The run's data plan has {key} = {recorded.get(key)}, the configuration {wanted.get(key)}",
                    where=str(self.path), hint="resume with the run's original configuration, or start a new run",
                )  # fmt: skip
        by_name = dict(zip([source.name for source in start.sources], readers, strict=True))
        self.check([by_name.get(source.name) for source in self.sources])

    @property
    def state(self) -> PlanState:
        """The current state. It is immutable; ``add`` and ``refresh`` replace it."""
        return self._state

    @property
    def start(self) -> PlanStart:
        """The start event: settings that never change during a run."""
        return self._state.start

    @property
    def sources(self) -> tuple[PlanSource, ...]:
        """All sources, current and former; ``source_index`` is an index into them."""
        return self._state.sources

    @property
    def stages(self) -> tuple[MixtureStage, ...]:
        """The mixtures in force, by position."""
        return self._state.stages

    @property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each source, in draw order."""
        return self._state.segments

    @property
    def digest(self) -> str:
        """Head of the hash chain: equal if and only if the plans are equal."""
        return self._state.digests[-1]

    @property
    def num_events(self) -> int:
        """Number of events."""
        return len(self._state.digests)

    @property
    def num_positions(self) -> int:
        """Number of positions that the plan covers; a multiple of the global batch."""
        return self._state.num_positions

    def digest_at(self, num_events: int) -> str | None:
        """Return the digest after the first ``num_events`` events; ``None`` if the plan has fewer."""
        digests = self._state.digests
        return digests[num_events - 1] if 1 <= num_events <= len(digests) else None

    def as_of(self, num_events: int) -> DataPlan:
        """Return the plan as it was after its first ``num_events`` events, at least one; nothing can be added to it."""
        return DataPlan(self.path, _folded(self._log.read()[0][:num_events], self.path), LogPosition())

    def horizon_at(self, position: int) -> HorizonEvent | None:
        """Return the length of the run in force at a position; ``None`` if it is not recorded."""
        known = [horizon for horizon in self._state.horizons if horizon.start_position <= position]
        return known[-1] if known else None

    def is_skipped(self, position: int) -> bool:
        """Whether the step that starts at a position is skipped: it reads its rows and changes no parameter."""
        return self._state.is_skipped(position)

    def row_pieces_at(self, position: int) -> int:
        """Return the number of pieces that the stored row at a position is split into."""
        return self._state.mixture.stage_at(position).row_pieces

    def locate(self, positions: Positions) -> Addresses:
        """Return the addresses of the rows at some positions.

        Raises:
            DataError: A position is not covered.
        """
        state = self._state
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < state.num_positions:
            raise DataError(
                f"Position {positions.max():,} is not covered: the data plan has {state.num_positions:,} positions",
                where=str(self.path), hint="extend the data plan first",
            )  # fmt: skip
        return state.locate(positions)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Return every covered position of a row, ascending: the inverse of ``locate``.

        Args:
            source_index: The source, an index into ``sources``.
            row: Row number in its cache.
            reader: The source's cache.
        """
        return self._state.positions_of(source_index, row, reader)

    def check(self, readers: Readers) -> None:
        """Check that the caches still have the content that the plan was made for.

        Raises:
            DataError: The rows of a source, or their content, have changed.
        """
        for source, segments, reader in zip(self.sources, self.segments, readers, strict=True):
            if reader is None:
                continue
            if (reader.recipe.digest, reader.row_tokens) != (source.recipe_digest, source.row_tokens):
                raise DataError(
                    f"The cache of source {source.name!r} has recipe {reader.recipe.digest} and {reader.row_tokens} "
                    f"tokens per row, the plan was made for {source.recipe_digest} and {source.row_tokens}",
                    where=str(self.path), hint="resume with the run's original configuration and cache",
                )  # fmt: skip
            for ranges, digest in {(segment.ranges, segment.content_digest): None for segment in segments}:
                if not _holds(reader, ranges, digest):
                    raise DataError(
                        f"The cache of source {source.name!r} changed: units {ranges[0].start} to {ranges[-1].end} no "
                        f"longer hold the {sum(part.num_rows for part in ranges):,} rows that the plan was made for",
                        where=str(self.path),
                        hint="restore the files as they were when the run started, or start a new run on the current "
                        "files: vorox train ... --resume never (with data.cache.grow=true it will accept new files)",
                    )

    def add(self, events: Sequence[PlanEvent]) -> None:
        """Append events. They take effect once they are durable. Threads may call it at the same time.

        Raises:
            DataError: They do not fit the plan, or another process changed it; nothing is written.
        """
        if not events:
            return
        with self._adding:
            if self._log.read_after(self._end)[0]:
                raise DataError("Another process changed the data plan", where=str(self.path), hint="reopen the plan")
            bodies = list[dict[str, Any]]()
            state = self._state
            for event in events:
                bodies.append(state.encode(event))
                state = _applied(state, bodies[-1:], self.path)
            self._end = self._log.append(bodies, after=self._end)
            self._state = state

    def check_file(self) -> None:
        """Check that the file still ends with the newest event that this process has read or written.

        Raises:
            DataError: It was removed or changed.
        """
        with self._adding:
            self._log.read_after(self._end)

    def refresh(self, prepare: Callable[[PlanState], None]) -> bool:
        """Apply the events that the deciding rank has appended since; return whether there were any.

        Args:
            prepare: Called with the new state before it takes effect, so that readers see its units.
        """
        bodies, end = self._log.read_after(self._end)
        if not bodies:
            return False
        state = _applied(self._state, bodies, self.path)
        prepare(state)
        self._state, self._end = state, end
        return True

    def extend_to(self, position: int, readers: Readers) -> list[PlanEvent]:
        """Cover all positions below ``position`` with whole passes over complete caches; durable on return.

        Returns:
            The appended events.

        Raises:
            DataError: A source has no rows, or is exhausted and its policy is ``error``; nothing is written.
        """
        events = covering_events(self._state, position, readers, str(self.path))
        self.add(events)
        return events


def _folded(bodies: Sequence[Mapping[str, Any]], path: Path) -> PlanState:
    """Return the state after the events in ``bodies``, the first of which starts the plan."""
    if bodies[0].get("kind") == "start" and bodies[0].get("format") != FORMAT:
        raise DataError(
            f"The data plan has format {bodies[0].get('format')!r}, but this version reads {FORMAT!r}", where=str(path),
            hint=f"train the run again: {RunLayout(path.parent).training_command}",
        )  # fmt: skip
    start = decode_event(bodies[0], f"{path}:1")
    if not isinstance(start, PlanStart):
        raise DataError(f"The data plan starts with an event of kind {start.kind!r}, not 'start'", where=f"{path}:1")
    return _applied(PlanState.initial(start), bodies[1:], path)


def _applied(state: PlanState, bodies: Sequence[Mapping[str, Any]], path: Path) -> PlanState:
    """Return the state after applying the events in ``bodies``."""
    for body in bodies:
        where = f"{path}:{len(state.digests) + 1}"
        state = state.apply(decode_event(body, where), where)
    return state


def _holds(reader: RowReader, ranges: Sequence[UnitRange], digest: str) -> bool:
    """Return whether a cache has the units of a segment with the same rows and content."""
    if any(part.end >= len(reader.unit_row_starts) for part in ranges):
        return False
    found = [(reader.rows_in(part.start, part.end), reader.content_digest(part.start, part.end)) for part in ranges]
    return [rows for rows, _ in found] == [part.num_rows for part in ranges] and (
        combined_digest([content for _, content in found]) == digest
    )
