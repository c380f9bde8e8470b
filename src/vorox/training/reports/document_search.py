"""Search runs for a document: the steps and checkpoints that trained on it.

Runs go in; one finding per run comes out, also for runs that did not see the document or cannot be searched: an answer
never leaves out a run silently. A run that started from weights of a checkpoint inherits what that checkpoint saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

from vorox.core.errors import VoroxError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.run_layout import checkpoint_directories, parse_checkpoint_name, run_of_checkpoint
from vorox.data.cache.reader import CacheReader
from vorox.data.order.document_masks import Record
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.queries import Occurrence
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.attempts import intervals, lineage
from vorox.records.executed_steps import executed_attempts
from vorox.records.run_lookup import notes_of_attempts, run_id_of
from vorox.training.checkpoints.origins import WEIGHTS_NOTE, CheckpointOrigin, contents_of, origins


@dataclass(frozen=True, slots=True)
class DocumentQuery:
    """A document: by its file (and a byte or record of it); or several, by hashes of their texts and their files.

    Attributes:
        source: The file, or the end of its name; ``None``: search for the text.
        byte: Only the document with this byte of the file.
        ordinal: Only the document with this index in the file.
        text_hashes: The xxh3-64 of the possible texts.
        records: Version of the file, and index of the record in it, wherever a run reads that file.
    """

    source: str | None = None
    byte: int | None = None
    ordinal: int | None = None
    text_hashes: tuple[int, ...] = ()
    records: tuple[Record, ...] = ()

    def occurrences(self, run_data: RunDataIndex, *, strict: bool = False) -> tuple[Occurrence, ...]:
        """Return the steps of a run that train on it.

        Args:
            run_data: The run.
            strict: Refuse a file that the run does not have; otherwise, no step trains on it.

        Raises:
            ConfigError: Several files match, or none does.
            DataError: A chunk is missing or damaged.
        """
        if self.source is None:
            found = [*provenance_queries.when_text(run_data, self.text_hashes)]
            for reader in run_data.readers:
                uris = {file.version: file.uri for file in reader.files}
                for version, ordinal in self.records:
                    if version in uris:
                        found += provenance_queries.when(run_data, uris[version], ordinal=ordinal)
            return tuple(dict.fromkeys(found))
        if not strict and not provenance_queries.matching_files(run_data, self.source):
            return ()
        return provenance_queries.when(run_data, self.source, self.byte, ordinal=self.ordinal)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run saw of a document.

    Attributes:
        directory: The run.
        occurrences: The steps that train on it.
        first_step: The first executed step whose update was applied; every later checkpoint of the attempts that
            executed it, also one that was exported or mirrored, saw the document. ``None`` if there is none.
        checkpoints: Names of the checkpoints on disk that saw it, quarantined ones included, by step.
        inherited_from: The weights that the run started from, if those saw it: all of its checkpoints did.
        unknown_weights: The weights that it descends from, if they are of no run that was searched.
        is_incomplete: Whether those are of a run, so that the answer for this one is incomplete.
        problem: Why the run cannot be searched; empty if it was.
    """

    directory: Path
    occurrences: tuple[Occurrence, ...] = ()
    first_step: int | None = None
    checkpoints: tuple[str, ...] = ()
    inherited_from: str = ""
    unknown_weights: str = ""
    is_incomplete: bool = False
    problem: str = ""


