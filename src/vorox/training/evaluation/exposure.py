"""Exposure: the scores of tasks on records that training read and did not read, and the loss around the first reading.

In: tasks, the exposures of their records, and what the harness logged of each record. Out: scores by group, with the
harness's own aggregation; and the loss of some records before and after training read them, beside that of records
that it never read.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, cast

import numpy as np

from vorox.core.engine import exchange_average
from vorox.core.schema.train import Weights
from vorox.data.provenance.contamination import EvaluationRecord
from vorox.data.provenance.exposures import RecordExposure
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.evaluation.task_evaluation import BOOTSTRAP_SAMPLES, RequestScorer, metric_name, time_budget
from vorox.training.evaluation.task_loading import prints_aside
from vorox.training.inference.language_model import LanguageModel

Group = Literal[
    "all", "seen", "seen once", "seen twice", "seen 3 times or more", "partly seen", "not seen", "too short"
]
_OF_COUNT: dict[int, Group] = {1: "seen once", 2: "seen twice"}
_ALWAYS_SHOWN: tuple[Group, ...] = ("all", "seen", "not seen")
_SLOW_BOOTSTRAPS = {"bleu", "chrf", "chrf++", "ter"}
"""Metrics of which the harness takes 100 resamples at most."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The score of a task on some of its records.

    Attributes:
        group: The records.
        num_records: How many.
        first_step: The first step that read one of them; ``None``: none did.
        last_step: The last step that read one of them.
        metrics: As of a ``TaskResult``, over these records alone.
    """

    group: Group
    num_records: int
    first_step: int | None
    last_step: int | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Interval:
    """A record whose loss is measured around its first exposure.

    Attributes:
        record: The record.
        before_step: The state before the first step that read it.
        after_step: The state after the last step of that exposure.
    """

    record: RecordExposure
    before_step: int
    after_step: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean cross entropy per token, in nats, of some text under the states around an exposure and the evaluated one."""

    before: float
    after: float
    end: float


@dataclass(frozen=True, slots=True)
class ExposureLoss:
    """The loss of a record around its first exposure.

    Attributes:
        interval: The record and the states.
        losses: Of the record.
        control: Mean of the control records under the same states; ``None``: the task has no record that was not seen.
    """

    interval: Interval
    losses: Losses
    control: Losses | None

    @property
    def drop(self) -> float:
        """By how much the exposure lowered the loss of the record."""
        return self.losses.before - self.losses.after

    @property
    def control_drop(self) -> float | None:
        """By how much the loss of the control fell meanwhile."""
        return None if self.control is None else self.control.before - self.control.after

    @property
    def beyond_control(self) -> float | None:
        """The rest of the drop, which is the effect of reading the record."""
        return None if self.control_drop is None else self.drop - self.control_drop


@dataclass(frozen=True, slots=True)
class LossPlan:
    """What is measured of a task.

    Attributes:
        intervals: Seen records, spread evenly over those of the task by first step. Those that the first exposure read
            within one step are preferred.
        controls: As many records that were not seen, if there are, spread evenly over those of the task.
    """

    intervals: tuple[Interval, ...] = ()
    controls: tuple[RecordExposure, ...] = ()

    @property
    def steps(self) -> set[int]:
        return {step for one in self.intervals for step in (one.before_step, one.after_step)}


@prints_aside()
def evaluation_records(tasks: Mapping[str, Any], limit: int | None, tokenizer: Tokenizer) -> list[EvaluationRecord]:
    """Return the records of tasks, encoded: each the prompt without examples, and its right answer.

    The ``uri`` of a record is the name of its task, the ``ordinal`` its index in the task.
    """
    found = [
        (name, number, _text(task, document))
        for name, task in tasks.items()
        for number, document in task.doc_iterator(rank=0, limit=limit, world_size=1)
    ]
    ids = tokenizer.encode_batch([text for *_, text in found])
    return [
        EvaluationRecord(name, number, np.asarray(tokens, np.int64))
        for (name, number, _), tokens in zip(found, ids, strict=True)
    ]


