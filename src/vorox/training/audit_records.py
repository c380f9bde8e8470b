"""The records of a run that is audited: read, checked as a whole, and divided into segments; nothing is computed.

In: the files of a run. Out: an ``AuditedRun``. Both chains are checked link by link, the plan against the attempts, the
manifests of kept checkpoints against both, and the logged losses against the chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vorox.core.batch import DataCursor
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.files.json_reader import mapping
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.order.plan import DataPlan
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.experiments.tracking import read_metrics
from vorox.records.executed_steps import PLAN_NOTE
from vorox.records.replay_chain import RecordedChain, RecordedState, bits, examine_chain, read_states
from vorox.records.run_lookup import notes_of_attempts, run_argument
from vorox.records.step_environments import StepEnvironments
from vorox.training.audit_sample import Heads, Segment, in_order
from vorox.training.checkpoints.signature import newest_signed_step, verify_signature
from vorox.training.checkpoints.store import STATE_NAME, Checkpoint, read_state, verify
from vorox.training.resume.resume_settings import config_in_force

if TYPE_CHECKING:
    from vorox.training.checkpoints.signature import PublicKey

_NOTHING = "the run was not changed"
DAMAGED = "its bytes are damaged"


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """The checked records of a run, and its segments.

    Attributes:
        directory: The run.
        heads: What the records commit to.
        chain: The replay chain.
        states: The recorded states up to the head, by step.
        segments: All segments up to the head.
        supplied: States from elsewhere that have the recorded fingerprint, by step.
        kept: Kept states whose tensors can be checked here, by step.
        unchecked: Why other kept states cannot be, by step.
    """

    directory: Path
    heads: Heads
    chain: RecordedChain
    states: Mapping[int, RecordedState]
    segments: tuple[Segment, ...]
    supplied: Mapping[int, Checkpoint]
    kept: Mapping[int, Path]
    unchecked: Mapping[int, str]

    @property
    def auditable(self) -> list[Segment]:
        return [segment for segment in self.segments if not segment.obstacle]

    def sample(self, challenge: str, count: int) -> list[Segment]:
        """Return the segments that a challenge chooses, in its order; all of them if there are fewer.

        Raises:
            ConfigError: No segment can be audited.
        """
        found = [segment for segment in in_order(self.segments, self.heads, challenge) if not segment.obstacle]
        if not found:
            reasons = dict.fromkeys(segment.obstacle for segment in self.segments)
            raise ConfigError(
                f"No segment of the run can be audited: {'; '.join(reasons)}", where=str(self.directory),
                hint=f"see `vorox audit {run_argument(self.directory)} --plan`", saved=_NOTHING,
            )  # fmt: skip
        return found[:count]


def open_run(
    run_directory: Path, *, num_processes: int = 1, key: PublicKey | None = None, states: Path | None = None
) -> AuditedRun:
    """Read the records of a run, check them as a whole, and divide it into segments; nothing is computed.

    Args:
        run_directory: The run, or a copy of its files.
        num_processes: The processes that will compute the segments.
        key: Of the run's owner; only what is signed by it counts.
        states: A folder of further states, as ``vorox checkpoints materialize --to`` writes it.

    Raises:
        CheckpointError: A chain, a kept checkpoint and the plan contradict each other, or the signature is not valid.
        DataError: A chain or the plan is damaged, no step is recorded, states are kept and none is recorded, or a
            logged loss is not that of the chain.
        ConfigError: The folder of states has none.
    """
    kept = step_directories(run_directory)
    signed = None if key is None else newest_signed_step(run_directory)
    key_id = None if key is None or signed is None else verify_signature(run_directory, signed, key).key_id
    chain = examine_chain(run_directory, max(kept, default=0))
    last = chain.last_known_step if signed is None else signed
    if damage := chain.damage(last):
        raise DataError(
            f"The replay chain is not intact up to step {last:,}: {damage}", where=str(chain.path),
            hint="restore the file from a copy; links that are lost or changed prove nothing", saved=_NOTHING,
        )  # fmt: skip
    if not last:
        raise DataError("No step is recorded", where=str(chain.path), hint="train the run first", saved=_NOTHING)
    found = _committed_states(run_directory, chain, last)
    _check_logged_numbers(run_directory, chain, last)
    plan = DataPlan.open(RunLayout(run_directory).plan)
    num_events = _check_plan(run_directory, plan, kept, signed)
    checked = _checked_states(kept, found, plan, last)
    origins = {0} | checked
    supplied = _supplied_states(states, found)
    head = found[max(found)].states if found else ""
    heads = Heads(last, chain.entries[last].chain, head, plan.digest_at(num_events) or "", num_events, key_id)
    segments = _segments(run_directory, last, sorted(found), origins | set(supplied), num_processes)
    unchecked = _unchecked_states(run_directory, kept, checked, last, num_processes)
    usable = {step: kept[step] for step in sorted(checked - unchecked.keys())}
    return AuditedRun(run_directory, heads, chain, found, tuple(segments), supplied, usable, unchecked)


def _committed_states(run_directory: Path, chain: RecordedChain, last: int) -> dict[int, RecordedState]:
    """Return the recorded states up to a step that follow from the steps.

    After a resume that computes steps anew, later states of the earlier attempt stand until the next save: void ones.
    """
    found = read_states(run_directory, last)
    steps = [step for step, state in found.items() if state.chain == chain.entries[step].chain]
    newest = max(steps, default=0)
    wrong = [step for step in found if step <= newest and step not in steps]
    if wrong:
        raise CheckpointError(
            f"The state after step {wrong[0]:,} does not belong to the steps of the replay chain",
            where=str(RunLayout(run_directory).states), hint="restore both files from one copy", saved=_NOTHING,
        )  # fmt: skip
    return {step: found[step] for step in steps}


def _check_logged_numbers(run_directory: Path, chain: RecordedChain, last: int) -> None:
    """Check that ``metrics.jsonl`` has the losses and gradient norms of the replay chain."""
    for step, metrics in read_metrics(run_directory).items():
        if not 0 < step <= last:
            continue
        for name in ("loss", "grad_norm"):
            recorded = getattr(chain.entries[step], name)
            if name in metrics and bits(metrics[name]) != recorded:
                raise DataError(
                    f"The metrics of step {step:,} have {name} {metrics[name]}, the replay chain another one",
                    where=str(RunLayout(run_directory).metrics), saved=_NOTHING,
                    hint="restore both files from one copy; do not rely on these metrics",
                )  # fmt: skip


def _check_plan(run_directory: Path, plan: DataPlan, kept: Mapping[int, Path], signed: int | None) -> int:
    """Check the plan against what the attempts recorded of it; return the events that the heads cover."""
    for notes in notes_of_attempts(run_directory):
        note = mapping(notes.get(PLAN_NOTE))
        events, digest = note.get("events"), note.get("digest")
        if type(events) is int and events and plan.digest_at(events) != digest:
            raise _other_plan(plan, f"an attempt recorded {str(digest)[:16]} after {pluralize(events, 'event')}")
    return plan.num_events if signed is None else int(Checkpoint.read(kept[signed]).metadata["plan_events"])


def _other_plan(plan: DataPlan, what: str) -> DataError:
    return DataError(
        f"The data plan is another one: {what}",
        where=str(plan.path),
        hint="restore the file from a copy",
        saved=_NOTHING,
    )


def _checked_states(
    kept: Mapping[int, Path], states: Mapping[int, RecordedState], plan: DataPlan, last: int
) -> set[int]:
    """Return the kept states that can be started from; their manifests agree with both chains and the plan."""
    covered = {step: path for step, path in kept.items() if step <= last}
    if covered and not states:
        raise DataError(
            f"The run keeps {pluralize(len(covered), 'state')}, and {RunLayout.states.name} records none of them",
            where=str(min(covered.values())), saved=_NOTHING,
            hint=f"restore {RunLayout.states.name} from a copy; without it, nothing binds these weights to the steps",
        )  # fmt: skip
    found: set[int] = set()
    for step, path in covered.items():
        try:
            metadata = Checkpoint.read(path).metadata
        except CheckpointError:
            continue  # its bytes are damaged: an earlier one takes its place
        state, recorded = states.get(step), (metadata.get("chain"), metadata.get("fingerprint"))
        if state is None or state[:2] != recorded:
            raise CheckpointError(
                f"The kept state after step {step:,} is not the recorded one: {_short(recorded[1])}, on record "
                f"{_short(None if state is None else state.fingerprint)}",
                where=str(path), hint="restore the checkpoint from a copy; do not use it", saved=_NOTHING,
            )  # fmt: skip
        events = metadata.get("plan_events")
        if type(events) is not int or not events or plan.digest_at(events) != metadata.get("plan_digest"):
            raise _other_plan(plan, f"the checkpoint of step {step:,} has {_short(metadata.get('plan_digest'))}")
        found.add(step)
    return found


def check_companions(run_directory: Path, checkpoint: Checkpoint) -> None:
    """Check what a verified state of a run has beside its tensors: the place in the data, and the tokenizer.

    Raises:
        CheckpointError: The run would go on with other rows, or the tokenizer is not that of the manifest.
    """
    path, metadata, progress = checkpoint.path, checkpoint.metadata, read_state(checkpoint.path).progress
    start = DataPlan.open(RunLayout(run_directory).plan).start
    cursor = DataCursor(
        str(metadata.get("plan_digest")), metadata.get("plan_events", 0), checkpoint.step,
        start.batch_sizes.position_of(checkpoint.step), start.seed,
    )  # fmt: skip
    if (progress.cursor, progress.step, progress.chain) != (cursor, checkpoint.step, metadata.get("chain")):
        found, expected = progress.cursor.to_json(), cursor.to_json()
        names = [name for name in expected if found[name] != expected[name]] or ["step or chain"]
        raise CheckpointError(
            f"The kept state after step {checkpoint.step:,} continues elsewhere than the run: {', '.join(names)}",
            where=str(path / STATE_NAME), hint="restore the checkpoint from a copy; do not resume it", saved=_NOTHING,
        )  # fmt: skip
    config, _ = config_in_force(run_directory, checkpoint.step)
    tokenizer = load_tokenizer(path, end_of_text=config.tokenizer.end_of_text).fingerprint
    if tokenizer != metadata.get("tokenizer"):
        raise CheckpointError(
            f"The kept state after step {checkpoint.step:,} has another tokenizer: {_short(tokenizer)}, on record "
            f"{_short(metadata.get('tokenizer'))}",
            where=str(path), hint="restore the checkpoint from a copy; do not use it", saved=_NOTHING,
        )  # fmt: skip


def _unchecked_states(
    run_directory: Path, kept: Mapping[int, Path], checked: Collection[int], last: int, num_processes: int
) -> dict[int, str]:
    """Return why the tensors of kept states cannot be checked here, by step."""
    environments, found = StepEnvironments.of_run(run_directory), dict[int, str]()
    for step in kept:
        if step > last:
            found[step] = f"it is after step {last:,}, up to which the run is audited"
        elif step not in checked:
            found[step] = DAMAGED
        elif reason := _process_obstacle(environments, step, num_processes):
            found[step] = reason
    return found


def _short(digest: object) -> str:
    return "none" if digest is None else str(digest)[:16]


def _supplied_states(folder: Path | None, states: Mapping[int, RecordedState]) -> dict[int, Checkpoint]:
    """Return the verified states of a folder that have the recorded fingerprints.

    Raises:
        ConfigError: There is none.
        CheckpointError: One is damaged.
    """
    if folder is None:
        return {}
    paths = sorted(folder.glob("step-*")) if folder.is_dir() else []
    found = {one.step: one for one in map(verify, paths)}
    usable = {
        step: one for step, one in found.items()
        if step in states and states[step][:2] == (one.metadata.get("chain"), one.metadata.get("fingerprint"))
    }  # fmt: skip
    if not usable:
        raise ConfigError(
            "The folder has no state that the run recorded", where=str(folder), saved=_NOTHING,
            hint="name a folder that `vorox checkpoints materialize RUN --to FOLDER` wrote; recorded are the states of "
            f"steps {', '.join(map(str, list(states)[:20])) or 'none'}",
        )  # fmt: skip
    return usable


def _segments(
    run_directory: Path, last: int, states: Sequence[int], origins: set[int], num_processes: int
) -> list[Segment]:
    environments = StepEnvironments.of_run(run_directory)
    bounds = sorted({0, *states, last})
    found: list[Segment] = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds), 1):
        origin = max(one for one in origins if one <= start)
        segment = Segment(number, start, end, origin)
        found.append(replace(segment, obstacle=_obstacle(environments, segment, num_processes)))
    return found


def _obstacle(environments: StepEnvironments, segment: Segment, num_processes: int) -> str:
    """Return why processes of this number cannot compute a segment; empty if they can."""
    spans = environments.spans(segment.origin, segment.end)
    if len(spans) > 1:
        return f"its start must be rebuilt from step {segment.origin:,}, and the number of processes changed since"
    return _process_obstacle(environments, segment.end, num_processes)


def _process_obstacle(environments: StepEnvironments, step: int, num_processes: int) -> str:
    """Return why processes of this number cannot compute a step; empty if they can."""
    count, level = environments.num_processes(step), environments.at(step).get("determinism")
    if count in (None, num_processes) or level == "bitwise-any-world":
        return ""
    return f"it ran with {pluralize(count, 'process', 'processes')}: add --nproc {count}"
