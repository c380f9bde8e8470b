"""``vorox audit``: compute a random sample of a run's segments again, and state what that proves."""

from __future__ import annotations

import functools
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vorox.cli.launch.rank_launcher import is_main_rank, launch_ranks
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import membership
from vorox.core.schema import RunConfig
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.run_views import missing_views
from vorox.experiments.verdicts import record_verdict
from vorox.records.run_lookup import find_run
from vorox.run import with_states, workload_of_run
from vorox.training import audit as auditing
from vorox.training.audit import AuditReport, SegmentResult, cost_of
from vorox.training.audit_records import AuditedRun, open_run
from vorox.training.audit_sample import Chance, Segment, chances
from vorox.training.checkpoints.signature import load_private_key, load_public_key, write_statement
from vorox.training.steps.workload import Workload

if TYPE_CHECKING:
    from vorox.training.checkpoints.signature import PrivateKey

_NOTHING = "nothing was written"


def audit(
    run: str,
    segments: int,
    challenge: str | None,
    public_key: Path | None,
    states: Path | None,
    cache: Path | None,
    output: Path | None,
    sign_key: Path | None,
    plan: bool,
    nproc: int,
    root: str,
    as_json: bool,
) -> None:
    directory = find_run(root, run)
    own_key = _check_output(output, sign_key)
    text = _challenge(challenge)
    options = {"--public-key": public_key, "--states": states, "--cache": cache}
    if nproc > 1 and not plan:
        words = _words(str(directory), segments, text, {**options, "--output": output, "--sign-key": sign_key})
        raise typer.Exit(launch_ranks(nproc, [*words, *(["--json"] if as_json else [])], advice=""))
    member = membership()
    num_processes = nproc if member is None else member.world_size or nproc
    audited = open_run(
        directory,
        num_processes=num_processes,
        key=None if public_key is None else load_public_key(public_key),
        states=states,
    )
    sample = audited.sample(text, segments)
    if plan:
        words = _words(str(directory), segments, text, options) + (["--nproc", str(nproc)] if nproc > 1 else [])
        _print_plan(audited, sample, text, f"vorox {shlex.join(words)}", as_json=as_json)
        return
    display = BuildDisplay()
    try:
        compute = functools.partial(
            auditing.audit,
            audited,
            text,
            segments,
            functools.partial(_workload, directory, cache),
            is_drawn=challenge is None,
            on_step=lambda done, total: display.step("computing segments", done, total),
        )
        report = with_states(compute, PrintedNotices())
    finally:
        display.close()
    if is_main_rank():
        record_verdict(directory, "audit", passed=report.verdict == "passed", text=_verdict(report))
        if output is not None:
            _write(report, output, own_key)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report, output)
    if (error := report.error()) is not None:
        raise error


def _words(run: str, segments: int, challenge: str, files: Mapping[str, Path | None]) -> list[str]:
    """Return the command line of an audit, without the program's name."""
    words = ["audit", run, "--segments", str(segments), "--challenge", challenge]
    return words + [word for name, path in files.items() if path is not None for word in (name, str(path))]


def _challenge(text: str | None) -> str:
    if text is None:
        return secrets.token_hex(16)
    if not text.strip():
        raise ConfigError(
            "The challenge is empty", where="--challenge", saved=_NOTHING,
            hint="write a number or text that the run's owner could not know, or leave the option out",
        )  # fmt: skip
    return text


def _check_output(output: Path | None, sign_key: Path | None) -> PrivateKey | None:
    """Check that the statement can be written, and read the key that signs it."""
    if output is None and sign_key is not None:
        raise ConfigError(
            "--sign-key signs the statement, and none is written", where="--sign-key", hint="add --output FILE"
        )
    if output is not None and output.exists():
        raise ConfigError(f"{output.name} is already there", where=str(output), hint="name a new file", saved=_NOTHING)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError("The folder of the statement does not exist", where=str(output), hint="create it first")
    return None if sign_key is None else load_private_key(sign_key)


def _workload(run_directory: Path, cache: Path | None, config: RunConfig) -> Workload:
    """Open what computes steps of a run, with the caches at another place if one is named.

    Raises:
        DataError: They are missing.
    """
    if cache is not None:
        settings = config.data.cache.model_copy(update={"directory": str(cache.absolute())})
        config = config.model_copy(update={"data": config.data.model_copy(update={"cache": settings})})
    root, is_named = cache_root(config.data), cache is not None
    missing = missing_views(run_directory, root, only_root=is_named) if config.data.mode != "streaming" else []
    if missing:
        raise DataError(
            f"{pluralize(len(missing), 'cache')} of the run not found: {', '.join(missing)}",
            where=str(root), saved=_NOTHING, hint="name the folder that has them with --cache DIR"
            + (", or leave --cache out to read them where the run recorded them" if is_named else ""),
        )  # fmt: skip
    return workload_of_run(run_directory, config, only_cache_root=is_named)


def _write(report: AuditReport, output: Path, key: PrivateKey | None) -> None:
    try:
        write_statement(output, report.statement(), key)
    except OSError as error:
        raise ConfigError(
            f"The statement cannot be written: {error.strerror}", where=str(output), hint="name another --output FILE"
        ) from error