def _text(task: Any, document: Any) -> str:
    prompt, answer = task.doc_to_text(document), task.doc_to_target(document)
    choices: list[Any] = []
    if task.get_config("doc_to_choice") is not None:
        choices = list(task.doc_to_choice(document))
    if isinstance(prompt, int):  # the choices are the beginnings
        prompt = choices[prompt] if 0 <= prompt < len(choices) else ""
    elif isinstance(answer, int) and 0 <= answer < len(choices):
        answer = choices[answer]
    if isinstance(answer, list | tuple):
        answer = next(iter(cast("Sequence[Any]", answer)), "")  # one of several right ones
    prompt, answer = str(prompt), str(answer)
    delimiter = task.get_config("target_delimiter")
    return f"{prompt}{' ' if delimiter is None else delimiter}{answer}" if prompt and answer else prompt + answer


def group_of(record: RecordExposure) -> Group:
    if record.exposures:
        return "seen"
    if record.is_short:
        return "too short"
    return "partly seen" if record.matched_tokens else "not seen"


def group_scores(
    task: Any, records: Sequence[RecordExposure], samples: Sequence[Mapping[str, Any]]
) -> list[GroupScore]:
    """Return the scores of a task by group of its records.

    Args:
        task: The task.
        records: Its records.
        samples: As ``evaluate_tasks`` reports them.
    """
    members: dict[Group, list[RecordExposure]] = {
        "all": [*records], "seen": [], "seen once": [], "seen twice": [], "seen 3 times or more": [],
        "partly seen": [], "not seen": [], "too short": [],
    }  # fmt: skip
    for record in records:
        members[group_of(record)].append(record)
        if record.exposures:
            members[_OF_COUNT.get(len(record.exposures), "seen 3 times or more")].append(record)
    by_record: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_record[int(sample["doc_id"])].append(sample)
    found: list[GroupScore] = []
    for group, own in members.items():
        if own or group in _ALWAYS_SHOWN:
            steps = [step for record in own for one in record.exposures for step in one.steps]
            metrics = _metrics(task, [sample for record in own for sample in by_record[record.ordinal]])
            found.append(GroupScore(group, len(own), min(steps, default=None), max(steps, default=None), metrics))
    return found


