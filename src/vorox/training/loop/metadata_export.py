"""Export of a run's records to the metadata database, by the run itself in the background or by a command.

In: ``run.json``, the plan, ``attempts.bin``, events and metrics, which are the source of truth. Out: rows of a run,
written in one transaction by one writer at a time, so that a reader sees one state of the run. Steps that a resume
rolled back stay: the views mark them, by attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vorox.core.files.atomic import canonical_json
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.json_lines import LineTail, as_number
from vorox.core.files.json_reader import is_step, mapping
from vorox.core.run_layout import RunLayout
from vorox.data.order.difficulty_buckets import SourceReader
from vorox.data.order.plan import DataPlan
from vorox.experiments.metadata import MetadataCache, Replacement
from vorox.experiments.metrics_lines import metrics_line
from vorox.records.attempts import Attempt, lineage, read_attempts
from vorox.records.run_lookup import run_attempts

_EXCEPTIONS = {"nonfinite_step": "nonfinite_step", "loss_spike": "loss_spike", "planned_skip": "loss_spike"}
"""Kinds of exceptions, by the kind of the event that records a step without an update."""

_METRICS = {
    "logged_step": ("loss", "grad_norm", "learning_rate", "tokens_total", "tokens_per_second"),
    "evaluation": ("eval/loss", "eval/bits_per_byte", "eval/accuracy"),
}
"""Metrics in the columns of a table; a line of ``metrics.jsonl`` with the first of them is a row."""

Rows = list[tuple[Any, ...]]


def run_identity(run_directory: Path) -> str:
    """Return the key of a run in a shared database: its id and a digest of its first start."""
    attempts = run_attempts(run_directory)
    began = [attempts[0].get(name) for name in ("started_at", "pid")] if attempts else []
    return f"{run_directory.resolve().name}:{hashlib.sha256(canonical_json(began)).hexdigest()[:6]}"


class RunExport:
    """A connection that exports one run. Use it as a context manager, from one thread.

    Args:
        target: The database, as of ``MetadataCache``.
        run_directory: The run.
        plan: Its plan, which may grow.
        readers: Its caches; ``None`` for a source that the configuration no longer has.
        attempts: Returns the attempts of the run; a query passes ``executed_attempts``, which refuses lost ones.

    Attributes:
        run_id: The key of the run in the database.
        cache: The open database.
    """

    def __init__(
        self,
        target: Path | str,
        run_directory: Path,
        plan: DataPlan,
        readers: Sequence[SourceReader | None],
        attempts: Callable[[Path], tuple[Attempt, ...]] = read_attempts,
    ) -> None:
        self.run_id = run_identity(run_directory)
        self._directory, self._plan, self._readers, self._read_attempts = run_directory, plan, readers, attempts
        self._events = LineTail(RunLayout(run_directory).events)
        self._metrics = LineTail(RunLayout(run_directory).metrics)
        self._exceptions: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._num_events = 0
        self._exported: dict[str, Rows] = {}
        self.cache = MetadataCache(target)

    def update(self) -> None:
        """Export what has changed since the last update; all rows at first, since the database may be new or wiped."""
        self.cache.replace(self.run_id, self._replacements())

    def _replacements(self) -> Iterator[Replacement]:
        yield from self._new_metrics(is_first=not self._exported)
        tables = {"attempt": self._attempts(), "exception": self._read_exceptions()}
        num_events = self._plan.num_events
        if num_events != self._num_events:
            self._num_events = num_events
            tables |= {"run": self._run(), "plan_event": self._plan_events(num_events), "segment": self._segments()}
            yield from self._sources()
        for table, rows in tables.items():
            if rows != self._exported.get(table):
                self._exported[table] = rows
                yield Replacement(table, "run_id = ?", (self.run_id,), rows)

    def _run(self) -> Rows:
        plan = self._plan
        return [
            (
                self.run_id,
                str(self._directory.resolve()),
                plan.start.seed,
                plan.start.global_batch_sequences,
                plan.digest,
            )
        ]

    def _sources(self) -> Iterator[Replacement]:
        for index, (source, reader) in enumerate(zip(self._plan.sources, self._readers, strict=True)):
            if reader is not None:  # else an earlier attempt has exported it
                row = (self.run_id, index, source.name, reader.directory.name)
                yield Replacement("run_source", "run_id = ? AND source_index = ?", row[:2], [row])

    def _plan_events(self, num_events: int) -> Rows:
        """Return the plan's events as written."""
        events = HashChainedLog(self._plan.path).read()[0][:num_events]  # a live run may be appending
        return [
            (
                self.run_id, number, event["kind"], event.get("start_position"), canonical_json(event).decode(),
                self._plan.digest_at(number) or "",
            )
            for number, event in enumerate(events, start=1)
        ]  # fmt: skip

    def _segments(self) -> Rows:
        """Return the segments of the plan: passes and their numbers of rows."""
        return [
            (self.run_id, index, number, segment.epoch, segment.num_epochs, segment.num_rows, segment.start_draw)
            for index, segments in enumerate(self._plan.segments)
            for number, segment in enumerate(segments)
        ]

    def _attempts(self) -> Rows:
        """Return the steps and positions of each attempt, and how many of them count."""
        position_of = self._plan.start.batch_sizes.position_of
        return [
            (
                self.run_id, line.attempt.number, line.parent, line.attempt.start_step, line.attempt.first_position,
                line.kept_until, position_of(line.kept_until), line.attempt.last_step,
                position_of(line.attempt.last_step), int(line.is_newest),
            )
            for line in lineage(self._read_attempts(self._directory))
        ]  # fmt: skip

    def _read_exceptions(self) -> Rows:
        """Return the steps without an update, from the events of the run."""
        position_of = self._plan.start.batch_sizes.position_of
        events, is_replaced = self._events.read()
        if is_replaced:
            self._exceptions.clear()
        for event in events:
            kind, attempt = _EXCEPTIONS.get(str(event.get("kind"))), event.get("attempt")
            step = mapping(event.get("fields")).get("step")
            if kind is not None and is_step(attempt) and is_step(step):
                key = (self.run_id, attempt, kind, step)
                span = (position_of(step - 1), position_of(step))
                self._exceptions[key] = (*key, step, *span, str(event.get("message")))
        return list(self._exceptions.values())

    def _new_metrics(self, is_first: bool) -> Iterator[Replacement]:
        """Yield what was logged since the last update, in place of everything from there on; at first, of all rows."""
        records, is_replaced = self._metrics.read()
        new: dict[str, dict[tuple[int, int], tuple[Any, ...]]] = {table: {} for table in _METRICS}
        for record in records:
            if (line := metrics_line(record)) is not None:
                for table, names in _METRICS.items():
                    if names[0] in line.values:
                        numbers = (as_number(line.values.get(name)) for name in names)
                        new[table][line.attempt, line.step] = (
                            self.run_id, line.attempt, line.step, line.time, *numbers,
                        )  # fmt: skip
        for table, rows in new.items():
            if is_first or is_replaced:
                yield Replacement(table, "run_id = ?", (self.run_id,), rows.values())
            elif rows:
                condition = "run_id = ? AND (attempt, step) >= (?, ?)"
                yield Replacement(table, condition, (self.run_id, *min(rows)), rows.values())

    def close(self) -> None:
        self.cache.close()

    def __enter__(self) -> RunExport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
