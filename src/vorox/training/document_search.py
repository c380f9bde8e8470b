"""Search runs for a document: the steps and checkpoints that trained on it.

Runs go in; one finding per run comes out, also for runs that did not see the document or cannot be searched: an answer
never leaves out a run silently. A run that started from weights of a checkpoint inherits what that checkpoint saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vorox.core.errors import VoroxError
from vorox.core.run_layout import parse_checkpoint_name, run_of_checkpoint
from vorox.data import provenance_queries
from vorox.data.provenance_queries import Occurrence
from vorox.data.run_data_index import RunDataIndex, attempt_notes
from vorox.experiments.artifacts import list_checkpoints


@dataclass(frozen=True, slots=True)
class DocumentQuery:
    """A document: by its file (and a byte or record of it), or by hashes of its text.

    Attributes:
        source: The file, or the end of its name; ``None``: search for the text.
        byte: Only the document with this byte of the file.
        ordinal: Only the document with this index in the file.
        text_hashes: The xxh3-64 of the possible texts.
    """

    source: str | None = None
    byte: int | None = None
    ordinal: int | None = None
    text_hashes: tuple[int, ...] = ()

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
            return provenance_queries.when_text(run_data, self.text_hashes)
        if not strict and not provenance_queries.matching_files(run_data, self.source):
            return ()
        return provenance_queries.when(run_data, self.source, self.byte, ordinal=self.ordinal)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run saw of a document.

    Attributes:
        directory: The run.
        occurrences: The steps that train on it.
        first_step: The first executed step whose update was applied; every later checkpoint of the run, also one that
            was exported or mirrored, saw the document. ``None`` if there is none.
        checkpoints: Names of the checkpoints on disk that saw it, quarantined ones included, by step.
        inherited_from: The weights that the run started from, if those saw it: all of its checkpoints did.
        unknown_weights: The weights that the run started from, if they are of no run that was searched.
        problem: Why the run cannot be searched; empty if it was.
    """

    directory: Path
    occurrences: tuple[Occurrence, ...] = ()
    first_step: int | None = None
    checkpoints: tuple[str, ...] = ()
    inherited_from: str = ""
    unknown_weights: str = ""
    problem: str = ""


def search_runs(directories: Iterable[Path], query: DocumentQuery) -> list[Finding]:
    """Search runs for a document; runs that cannot be searched have a problem instead of an answer."""
    findings = {directory.resolve(): search_run(directory, query) for directory in directories}
    return [_with_inherited(finding, findings) for finding in findings.values()]


def search_run(directory: Path, query: DocumentQuery) -> Finding:
    """Search one run for a document, without what it inherits."""
    try:
        with RunDataIndex.open(directory) as run_data:
            found = query.occurrences(run_data)
    except (VoroxError, OSError) as error:
        return Finding(directory, problem=str(error))
    return finding_of(directory, found)


def finding_of(directory: Path, occurrences: Sequence[Occurrence]) -> Finding:
    """Return what a run saw, given the steps that train on a document."""
    skipped = {one.step for one in occurrences if one.state == "skipped"}
    executed = [one.step for one in occurrences if one.state in {"kept", "open", "rolled_back"}]
    first_step = min((step for step in executed if step not in skipped), default=None)
    return Finding(directory, tuple(occurrences), first_step, _checkpoints(directory, first_step))


def _checkpoints(directory: Path, first_step: int | None) -> tuple[str, ...]:
    known = list_checkpoints(directory) if first_step is not None else []
    return tuple(entry.name for entry in known if first_step is not None and entry.step >= first_step)


def _with_inherited(finding: Finding, findings: Mapping[Path, Finding]) -> Finding:
    """Add what the initial weights of a run saw, through any number of runs."""
    origin = weights = _initial_weights(finding.directory)
    for _ in findings:
        if not weights:
            break
        run, name = run_of_checkpoint(Path(weights)), parse_checkpoint_name(Path(weights).name)
        parent = None if run is None else findings.get(run.resolve())
        if parent is None or parent.problem or name is None:
            return replace(finding, unknown_weights=weights)
        if parent.first_step is not None and name.step >= parent.first_step:
            return replace(finding, inherited_from=origin, checkpoints=_checkpoints(finding.directory, 0))
        weights = _initial_weights(parent.directory)
    return finding


def _initial_weights(directory: Path) -> str:
    """Return the checkpoint or other place that a run started from; empty if it started from none."""
    weights = attempt_notes(directory, "from_weights")
    return str(weights[-1]) if weights else ""