def _metrics(task: Any, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return values and standard errors of metrics over some records, as the harness computes them over all."""
    harness: Any = import_module("lm_eval.api.metrics")
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for sample in samples:
        for metric in sample["metrics"]:
            values[metric, sample["filter"]].append(sample[metric])
    found: dict[str, float] = {}
    for (metric, filter_name), items in values.items():
        aggregate = task.aggregation().get(metric, harness.mean)
        if isinstance(value := aggregate(items), int | float):
            found[metric_name(metric, filter_name)] = float(value)
        resamples = min(BOOTSTRAP_SAMPLES, 100) if metric in _SLOW_BOOTSTRAPS else BOOTSTRAP_SAMPLES
        error = harness.stderr_for_metric(metric=aggregate, bootstrap_iters=resamples)
        if error is not None and len(items) > 1:
            found[metric_name(f"{metric}_stderr", filter_name)] = float(error(items))
    return found


def sample_scores(samples: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the metrics of each record, by its index in the task; those that are no numbers are lists."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for sample in samples:
        for metric in sample["metrics"]:
            found[int(sample["doc_id"])][metric_name(metric, sample["filter"])] = _plain(sample[metric])
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    if isinstance(value, int | float | np.bool_ | np.number):
        return float(cast("float", value))
    return value if value is None else str(value)


def loss_plan(records: Sequence[RecordExposure], num_exposures: int) -> LossPlan:
    """Choose the records of a task whose loss is measured, and their controls."""
    seen = sorted((one for one in records if one.exposures), key=lambda one: (one.exposures[0].steps, one.ordinal))
    at_once = [one for one in seen if len(one.exposures[0].steps) == 1]  # between others, much else was read
    chosen = _spread(at_once or seen, num_exposures)
    unseen = [one for one in records if group_of(one) == "not seen"]
    return LossPlan(
        tuple(Interval(one, one.exposures[0].steps[0] - 1, one.exposures[0].steps[-1]) for one in chosen),
        tuple(_spread(unseen, len(chosen))),
    )


def _spread(records: Sequence[RecordExposure], count: int) -> list[RecordExposure]:
    """Return some of the records, evenly spread over all."""
    if count >= len(records):
        return [*records]
    return [records[(2 * index + 1) * len(records) // (2 * count)] for index in range(count)]


@dataclass(slots=True)
class _StateLosses:
    """Losses of texts under states, each text under each state once."""

    scorer: RequestScorer
    ids: Mapping[tuple[str, int], list[int]]
    by_step: dict[int, dict[tuple[str, int], float]] = field(default_factory=dict[int, dict[tuple[str, int], float]])

    def measure(self, step: int, records: Sequence[RecordExposure]) -> None:
        known = self.by_step.setdefault(step, {})
        for record in records:
            key = record.uri, record.ordinal
            if key not in known:
                ids = self.ids[key]
                known[key] = -self.scorer.rolling_log_likelihood(ids) / len(ids)

    def of(self, interval: Interval, records: Sequence[RecordExposure], end_step: int) -> Losses:
        """Return the mean losses of records under the states of an interval."""
        steps = interval.before_step, interval.after_step, end_step
        means = [np.mean([self.by_step[step][one.uri, one.ordinal] for one in records]) for step in steps]
        return Losses(*(float(mean) for mean in means))


def measure_losses(
    model: LanguageModel,
    plans: Sequence[LossPlan],
    records: Sequence[EvaluationRecord],
    states: Mapping[int, Checkpoint],
    *,
    weights: Weights,
    batch_size: int,
    on_state: Callable[[int, int], None],
) -> list[ExposureLoss]:
    """Return the losses that are planned.

    Args:
        model: The model under the evaluated state; afterwards it has the state that was measured last.
        plans: What is measured of each task.
        records: All records.
        states: The states of the plans' steps.
        weights: The parameters, or their moving average.
        batch_size: Largest number of sequences in a batch.
        on_state: Called after every state with the number of states that are done and of all.
    """
    texts = {(one.uri, one.ordinal): one.ids.tolist() for one in records}
    found = _StateLosses(RequestScorer(model, batch_size, time_budget(None)), texts)
    wanted: dict[int, list[RecordExposure]] = defaultdict(list)
    for plan in plans:
        for one in plan.intervals:
            for step in (one.before_step, one.after_step, model.step):
                wanted[step] += [one.record, *plan.controls]
    order = [model.step, *sorted({*wanted} - {model.step})] if wanted else []
    for done, step in enumerate(order):
        if step != model.step:
            model.engine.load(states[step].path)
            if weights == "ema":
                exchange_average(model.engine, model.config)
        found.measure(step, wanted[step])
        on_state(done + 1, len(order))
    return [
        ExposureLoss(
            one, found.of(one, [one.record], model.step),
            found.of(one, plan.controls, model.step) if plan.controls else None,
        )
        for plan in plans for one in plan.intervals
    ]  # fmt: skip


def mean_beyond(losses: Sequence[ExposureLoss]) -> tuple[float, float | None] | None:
    """Return the mean of what is beyond the control, and its standard error, which two or more have."""
    values = [one.beyond_control for one in losses if one.beyond_control is not None]
    if not values:
        return None
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return float(np.mean(values)), error


def count_groups(records: Sequence[RecordExposure]) -> Counter[Group]:
    """Return how many records are in each group."""
    return Counter(group_of(record) for record in records)


def by_task(records: Sequence[RecordExposure]) -> dict[str, list[RecordExposure]]:
    """Return records by the name of their task, in order."""
    return {task: [*own] for task, own in itertools.groupby(records, key=lambda record: record.uri)}