def search_runs(
    directories: Iterable[Path], query: DocumentQuery, on_progress: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """Search runs for a document; runs that cannot be searched have a problem instead of an answer.

    Args:
        directories: The runs.
        query: The document.
        on_progress: Called with the number of searched runs and of all.
    """
    runs, findings = list(directories), dict[Path, Finding]()
    opened: dict[Path, CacheReader] = {}  # most runs read the same caches
    for number, directory in enumerate(runs, 1):
        findings[directory.resolve()] = search_run(directory, query, opened)
        if on_progress is not None:
            on_progress(number, len(runs))
    family = _Family(list(findings.values()))
    return [family.with_inherited(finding) for finding in findings.values()]


def derived_directories(findings: Sequence[Finding], folders: Iterable[Path]) -> list[Path]:
    """Return the exports, averages and materialised states in folders that are of checkpoints that saw the document.

    An export of a checkpoint that is gone is found only if it names its run, as those of earlier versions do not.

    Args:
        findings: Of ``search_runs``.
        folders: Folders, searched to the bottom.
    """
    family, found = _Family(findings), dict[Path, Path]()
    for path in (path.parent for folder in folders for path in sorted(folder.rglob(MANIFEST_NAME))):
        if run_of_checkpoint(path) is None and any(family.has_seen(origin) for origin in origins(path)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def search_run(directory: Path, query: DocumentQuery, opened: dict[Path, CacheReader] | None = None) -> Finding:
    """Search one run for a document, without what it inherits."""
    try:
        with RunDataIndex.open(directory, opened) as run_data:
            found = query.occurrences(run_data)
    except (VoroxError, OSError) as error:
        return Finding(directory, problem=str(error))
    return finding_of(directory, found)


def finding_of(directory: Path, occurrences: Sequence[Occurrence]) -> Finding:
    """Return what a run saw, given the steps that train on a document."""
    applied = _applied(occurrences)
    first_step = min((one.step for one in applied), default=None)
    if first_step is None:
        return Finding(directory, tuple(occurrences))
    saved = _Saved(directory, applied)
    names = tuple(path.name for name, path in checkpoint_directories(directory) if saved.has_seen(name.step, path.name))
    return Finding(directory, tuple(occurrences), first_step, names)


def _applied(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return the executions whose update was applied and read the document, not a filler in its place."""
    skipped = {one.step for one in occurrences if one.state == "skipped"}
    executed = [one for one in occurrences if one.state in {"kept", "open", "rolled_back"}]
    return [one for one in executed if one.step not in skipped and not one.is_masked]


class _Saved:
    """Which checkpoints of a run hold an update of some steps: those of the attempts that executed them, and later.

    Args:
        directory: The run.
        applied: The executions of these steps.

    Raises:
        DataError: The record of the executed steps is lost.
    """

    def __init__(self, directory: Path, applied: Sequence[Occurrence]) -> None:
        self._applied = applied
        attempts = executed_attempts(directory) if applied else ()
        self._lines = {line.attempt.number: line for line in lineage(attempts)}
        self._history = intervals(attempts)

    def has_seen(self, step: int, name: str = "") -> bool:
        """Whether a checkpoint may hold such an update: surely, unless its attempt is one of several.

        Args:
            step: Its step.
            name: Its name, if it is known: an attempt that was abandoned has written the replaced ones.
        """
        known = parse_checkpoint_name(name)
        status = None if known is None else known.status
        writers = [part for part in self._history if part.first_step <= step <= part.last_step]
        if status is not None and status in {"", "replaced"}:
            is_replaced = status == "replaced"
            writers = [part for part in writers if (part.outcome == "rolled_back") == is_replaced] or writers
        if not writers:  # of an attempt that a power cut has shortened in the record
            return any(one.step <= step for one in self._applied)
        return any(self._has_executed(part.attempt, step) for part in writers)

    def _has_executed(self, attempt: int | None, step: int) -> bool:
        """Whether an attempt, or those that it continues, executed such a step up to this one."""
        while attempt is not None:
            if any(one.attempt == attempt and one.step <= step for one in self._applied):
                return True
            line = self._lines[attempt]
            attempt, step = line.parent, line.attempt.start_step
        return False


class _Weights(NamedTuple):
    """The initial weights of a run: where they were, the checkpoints that they are of, and whether they are of a run.

    Without a run, such as a model of the Hub, there is nothing to search.
    """

    place: str = ""
    of: tuple[CheckpointOrigin, ...] = ()
    is_of_run: bool = False


class _Descent(NamedTuple):
    """Whether the initial weights of a run saw the document; otherwise which weights nobody searched, if any."""

    has_seen: bool = False
    unknown: str = ""
    is_incomplete: bool = False


class _Family:
    """Searched runs, and which of their checkpoints others started from, wherever those are now.

    Args:
        findings: What each run saw by itself.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._findings = findings
        self._by_run: dict[str, list[Finding]] = {}
        for finding in findings:
            self._by_run.setdefault(run_id_of(finding.directory), []).append(finding)

    @cached_property
    def _by_content(self) -> dict[str, tuple[Finding, str]]:
        """A run and the name of its checkpoint, by the content of the checkpoint."""
        runs = sorted(self._findings, key=lambda finding: not finding.problem)  # of copies, one that was searched
        checkpoints = [(finding, path) for finding in runs for _, path in checkpoint_directories(finding.directory)]
        return {content: (finding, path.name) for finding, path in checkpoints for content in contents_of(path)}

    def has_seen(self, origin: CheckpointOrigin) -> bool:
        """Whether a checkpoint that weights are of saw the document."""
        return any(
            bool(run.inherited_from) or _Saved(run.directory, _applied(run.occurrences)).has_seen(origin.step, name)
            for run, name in self._parents(origin)
        )

    def with_inherited(self, finding: Finding) -> Finding:
        """Add what the initial weights of a run saw, through any number of runs."""
        descent = self._descent(finding, ())
        if descent.has_seen:
            names = tuple(path.name for _, path in checkpoint_directories(finding.directory))
            weights = _initial_weights(finding.directory)
            return replace(finding, inherited_from=weights.place, checkpoints=names)
        return replace(finding, unknown_weights=descent.unknown, is_incomplete=descent.is_incomplete)

    def _descent(self, run: Finding, children: tuple[Path, ...]) -> _Descent:
        weights = _initial_weights(run.directory)
        if not weights.of:
            return _Descent(unknown=weights.place, is_incomplete=weights.is_of_run)
        found, children = _Descent(), (*children, run.directory)
        for origin in weights.of:
            parents = self._parents(origin)
            if not parents or any(parent.problem for parent, _ in parents):
                found = _Descent(unknown=weights.place, is_incomplete=True)
            for parent, name in parents:
                if _Saved(parent.directory, _applied(parent.occurrences)).has_seen(origin.step, name):
                    return _Descent(has_seen=True)
                above = _Descent() if parent.directory in children else self._descent(parent, children)
                if above.has_seen:
                    return above
                found = found if found.is_incomplete or not above.unknown else above
        return found

    def _parents(self, origin: CheckpointOrigin) -> list[tuple[Finding, str]]:
        """Return the runs that a checkpoint is of, and its name there; empty if it is there no more."""
        if origin.fingerprint in self._by_content:
            return [self._by_content[origin.fingerprint]]
        return [(finding, "") for finding in self._by_run.get(origin.run, [])]


def _initial_weights(directory: Path) -> _Weights:
    first = next((note for note in notes_of_attempts(directory) if "from_weights" in note), None)
    if first is None:
        return _Weights()
    place = str(first["from_weights"])
    of = tuple(CheckpointOrigin.from_json(value) for value in cast("list[object]", first[WEIGHTS_NOTE]))
    return _Weights(place, of, bool(of))
