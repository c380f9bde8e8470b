"""Unlearn documents: the same run, in which no update reads their content.

In: a run and documents of it. Out: the last state before any of them was read, which a fork that masks them goes on
from, and a signed statement once it is trained. The fork is bit for bit a run that masked them from its first step,
because no earlier step differs. It is not a run without them: their lengths and places stay
(``reports/document_traces.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox.core.config import decides_bits, differences
from vorox.core.errors import CheckpointError, DataError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.queries import Occurrence, when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import examine_chain
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import fork_origin, run_argument, run_directories, run_id_of
from vorox.training.checkpoints.signature import (
    STATEMENT_TYPE,
    UNLEARNED_TYPE,
    file_digests,
    recorded_state,
    write_statement,
)
from vorox.training.fork import ForkChange
from vorox.training.reports.document_traces import Copy, Trace, caches_by_source
from vorox.training.resume.resume_settings import changes_after, config_in_force

if TYPE_CHECKING:
    from vorox.training.checkpoints.signature import PrivateKey

CLAIM = "no update of the run read the content of the documents"


@dataclass(frozen=True, slots=True)
class Reads:
    """What the updates of a run read of some documents.

    Attributes:
        steps: The executed steps that read the content of one, ascending: also skipped ones, not abandoned ones.
        masked_steps: Those that read a filler in its place.
        planned_step: The first step to come that will read the content of one; ``None`` without any.
    """

    steps: tuple[int, ...]
    masked_steps: tuple[int, ...]
    planned_step: int | None

    @property
    def clean_step(self) -> int | None:
        """The last state before any of them was read, in finished steps; ``None`` if none was, nor will be."""
        first = self.steps[0] if self.steps else self.planned_step
        return None if first is None else first - 1


def reads_of(run_data: RunDataIndex, names: Iterable[str]) -> Reads:
    """Return what the updates of a run read of documents.

    Args:
        run_data: The run.
        names: ``FILE:RECORD`` each.

    Raises:
        ConfigError: The run has no such file, or several.
        DataError: A chunk is missing or damaged, or the record of the executed steps is lost.
    """
    found: list[Occurrence] = []
    for name in names:
        file, _, record = name.rpartition(":")
        found += when(run_data, file, ordinal=int(record))
    executed = [one for one in found if one.state in ("kept", "open", "skipped")]
    steps = {one.step for one in executed if not one.is_masked}
    planned = [one.step for one in found if one.state == "planned" and not one.is_masked]
    masked = {one.step for one in executed if one.is_masked}
    return Reads(tuple(sorted(steps)), tuple(sorted(masked)), min(planned, default=None))


def by_uri(run_data: RunDataIndex, documents: Iterable[MaskedDocument]) -> dict[str, tuple[MaskedDocument, ...]]:
    """Return documents by the whole name of their file and their record, in order: each has one name."""
    named: dict[str, tuple[MaskedDocument, ...]] = {}
    caches = caches_by_source(run_data)
    for document in sorted(set(documents), key=lambda one: (one.source, one.file_version, one.ordinal)):
        files = [file.uri for file in caches[document.source].files if file.version == document.file_version]
        name = f"{files[0] if files else document.file_version}:{document.ordinal}"
        named[name] = (*named.get(name, ()), document)
    return {name: named[name] for name in sorted(named)}


def _masked_after(run_data: RunDataIndex, step: int) -> dict[int, list[MaskedDocument]]:
    """Return the documents that the plan masks only after a state, by the state from which a fork has to mask them.

    Where no step reads a document between the two, that is the state itself: it is the same to the bit.
    """
    sizes, found = run_data.plan.start.batch_sizes, dict[int, list[MaskedDocument]]()
    for event in run_data.plan.state.masks:
        masked_from = sizes.step_at(event.start_position)
        if masked_from <= step:
            continue
        for name, documents in by_uri(run_data, event.documents).items():
            is_read = any(step < one for one in reads_of(run_data, [name]).steps)
            found.setdefault(masked_from if is_read else step, []).extend(documents)
    return found


def stages_of(
    run_data: RunDataIndex, step: int, documents: Mapping[str, tuple[MaskedDocument, ...]]
) -> list[tuple[int, ForkChange]]:
    """Return the forks that repeat a run with documents masked from a state on: at it, and where its settings changed.

    Each is a fork of the one before, at a state that it has computed.
    """
    masked = _masked_after(run_data, step)
    masked.setdefault(step, []).extend(one for named in documents.values() for one in named)
    overrides = dict(changes_after(run_data.directory, step))
    return [
        (at, ForkChange(by_uri(run_data, masked.get(at, ())), overrides=overrides.get(at, ())))
        for at in sorted({*masked, *overrides})
    ]


def unlearned_fork(parent: Path, step: int, change: ForkChange) -> Path | None:
    """Return the run beside a run that was forked from it at a step by this change alone; ``None`` without one.

    One that was resumed with other settings since is another run.
    """
    wanted = {"run_id": run_id_of(parent), "step": step, "change": change.to_json()}
    expected, _ = config_in_force(parent, step, overrides=change.overrides)
    for directory in run_directories(parent.parent):
        origin = fork_origin(directory)
        if {key: origin.get(key) for key in wanted} == wanted:
            found = differences(expected, recorded_config(directory))
            if not any(decides_bits(entry.key) for entry in found):
                return directory
    return None


def check_unlearned(run_directory: Path, documents: Mapping[str, Sequence[MaskedDocument]]) -> Reads:
    """Check that no executed step of a run read the content of documents, by its plan, caches and chain.

    Raises:
        DataError: A step did, the chain lacks one, or a record is damaged.
    """
    with RunDataIndex.open(run_directory) as run_data:
        reads = reads_of(run_data, documents)
        masked = {one for event in run_data.plan.state.masks for one in event.documents}
    missing = [name for name, named in documents.items() if not masked.issuperset(named)]
    if reads.steps or missing:
        what = f"Step {reads.steps[0]:,} reads" if reads.steps else f"The plan does not mask {missing[0]}: steps read"
        raise DataError(
            f"{what} the content of a document that is to be unlearned", where=str(run_directory),
            hint=f"see the steps with `vorox data when {run_argument(run_directory)}`, and unlearn it from this run",
        )  # fmt: skip
    chain = examine_chain(run_directory, 0)
    if damage := chain.damage(chain.last_known_step):
        raise DataError(
            f"The replay chain is not intact: {damage}", where=str(chain.path), hint="restore the file from a copy"
        )
    return reads


def state_unlearned(
    run_directory: Path,
    documents: Iterable[str],
    reads: Reads,
    traces: Sequence[Trace],
    copies: Sequence[Copy],
    key: PrivateKey | None = None,
) -> Path:
    """Write the statement that a run's newest checkpoint holds no update from documents.

    It is an in-toto Statement about the files of the checkpoint, by their SHA-256; with a key, in a DSSE envelope.

    Args:
        run_directory: The fork, trained.
        documents: The documents, as ``FILE:RECORD``.
        reads: As of ``check_unlearned``.
        traces: Where they still act.
        copies: Documents that share text with them, and stay.
        key: Signs it.

    Returns:
        The file, in the directory of the run.

    Raises:
        CheckpointError: The run has no checkpoint, or its newest is damaged, or not the one that its chains record.
    """
    kept = step_directories(run_directory)
    if not kept:
        raise CheckpointError(
            "The run has no checkpoint to make a statement about", where=str(run_directory),
            hint=f"train it: vorox train --resume {run_argument(run_directory)}",
        )  # fmt: skip
    step = max(kept)
    metadata, state = recorded_state(run_directory, step)
    origin = fork_origin(run_directory)
    predicate: dict[str, Any] = {
        "claim": CLAIM, "run": run_directory.name, "step": step, "documents": list(documents),
        "forked_from": {name: origin.get(name) for name in ("run_id", "step", "chain")},
        "chain": metadata["chain"], "fingerprint": metadata["fingerprint"], "states": state.states,
        "masked_steps": [one for one in reads.masked_steps if one <= step],
        "acts": [asdict(trace) for trace in traces], "copies": [asdict(copy) for copy in copies],
    }  # fmt: skip
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in file_digests(kept[step]).items()]
    statement = {
        "_type": STATEMENT_TYPE, "subject": subjects, "predicateType": UNLEARNED_TYPE, "predicate": predicate,
    }  # fmt: skip
    path = RunLayout(run_directory).statement("unlearned", step)
    write_statement(path, statement, key)
    return path
