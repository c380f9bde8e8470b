"""``vorox unlearn``: a run again, from the last state before it read some documents, with these masked."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vorox.cli.runs.materialize import state_after
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import confirm, print_json, print_table, print_wrapped, printing_to_stderr
from vorox.cli.training.fork import train_to_end
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.cache.upkeep.erasure import Record, check_erasable, erase_documents
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.named_documents import named_documents
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import examine_chain
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import (
    INHERITED,
    attempt_notes,
    find_run,
    run_argument,
    run_attempts,
    run_directories,
)
from vorox.training.checkpoints.materialized_cache import folder
from vorox.training.checkpoints.signature import load_private_key, read_statement
from vorox.training.fork import ForkChange, check_change, fork
from vorox.training.materialize import open_range
from vorox.training.re_execution import cost_of
from vorox.training.reports.document_search import DocumentQuery, Finding, derived_directories, search_runs
from vorox.training.reports.document_traces import Copy, Trace, caches_by_source, copies_of, texts_of, traces_of
from vorox.training.unlearn import Reads, by_uri, check_unlearned, reads_of, stages_of, state_unlearned, unlearned_fork

if TYPE_CHECKING:
    from vorox.training.checkpoints.signature import PrivateKey

_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class _Case:
    """What is known of documents and a run before anything is computed.

    Attributes:
        run: The run.
        step: The state to fork it at, in finished steps; ``None`` if there is nothing to unlearn.
        documents: The documents, by name.
        caches: Version of the file, and index of the record of each, by the cache that has it.
        stages: The forks to make, each of the one before; empty if there is nothing to unlearn.
        reads: What its updates read of them.
        copies: Documents that share text with them.
        traces: Where they act although they are masked.
        findings: What every known run saw of their texts.
        directories: Exports, averages and states that hold an update from them.
        is_erased: Whether the text of one is erased from its cache.
    """

    run: Path
    step: int | None
    documents: Mapping[str, tuple[MaskedDocument, ...]]
    caches: Mapping[Path, Collection[Record]]
    stages: Sequence[tuple[int, ForkChange]]
    reads: Reads
    copies: Sequence[Copy]
    traces: Sequence[Trace]
    findings: Sequence[Finding]
    directories: Sequence[Path]
    is_erased: bool

    @property
    def own(self) -> Finding:
        return next(one for one in self.findings if one.directory.resolve() == self.run.resolve())


def unlearn(
    run: str,
    document: list[str] | None,
    listed: Path | None,
    name: str | None,
    key: Path | None,
    search: list[Path] | None,
    erase: bool,
    nproc: int,
    plan: bool,
    yes: bool,
    root: str,
    as_json: bool,
) -> None:
    private_key = None if key is None else load_private_key(key)
    names = _names(document or [], listed)
    case = _examine(find_run(root, run), names, Path(root), search or [])
    if erase:
        _check_erasable(case)
    if plan:
        _print_plan(case, as_json=as_json)
        return
    with printing_to_stderr(is_active=as_json):
        if erase:
            _confirm_erasure(case, yes=yes)
        directory = _unlearned(case, name, root, nproc, private_key)
        erased = _erase(case) if erase else []
    if as_json:
        print_json({**_case_json(case), **_unlearned_json(directory), "erased": erased})


def _unlearned(case: _Case, name: str | None, root: str, nproc: int, key: PrivateKey | None) -> Path | None:
    """Return the trained fork without the documents, with its statement; ``None`` if nothing is to be unlearned."""
    if case.step is None:
        _print_case(case)
        typer.echo("Nothing is to be unlearned, and no run was written")
        return None
    config = recorded_config(case.run)
    directory, own = case.run, name or f"{config.run.name or case.run.name}-unlearned"
    for number, (at, change) in enumerate(case.stages, 1):
        called = own if number == len(case.stages) else f"{own}-{number}"
        directory = _forked(directory, at, change, called, root, nproc)
    _state(directory, case, key)
    return directory


def _forked(parent: Path, step: int, change: ForkChange, name: str, root: str, nproc: int) -> Path:
    """Return the trained fork of a run at a step: a new one, or the one that an earlier command began."""
    directory = unlearned_fork(parent, step, change)
    if directory is None:
        state = None if step == 0 else state_after(parent, step, root, nproc)
        directory = fork(parent, step, state, change, name)
        typer.echo(f"Forked {parent.name} at step {step:,}: {directory}")
    if not _is_finished(directory):
        train_to_end(directory, nproc)
    return directory


def _names(documents: Sequence[str], listed: Path | None) -> list[str]:
    """Return the documents that the options name, each once."""
    lines: list[str] = []
    if listed is not None:
        try:
            lines = listed.read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"The list cannot be read: {reason}", where=str(listed), hint="name a text file, one FILE:RECORD a line"
            ) from error
    named = (line.partition("#")[0].strip() for line in lines)
    found = list(dict.fromkeys([*documents, *(name for name in named if name)]))
    if not found:
        raise ConfigError(
            "No document is named", where="--document" if listed is None else str(listed),
            hint="write FILE:RECORD, as text.jsonl:17; `vorox data where RUN --step N` shows both",
        )  # fmt: skip
    return found


def _examine(run: Path, names: Sequence[str], root: Path, folders: Sequence[Path]) -> _Case:
    """Find out what a run read of documents, what is like them, and what else has learned from them."""
    missing = [one for one in folders if not one.is_dir()]
    if missing:
        raise ConfigError("There is no such folder", where=f"--search {missing[0]}", hint="leave it out, or correct it")
    display = BuildDisplay()
    try:
        with RunDataIndex.open(run) as run_data:
            typed = named_documents(run_data, names, "--document")
            documents = by_uri(run_data, (one for named in typed.values() for one in named))
            reads = reads_of(run_data, documents)
            step = None if reads.clean_step is None else min(reads.clean_step, examine_chain(run).last_known_step)
            check_change(run_data, step or 0, ForkChange(documents))
            stages = [] if step is None else stages_of(run_data, step, documents)
            caches: dict[Path, set[Record]] = {}
            for one in (one for named in documents.values() for one in named):
                directory = caches_by_source(run_data)[one.source].directory
                caches.setdefault(directory, set()).add((one.file_version, one.ordinal))
            texts = texts_of(run_data, documents)
            copies = copies_of(run_data, texts)
            hashes = tuple(sorted({found for text in texts for found in text.hashes}))
            runs = {one.resolve(): one for one in [*run_directories(root), *run_directories(run.parent), run]}
            findings = search_runs(
                runs.values(),
                DocumentQuery(text_hashes=hashes, records=tuple(sorted({*itertools.chain(*caches.values())}))),
                lambda done, total: display.step("searching runs", done, total),
            )  # fmt: skip
            traces = traces_of(run_data, recorded_config(run), texts, findings)
    finally:
        display.close()
    places = [*folders, RunLayout(run).exports, folder(run)]
    derived = derived_directories(findings, (place for place in places if place.is_dir()))
    return _Case(
        run,
        step,
        documents,
        caches,
        stages,
        reads,
        copies,
        traces,
        findings,
        derived,
        not all(text.hashes for text in texts),
    )


def _is_finished(directory: Path) -> bool:
    last = run_attempts(directory)[-1:]
    return bool(last) and last[0]["outcome"] == "finished" and not last[0].get(INHERITED)


def _state(directory: Path, case: _Case, key: PrivateKey | None) -> None:
    """Check a trained fork, write its statement, and print what it says."""
    reads = check_unlearned(directory, case.documents)
    step = max(step_directories(directory))
    path = RunLayout(directory).statement("unlearned", step)
    if not (case.is_erased and path.exists()):  # which knew more
        path = state_unlearned(directory, [*case.documents], reads, case.traces, case.copies, key)
    typer.echo(
        f"\nNo update of {directory.name} up to step {step:,} read the content of "
        f"{pluralize(len(case.documents), 'document')}; {pluralize(len(reads.masked_steps), 'step')} read filler"
    )
    typer.echo(f"{'Statement' if key is None else 'Signed statement'}: {path}")
    _print_rest(case)
    typer.echo(f"\nCompare: vorox runs compare --paired {run_argument(case.run)} {run_argument(directory)}")


def _check_erasable(case: _Case) -> None:
    """Refuse an erasure in the end before anything is computed."""
    logits = recorded_config(case.run).train.distillation.logits
    if logits is not None:
        raise ConfigError(
            f"{case.run.name} finds the stored logits of its teacher by rows as they were before an erasure",
            where=f"--erase, train.distillation.logits={logits}", saved="nothing was written",
            hint="leave --erase out; the stored logits also hold what the teacher predicted for the documents",
        )  # fmt: skip
    for directory in case.caches:
        check_erasable(directory)


def _confirm_erasure(case: _Case, *, yes: bool) -> None:
    others = [one.directory.name for one in _others(case) if not one.inherited_from]
    first = f" Unlearn them from {', '.join(others)} first, which is not possible afterwards." if others else ""
    confirm(
        f"Erase {pluralize(len(case.documents), 'document')} from {pluralize(len(case.caches), 'cache')} in the end? "
        f"Steps of {case.run.name} that read them cannot be computed again.{first}", yes=yes,
    )  # fmt: skip


def _erase(case: _Case) -> list[dict[str, Any]]:
    """Erase the documents from the caches that the run reads; return what that did, as JSON."""
    done: list[dict[str, Any]] = []
    for directory, records in case.caches.items():
        erased = erase_documents(directory, records)
        replaced = pluralize(len(erased.chunks), "chunk")
        typer.echo(f"Erased {pluralize(len(records), 'document')} from {directory}: {replaced} replaced")
        done.append({"cache": str(directory), "num_documents": len(records), "num_chunks": len(erased.chunks)})
    for directory, found in zip(case.caches, done, strict=True):  # one cache may have erased what another one shares
        remaining = sorted(erase_documents(directory, case.caches[directory]).remaining)
        found["remaining"] = [str(path) for path in remaining]
    shown = sorted({path for found in done for path in found["remaining"]})
    print_wrapped(f"  still there, in {path}" for path in shown)
    return done


def _case_json(case: _Case) -> dict[str, Any]:
    return {
        "run": case.run.name, "documents": list(case.documents), "steps": list(case.reads.steps),
        "clean_step": case.step, "acts": [asdict(trace) for trace in case.traces],
        "copies": [asdict(copy) for copy in case.copies], "checkpoints": list(case.own.checkpoints),
        "runs": {one.directory.name: one.first_step for one in _others(case)},
        "directories": [str(path) for path in case.directories],
    }  # fmt: skip


def _unlearned_json(directory: Path | None) -> dict[str, Any]:
    """Return the new run and its statement as JSON; ``None`` for both if nothing is to be unlearned."""
    if directory is None:
        return {"unlearned": None, "directory": None, "statement": None}
    written = read_statement(RunLayout(directory).statement("unlearned", max(step_directories(directory))))
    statement = {"path": str(written.path), "key_ids": list(written.key_ids), "content": dict(written.content)}
    return {"unlearned": directory.name, "directory": str(directory), "statement": statement}


def _print_plan(case: _Case, *, as_json: bool) -> None:
    """Print what unlearning takes, and what is known already."""
    step = case.step
    num_steps, seconds, size_bytes = (0, 0.0, 0) if step is None else _cost(case, step)
    if as_json:
        print_json({**_case_json(case), "num_steps": num_steps, "seconds": seconds, "size_bytes": size_bytes})
        return
    _print_case(case)
    if step is not None:
        took = "" if seconds is None else f", about {humanize.duration(seconds)}"
        typer.echo(
            f"It takes {pluralize(num_steps, 'step')} from state {step:,} on{took}, and {humanize.size(size_bytes)} "
            "per checkpoint"
        )
    _print_rest(case)


def _cost(case: _Case, step: int) -> tuple[int, float | None, int]:
    """Return the steps to compute, their seconds if a speed is known, and the bytes of a checkpoint."""
    run = case.run
    lengths = [length for length in attempt_notes(run, "total_steps") if type(length) is int]
    end = max(examine_chain(run, step).last_known_step, *lengths[-1:])
    before = cost_of(open_range(run, [step]))
    num_before = 0 if step == 0 or step in step_directories(run) else before.num_steps
    starts = [at for at, _ in case.stages]
    num_steps = num_before + sum(end - at for at in starts)
    seconds = None
    if before.seconds is not None and before.start_seconds is not None:
        step_seconds = (before.seconds - before.start_seconds) / before.num_steps
        seconds = (len(starts) + bool(num_before)) * before.start_seconds + num_steps * step_seconds
    return num_steps, seconds, before.checkpoint_bytes or 0


def _print_case(case: _Case) -> None:
    steps, documents = case.reads.steps, pluralize(len(case.documents), "document")
    if steps:
        num_steps = pluralize(len(steps), "step")
        shown = f"{num_steps} of {case.run.name} read the content of {documents}, first step {steps[0]:,}"
    elif case.reads.planned_step is not None:
        shown = f"No step of {case.run.name} has read {documents} yet; step {case.reads.planned_step:,} will"
    else:
        shown = f"No step of {case.run.name} reads the content of {documents}"
    typer.echo(shown)


def _others(case: _Case) -> list[Finding]:
    """Return the other runs that saw the texts, or could not be searched."""
    return [
        one for one in case.findings
        if one is not case.own and (one.first_step is not None or one.inherited_from or one.problem)
    ]  # fmt: skip


def _print_rest(case: _Case) -> None:
    """Print where the documents still act, what is like them, and what else has learned from them."""
    typer.echo("\nWhere they still act")
    print_table(["ACTS", "THROUGH", "EVIDENCE"], [[one.answer, one.place, one.evidence] for one in case.traces])
    if case.copies:
        typer.echo("\nThese share text with them, and stay; name them too if they are to go")
        rows = [
            [f"{one.fraction:.0%}", f"{len(one.steps):,}", one.name, _short(one.of)]
            for one in case.copies[:_MOST_LINES]
        ]
        print_table(["SHARE", "STEPS", "DOCUMENT", "OF"], rows, right="SHARE STEPS")
        if len(case.copies) > _MOST_LINES:
            typer.echo(f"... and {len(case.copies) - _MOST_LINES:,} more; use --plan --json for all")
    lines = [f"{case.run.name}: {pluralize(len(case.own.checkpoints), 'checkpoint')}"] if case.own.checkpoints else []
    for one in _others(case):
        if one.problem:
            lines.append(f"{one.directory.name}: unknown, it could not be searched: {one.problem}")
        elif one.inherited_from:
            lines.append(f"{one.directory.name}: all, through {one.inherited_from}")
        else:
            lines.append(f"{one.directory.name}: from step {one.first_step:,} on")
    lines += [str(path) for path in case.directories]
    if case.is_erased:
        typer.echo("\nText that is erased already was not looked for in other documents and runs")
    if lines:
        typer.echo("\nThese hold updates from their text, and stay")
        print_wrapped(f"  {line}" for line in lines)


def _short(name: str) -> str:
    return name.rpartition("/")[2]
