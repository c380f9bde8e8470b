"""Audit: compute a random sample of a run's segments again, and say with which probability that meets a forgery.

In: the files of a run, and a challenge that the auditor brings. Out: an ``AuditReport``: passed, the first quantity
that differs, or that this machine cannot decide. Every record is checked as a whole first (``audit_records.py``). The
tensors of every kept state must have the recorded fingerprint, wherever the sample lies.

A segment lies between two states of ``states.jsonl`` (``audit_sample.py``). It is computed from the kept state before
it, whose tensors must have the recorded fingerprint, or from an earlier one; then the steps on the way are compared
too. Its rows must have the recorded digest, so caches need no trust.

Bits that differ accuse a run only where they must be equal. On a machine, library or code that the record does not name
for the step, the verdict is "cannot decide". Rows follow from the plan alone, so other rows always differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import vorox
from vorox.core.config import config_values
from vorox.core.errors import CheckpointError, NumericalError, VoroxError
from vorox.core.files.json_reader import mapping
from vorox.core.platform.environment import code_record, environment_record
from vorox.core.user_code.trusted_code import mark_recorded
from vorox.records.executed_steps import STEPS_NOTE
from vorox.records.log import time_stamp
from vorox.records.run_lookup import run_attempts, run_id_of
from vorox.records.step_environments import StepEnvironments
from vorox.training.audit_records import DAMAGED, AuditedRun, check_companions
from vorox.training.audit_sample import Chance, Segment, chances, group_into_passes
from vorox.training.checkpoints.re_execution_times import expected_times
from vorox.training.checkpoints.signature import AUDIT_TYPE, STATEMENT_TYPE
from vorox.training.checkpoints.store import Checkpoint, UnreadableCheckpointError, verify
from vorox.training.re_execution import MakeWorkload, ReExecutedStep, ReExecution
from vorox.training.replay import ReplayDifference, first_difference, state_difference
from vorox.training.resume import resume, resume_settings

if TYPE_CHECKING:
    from vorox.core.schema import RunConfig
    from vorox.training.steps.workload import Workload

Verdict = Literal["passed", "differs", "cannot decide"]
Outcome = Literal["exact", "differs", "cannot decide", "not reached"]
_NOTHING = "the run was not changed"
_EXACT_LEVELS = ("bitwise", "bitwise-any-world")


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What the computation of a segment found.

    Attributes:
        segment: The segment.
        is_sampled: Whether the challenge chose it; others lie on the way from an origin.
        outcome: ``not reached``: an earlier step of the same pass differs.
        num_exact_steps: Steps with the recorded bits.
        difference: The first difference.
        environment: Why a difference proves nothing here, as text.
    """

    segment: Segment
    is_sampled: bool
    outcome: Outcome
    num_exact_steps: int
    difference: ReplayDifference | None = None
    environment: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        segment = {key: value for key, value in asdict(self.segment).items() if key != "obstacle"}
        difference = None if self.difference is None else asdict(self.difference)
        return {
            **segment, "is_sampled": self.is_sampled, "outcome": self.outcome,
            "num_exact_steps": self.num_exact_steps, "difference": difference, "environment": list(self.environment),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        run: The audited run.
        challenge: The text that chose the sample.
        is_drawn: Whether it was drawn at random by this process, not brought by the auditor.
        results: Of every segment that was computed, in the order of the steps.
        engine: The environment of the engine that computed them.
        unchecked: Why the tensors of kept states were not checked, by step.
    """

    run: AuditedRun
    challenge: str
    is_drawn: bool
    results: tuple[SegmentResult, ...]
    engine: Mapping[str, Any]
    unchecked: Mapping[int, str]

    @property
    def num_states_checked(self) -> int:
        """Kept states whose tensors have the recorded fingerprint."""
        return len(self.run.kept.keys() - self.unchecked.keys())

    @property
    def num_states_kept(self) -> int:
        return len(self.run.kept.keys() | self.unchecked.keys())

    @property
    def num_sampled(self) -> int:
        return sum(result.is_sampled for result in self.results)

    @property
    def verdict(self) -> Verdict:
        outcomes = {result.outcome for result in self.results}
        return "differs" if "differs" in outcomes else "cannot decide" if outcomes != {"exact"} else "passed"

    @property
    def chances(self) -> list[Chance]:
        return chances(len(self.run.auditable), self.num_sampled)

    def to_json(self) -> dict[str, Any]:
        audited = self.run
        return {
            "run": run_id_of(audited.directory), "verdict": self.verdict, "heads": asdict(audited.heads),
            "challenge": self.challenge, "is_drawn": self.is_drawn, "num_segments": len(audited.segments),
            "num_auditable": len(audited.auditable), "num_sampled": self.num_sampled,
            "segments": [result.to_json() for result in self.results],
            "not_auditable": [
                {"number": one.number, "start": one.start, "end": one.end, "reason": one.obstacle}
                for one in audited.segments if one.obstacle
            ],
            "num_states_recorded": len(audited.states), "num_states_checked": self.num_states_checked,
            "states_not_checked": [
                {"step": step, "reason": reason} for step, reason in sorted(self.unchecked.items())
            ],
            "chances": [chance._asdict() for chance in self.chances],
        }  # fmt: skip

    def statement(self) -> dict[str, Any]:
        """Return the in-toto statement about the heads of the run."""
        heads, run = self.run.heads, run_id_of(self.run.directory)
        subjects = {"chain": ("blake2b-256", heads.chain), "states": ("blake2b-256", heads.states)}
        subjects["plan"] = ("sha256", heads.plan)
        machine = environment_record()
        auditor = {
            "vorox": vorox.__version__, "code": code_record(), "engine": dict(self.engine),
            "platform": {key: machine["platform"][key] for key in ("system", "machine", "processor")},
            "packages": machine["packages"],
        }  # fmt: skip
        return {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": f"{run}/{name}@{heads.step}", "digest": {algorithm: digest}}
                for name, (algorithm, digest) in subjects.items() if digest
            ],
            "predicateType": AUDIT_TYPE,
            "predicate": {**self.to_json(), "auditor": auditor, "time": time_stamp()},
        }  # fmt: skip

    def error(self) -> VoroxError | None:
        """Return the error for a run that has not passed."""
        wrong = next((one for one in self.results if one.outcome == self.verdict), None)
        if self.verdict == "passed" or wrong is None:
            return None
        where = str(self.run.directory)
        if self.verdict == "differs":
            return CheckpointError(
                f"The run is not what its records say: {wrong.difference}", where=where, saved=_NOTHING,
                hint="do not rely on this run; its owner can look at the step with `vorox replay`",
            )  # fmt: skip
        return NumericalError(
            f"This machine cannot decide: {wrong.difference}", where=where, saved=_NOTHING,
            hint=f"audit where these agree, or with these versions: {'; '.join(wrong.environment)}. Until then the run "
            "has not passed",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditCost:
    """What an audit takes, before it starts.

    Attributes:
        num_segments: Sampled segments.
        num_steps: Steps to compute, with those that rebuild a start.
        num_starts: How often an engine is started and a state loaded.
        seconds: Time of all; ``None``: no time is recorded.
        state_bytes: Size of the kept states, which are all read.
    """

    num_segments: int
    num_steps: int
    num_starts: int
    seconds: float | None
    state_bytes: int


def cost_of(audited: AuditedRun, sample: Sequence[Segment]) -> AuditCost:
    """Return what the audit of a sample takes."""
    passes = group_into_passes(sample)
    num_steps = sum(part[-1].end - part[0].origin for part in passes)
    times = expected_times(audited.directory)
    seconds = None
    if times.step_seconds is not None:
        seconds = len(passes) * (times.start_seconds or 0.0) + num_steps * times.step_seconds
    size = sum(
        path.stat().st_size for directory in audited.kept.values() for path in directory.rglob("*") if path.is_file()
    )
    return AuditCost(len(sample), num_steps, len(passes), seconds, size)


def audit(
    audited: AuditedRun,
    challenge: str,
    count: int,
    make_workload: MakeWorkload,
    *,
    is_drawn: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Check the kept states, compute the segments that a challenge chooses, and compare every number with the records.

    Args:
        audited: Of ``open_run``.
        challenge: The text of the auditor.
        count: The number of segments, at least 1.
        make_workload: As of ``ReExecution.steps``.
        is_drawn: Whether the challenge was drawn by this process.
        on_step: Called after every step with the number of computed steps and of all.

    Raises:
        CheckpointError: The tensors of a kept state do not have the recorded fingerprint; or as ``check_companions``.
        VoroxError: No segment can be audited, or a state, cache or record is missing or damaged.
    """
    sample = audited.sample(challenge, count)
    passes = group_into_passes(sample)
    origins = {part[0].origin for part in passes} - audited.supplied.keys()  # these are checked where they are loaded
    unchecked = {**audited.unchecked, **_check_tensors(audited, audited.kept.keys() - origins, make_workload)}
    total, done = sum(part[-1].end - part[0].origin for part in passes), 0
    results: list[SegmentResult] = []
    engine: dict[str, Any] = {}
    for part in passes:
        first, last = part[0].origin, part[-1].end
        execution = ReExecution(audited.directory, first, last, start=audited.supplied.get(first))
        if execution.start_step < first:
            unchecked[first] = DAMAGED
        elif first in audited.kept:
            check_companions(audited.directory, Checkpoint.read(audited.kept[first]))
        comparison = _PassComparison(audited, execution, part)
        with contextlib.closing(execution.steps(make_workload)) as steps:
            for step in steps:
                engine = engine or resume.environment(step.workload.engine)
                if not comparison.add(step):
                    break
                if on_step is not None and step.step > first:
                    on_step(done + step.step - first, total)
        results += comparison.results()
        done += last - first
    return AuditReport(audited, challenge, is_drawn, tuple(results), engine, unchecked)


def _check_tensors(audited: AuditedRun, steps: Collection[int], make_workload: MakeWorkload) -> dict[int, str]:
    """Load kept states, the newest first, whose tensors must have the recorded fingerprint; return damaged ones.

    Raises:
        CheckpointError: The tensors of one do not; or as ``check_companions``.
    """
    damaged: dict[int, str] = {}
    config: RunConfig | None = None
    with contextlib.ExitStack() as opened:
        workload: Workload | None = None
        for step in sorted(steps, reverse=True):
            try:
                checkpoint = verify(audited.kept[step])
            except UnreadableCheckpointError:
                raise
            except CheckpointError:
                damaged[step] = DAMAGED
                continue
            check_companions(audited.directory, checkpoint)
            in_force, _ = resume_settings.config_in_force(audited.directory, step)
            if workload is None or in_force != config:
                opened.close()
                mark_recorded(config_values(in_force), audited.directory)
                config, workload = in_force, opened.enter_context(contextlib.closing(make_workload(in_force)))
            resume.load_run(workload, checkpoint)
    return damaged


class _PassComparison:
    """The steps of one pass, compared so far.

    Args:
        audited: The run.
        execution: What computes them.
        sample: The sampled segments of the pass.
    """

    def __init__(self, audited: AuditedRun, execution: ReExecution, sample: Sequence[Segment]) -> None:
        self._audited, self._execution, self._step = audited, execution, execution.start_step
        self._sampled = {segment.number for segment in sample}
        self._difference: ReplayDifference | None = None
        self._obstacles: tuple[str, ...] = ()

    def add(self, computed: ReExecutedStep) -> bool:
        """Compare a step, and the state after it where one is recorded; return whether it is bit-exact."""
        entry, step = computed.entry, computed.step
        self._step = step
        self._difference = first_difference(self._audited.chain.entries[step], entry)
        state = self._audited.states.get(step)
        if self._difference is None and state is not None:
            self._difference = state_difference(step, state.fingerprint, computed.workload.engine.fingerprint())
        if self._difference is None:
            return True
        if self._difference.quantity != "batch":
            self._obstacles = _obstacles(self._execution, computed)
        return False

    def results(self) -> list[SegmentResult]:
        """Return the results of the segments of the pass, sampled or on the way."""
        start, last = self._execution.start_step, self._execution.last_step
        return [self._result(one) for one in self._audited.segments if start <= one.start and one.end <= last]

    def _result(self, segment: Segment) -> SegmentResult:
        is_sampled, difference = segment.number in self._sampled, self._difference
        if difference is None or segment.end < difference.step:
            return SegmentResult(segment, is_sampled, "exact", segment.num_steps)
        if segment.start >= difference.step:
            return SegmentResult(segment, is_sampled, "not reached", 0)
        outcome: Outcome = "cannot decide" if self._obstacles else "differs"
        num_exact = difference.step - segment.start - 1
        return SegmentResult(segment, is_sampled, outcome, num_exact, difference, self._obstacles)


def _obstacles(execution: ReExecution, computed: ReExecutedStep) -> tuple[str, ...]:
    """Return why the numbers of a step need not have the recorded bits here; empty if they must."""
    recorded = StepEnvironments.of_run(execution.run_directory).at(computed.step)
    execution.note_environment(computed.workload, computed.step)
    found = list(execution.environment)
    if not recorded:
        found.append("the record does not say in which environment the step was computed")
    elif recorded.get("determinism") not in _EXACT_LEVELS:
        found.append(f"the run does not promise equal bits: determinism is {recorded.get('determinism', 'unknown')}")
    return tuple(dict.fromkeys([*found, *_code_differences(execution.run_directory, computed.step)]))


def _code_differences(run_directory: Path, step: int) -> list[str]:
    """Return what differs between the code of Vorox that computed a step and this one."""
    then: Mapping[str, Any] = {}
    for attempt in run_attempts(run_directory):
        start = mapping(mapping(attempt.get("notes")).get(STEPS_NOTE)).get("start_step")
        if type(start) is int and start < step:
            then = attempt
    version, code = mapping(then.get("environment")).get("vorox"), mapping(then.get("code"))
    found = [] if version == vorox.__version__ else [f"vorox was {version or 'unknown'}, is {vorox.__version__}"]
    now = code_record() or {}
    for key, words in (("commit", "commit of vorox"), ("diff_sha256", "uncommitted changes of vorox")):
        if code.get(key, "") != now.get(key, ""):
            found.append(f"{words} was {str(code.get(key) or 'none')[:12]}, is {str(now.get(key) or 'none')[:12]}")
    return found