def _print_plan(audited: AuditedRun, sample: Sequence[Segment], challenge: str, command: str, *, as_json: bool) -> None:
    cost = cost_of(audited, sample)
    found = chances(len(audited.auditable), len(sample))
    if as_json:
        print_json(
            {
                "challenge": challenge, **asdict(cost), "num_auditable": len(audited.auditable),
                "sample": [{"number": one.number, "start": one.start, "end": one.end} for one in sample],
                "chances": [chance._asdict() for chance in found],
            }
        )  # fmt: skip
        return
    _print_heads(audited, challenge)
    listed = ", ".join(map(_steps, sorted(sample, key=lambda one: one.start)))
    seconds = "" if cost.seconds is None else f", about {humanize.duration(cost.seconds)}"
    lines = [
        f"Sample: {pluralize(len(sample), 'segment')} of {len(audited.auditable):,}, steps {listed}",
        f"Cost: {pluralize(cost.num_steps, 'step')} to compute in {pluralize(cost.num_starts, 'pass', 'passes')}"
        f"{seconds}; {humanize.size(cost.state_bytes)} of kept states to read",
    ]
    print_wrapped([*lines, *_limits(audited, found, len(sample), are_done=False)])
    typer.echo(f"Run it: {command}")


def _print_heads(audited: AuditedRun, challenge: str) -> None:
    heads = audited.heads
    names = {"chain": heads.chain, "states": heads.states, "plan": heads.plan}
    digests = ", ".join(f"{name} {digest[:16]}" for name, digest in names.items() if digest)
    signed = (
        "not signed: the files could have been changed after the challenge was known"
        if heads.key_id is None
        else f"signed by key {heads.key_id[:16]}"
    )
    lines = [f"{audited.directory.name} up to step {heads.step:,}: {digests}", f"  {signed}"]
    print_wrapped([*lines, f"Challenge: {challenge}"])


def _print(report: AuditReport, output: Path | None) -> None:
    _print_heads(report.run, report.challenge)
    print_table(
        ["SEGMENT", "STEPS", "FROM", "CHOSEN", "RESULT"], [_row(one) for one in report.results], right="SEGMENT FROM"
    )
    print_wrapped([*_states(report), *_limits(report.run, report.chances, report.num_sampled, are_done=True)])
    typer.echo(_verdict(report))
    if output is not None:
        typer.echo(f"Statement: {output}")


def _steps(segment: Segment) -> str:
    return f"{segment.end:,}" if segment.num_steps == 1 else f"{segment.start + 1:,}-{segment.end:,}"


def _row(result: SegmentResult) -> list[str]:
    segment, difference = result.segment, result.difference
    words = f"{result.outcome}: {difference.quantity} of step {difference.step:,}" if difference else result.outcome
    chosen = "yes" if result.is_sampled else "on the way"
    return [str(segment.number), _steps(segment), f"{segment.origin:,}", chosen, words]


def _states(report: AuditReport) -> list[str]:
    """Say which kept states have the recorded tensors, and why others were not checked."""
    reasons = dict[str, list[int]]()
    for step, reason in sorted(report.unchecked.items()):
        reasons.setdefault(reason, []).append(step)
    checked = f"Kept states with the recorded tensors: {report.num_states_checked:,} of {report.num_states_kept:,}"
    words = "; ".join(f"not checked: {', '.join(f'{one:,}' for one in steps)}, {why}" for why, steps in reasons.items())
    return [f"{checked}; {words}" if words else checked] if report.num_states_kept else []


def _limits(audited: AuditedRun, found: Sequence[Chance], num_sampled: int, *, are_done: bool) -> list[str]:
    """Say what a sample shows, and which segments it cannot have."""
    obstacles = dict[str, list[Segment]]()
    for segment in audited.segments:
        if segment.obstacle:
            obstacles.setdefault(segment.obstacle, []).append(segment)
    lines = [
        f"Cannot be audited here: {pluralize(len(those), 'segment')}, "
        f"steps {those[0].start + 1:,} to {those[-1].end:,}: {why}"
        for why, those in obstacles.items()
    ]
    total, tense = len(audited.auditable), "would have met" if are_done else "will meet"
    samples = pluralize(num_sampled, "sample")
    lines += [
        f"If {chance.percent}% of the {total:,} auditable segments ({chance.num_forged:,}) are forged, "
        f"{samples} {tense} one with probability {chance.probability:.2f}"
        for chance in {one.num_forged: one for one in found}.values()  # few segments: shares are the same number
    ]
    return lines


def _verdict(report: AuditReport) -> str:
    sampled = [result for result in report.results if result.is_sampled]
    exact = sum(result.outcome == "exact" for result in sampled)
    first = next((one.difference for one in report.results if one.outcome == report.verdict), None)
    counts = f"{exact} of {pluralize(len(sampled), 'sampled segment')} bit-exact"
    if not report.run.states:
        counts += ", but no state of the run is recorded yet: no weights are bound to these steps"
    elif report.num_states_kept:
        counts += f", {report.num_states_checked:,} of {pluralize(report.num_states_kept, 'kept state')} checked"
    words = {"passed": "Passed", "differs": "Differs", "cannot decide": "Cannot decide"}[report.verdict]
    return f"{words}: {counts}" + (f"; {first}" if report.verdict != "passed" and first is not None else "")
