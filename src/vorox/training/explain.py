"""Explain a step: which documents caused its loss, its gradient norm or the damage of the next steps, by experiment.

In: a run and a step. The step and the ones after it are computed again from the state before, unchanged, and must have
the recorded bits; then with documents masked, so that nothing else changes (``ReExecution.without``). Out: what each
document added to each quantity, whether a single one explains what is unusual, and the layers in which the gradient's
norm arises. Nothing is written into the run.

A batch of many documents is halved: of two halves, the one that added more is searched on.

A step whose loss or gradient is not finite has no amounts to add up. It is computed with some documents only: each half
that is not finite by itself is searched on, down to the documents whose masking makes the step finite.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from vorox.core.batch import Batch
from vorox.core.engine import NonfiniteOrigin
from vorox.core.errors import ConfigError
from vorox.core.files.json_reader import read_json
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.queries import where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.replay_chain import ChainEntry, examine_chain, number
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.fork import ForkChange, check_change
from vorox.training.re_execution import MakeWorkload, ReExecution
from vorox.training.replay import ReplayReport, difference_error, first_difference
from vorox.training.steps.workload import Workload

Quantity = Literal["loss", "grad_norm", "next_loss"]
_STEPS_BEFORE = 32
"""Steps before the explained one that tell what is usual."""
_LEAST_STEPS_BEFORE = 8
"""Fewer tell nothing of the scatter, so no step is unusual."""
_UNUSUAL_DEVIATIONS = 3.0
_MOST_ALONE = 24
"""Documents of a batch that are each masked alone; more are halved first."""
_LEAST_HALF = 8
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Effect:
    """What documents added: a quantity of the step, less that of the step without them.

    Attributes:
        loss: To the loss of the step, nats per target.
        grad_norm: To its gradient norm.
        next_loss: To the mean loss of the next steps, of those whose rows stay; ``None`` if there is none.
    """

    loss: float
    grad_norm: float
    next_loss: float | None

    def of(self, quantity: Quantity) -> float:
        return {"loss": self.loss, "grad_norm": self.grad_norm, "next_loss": self.next_loss or 0.0}[quantity]


@dataclass(frozen=True, slots=True)
class StepDocument:
    """A document in the rows of a step.

    Attributes:
        name: ``FILE:RECORD``.
        document: As the plan names it.
        num_tokens: Its tokens in the step.
        effect: What it added; ``None`` if it was only searched together with others.
    """

    name: str
    document: MaskedDocument
    num_tokens: int
    effect: Effect | None = None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """The norm of the gradient of the parameters of a layer.

    Attributes:
        name: The layer.
        norm: In the step.
        norm_without: Without the document that explains it; ``None`` without such a document.
    """

    name: str
    norm: float
    norm_without: float | None


@dataclass(frozen=True, slots=True)
class NonfiniteCause:
    """Why a step is not finite.

    Attributes:
        documents: Documents without which it is finite; empty if it is not finite with every document masked.
        value: The quantity without them, or without any document; it is finite if documents are the cause.
        origin: Where the run found the first value that is not finite; empty if that is not on record.
    """

    documents: Sequence[StepDocument]
    value: float
    origin: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a step is explained by.

    Attributes:
        step: The step.
        quantity: What was to be explained; of a step that is not finite, what is not.
        entry: The recorded step.
        usual: Median of the quantity in the steps before; 0 for the damage of the next steps.
        excess: What is to be explained: the quantity less the usual.
        is_unusual: Whether the excess is far beyond the scatter of the steps before.
        documents: The documents of the step, those that added most first.
        culprit: The document that explains at least half of the excess beyond what an ordinary one of the step adds,
            both masked alone and left alone with all others masked.
        layers: Layers by norm; empty if the engine does not tell.
        num_trials: Times that the step was computed with documents masked.
        nonfinite: Of a step that is not finite, its cause; there is no usual value, excess or single effect then.
    """

    step: int
    quantity: Quantity
    entry: ChainEntry
    usual: float
    excess: float
    is_unusual: bool
    documents: Sequence[StepDocument]
    culprit: StepDocument | None
    layers: Sequence[LayerNorm]
    num_trials: int
    nonfinite: NonfiniteCause | None = None


def documents_of_step(run_data: RunDataIndex, step: int) -> list[StepDocument]:
    """Return the documents of a step that are not masked, in the order of its rows."""
    found = dict[MaskedDocument, StepDocument]()
    for row in where(run_data, step):
        source = run_data.plan.sources[row.source_index].configured_name
        for part in row.documents:
            if not part.is_masked:
                document = MaskedDocument(source, part.version, part.ordinal)
                known = found.get(document, StepDocument(f"{part.uri}:{part.ordinal}", document, 0))
                found[document] = replace(known, num_tokens=known.num_tokens + part.num_tokens)
    return list(found.values())


def most_trials(num_documents: int) -> int:
    """Return how often a step of some documents is computed again with some masked, at most."""
    halvings = 0
    while num_documents > _MOST_ALONE or (halvings and num_documents > _LEAST_HALF):
        num_documents, halvings = math.ceil(num_documents / 2), halvings + 1
    return 2 * halvings + num_documents + 3


def trials_for_one(num_documents: int) -> int:
    """Return how often a step that is not finite is computed again with documents masked if one is the cause."""
    return 2 + 2 * math.ceil(math.log2(max(1, num_documents)))


def nonfinite_quantity(entry: ChainEntry) -> Quantity | None:
    """Return what is not finite in a recorded step, the loss first; ``None`` if all is."""
    known: tuple[Quantity, ...] = ("loss", "grad_norm")
    return next((name for name in known if not math.isfinite(number(getattr(entry, name)))), None)


def last_step(run_data: RunDataIndex, step: int, quantity: Quantity | None, num_next_steps: int) -> int:
    """Return the last step that an explanation computes; of a step that is not finite, this step.

    Raises:
        ConfigError: The step is not recorded, none after it is and is needed, it made no update whose damage could be
            explained, or documents cannot be masked.
    """
    entries = examine_chain(run_data.directory).entries
    if step not in entries:
        known = pluralize(max(entries, default=0), "step")
        raise ConfigError(
            f"The run has no step {step:,}; it recorded {known}", where="--step", hint="name a recorded step"
        )
    last = max(at for at in range(step, step + num_next_steps + 1) if at in entries)
    if nonfinite_quantity(entries[step]) is not None:
        last = step
        if quantity is not None:
            raise ConfigError(
                f"Step {step:,} is not finite, so it has no amount that could be explained", where="--by",
                hint="leave it out: the documents without which the step is finite are named then",
            )  # fmt: skip
    if quantity == "next_loss" and last == step:
        raise ConfigError(
            f"No step after {step:,} is recorded or compared, so there is no damage to explain", where="--by",
            hint="use --by grad_norm or --by loss" if step + 1 not in entries else "write --next 1 or more",
        )  # fmt: skip
    if documents := [one.document for one in documents_of_step(run_data, step)]:
        check_change(run_data, step - 1, ForkChange({"": tuple(documents)}))
    return last


def explain(
    run_data: RunDataIndex,
    step: int,
    make_workload: MakeWorkload,
    *,
    quantity: Quantity | None = None,
    num_next_steps: int,
    start: Checkpoint | None,
    on_trial: Callable[[int, int], None],
) -> Explanation:
    """Explain a step.

    Args:
        run_data: The run; its directory is not changed.
        step: The step, from 1.
        make_workload: As of ``ReExecution.steps``.
        quantity: What is to be explained. Default: the gradient norm, or what is not finite.
        num_next_steps: Steps after it that are computed too, as far as they are recorded.
        start: The state before the step, kept or materialised; ``None`` for step 1, which the initial weights begin.
        on_trial: Called after every trial with the number of trials, and of all at most.

    Raises:
        ConfigError: The step is not recorded, or documents of the run cannot be masked.
        VoroxError: The unchanged steps differ from the record.
    """
    execution = ReExecution(
        run_data.directory, step - 1, last_step(run_data, step, quantity, num_next_steps), start=start
    )
    documents = documents_of_step(run_data, step)
    nonfinite = nonfinite_quantity(execution.recorded.entries[step])
    at_most = most_trials(len(documents)) if nonfinite is None else trials_for_one(len(documents))
    with _Trials(execution, make_workload, lambda done: on_trial(done, max(done, at_most))) as trials:
        if nonfinite is None:
            return _explained(trials, documents, quantity or "grad_norm")
        return _nonfinite(trials, documents, nonfinite)


def _explained(trials: _Trials, documents: Sequence[StepDocument], quantity: Quantity) -> Explanation:
    entries, step = trials.execution.recorded.entries, trials.step
    everything = [one.document for one in documents]
    whole = trials.effect(everything)
    usual, deviation, excess = 0.0, 0.0, whole.of(quantity)
    if quantity != "next_loss":
        known = (entries[at] for at in range(max(1, step - _STEPS_BEFORE), step) if at in entries)
        before = [value for one in known if math.isfinite(value := number(getattr(one, quantity)))]
        usual = statistics.median(before) if before else 0.0
        deviation = math.inf
        if len(before) >= _LEAST_STEPS_BEFORE:
            deviation = 1.4826 * statistics.median(abs(value - usual) for value in before)
        excess = number(getattr(entries[step], quantity)) - usual
    is_unusual = excess > _UNUSUAL_DEVIATIONS * deviation and excess > 0
    suspects = _halved(trials, documents, quantity)
    tested = {one.document: replace(one, effect=trials.effect([one.document])) for one in suspects}
    ranked = sorted(tested.values(), key=lambda one: -_of(one.effect, quantity))
    others = [one for one in documents if one.document not in tested]
    culprit = None
    if ranked and is_unusual:
        first = ranked[0]
        rest = trials.effect([one for one in everything if one != first.document])
        adds = min(_of(first.effect, quantity), whole.of(quantity) - rest.of(quantity))
        ordinary = [_of(one.effect, quantity) for one in ranked[1:]]
        if adds - (statistics.median(ordinary) if ordinary else 0.0) >= excess / 2:
            culprit = first
    return Explanation(
        step, quantity, entries[step], usual, excess, is_unusual, [*ranked, *others], culprit,
        trials.layers(None if culprit is None else culprit.document), trials.num_trials,
    )  # fmt: skip


def _nonfinite(trials: _Trials, documents: Sequence[StepDocument], quantity: Quantity) -> Explanation:
    """Explain a step that is not finite."""
    entry = trials.execution.recorded.entries[trials.step]

    def without(masked: Sequence[StepDocument]) -> ChainEntry:
        return trials.step_without([one.document for one in masked])

    def is_finite_with(kept: Sequence[StepDocument]) -> bool:
        return nonfinite_quantity(without(_others(documents, kept))) is None

    causes: list[StepDocument] = []
    found = without(documents)
    if nonfinite_quantity(found) is None:
        while not is_finite_with(rest := _others(documents, causes)):
            causes += _not_finite_by_themselves(rest, is_finite_with)
        found = without(causes)
    cause = NonfiniteCause(causes, number(getattr(found, quantity)), _recorded_origin(trials.execution, trials.step))
    return Explanation(
        trials.step, quantity, entry, 0.0, math.inf, True, [*causes, *_others(documents, causes)],
        causes[0] if len(causes) == 1 else None, [], trials.num_trials, cause,
    )  # fmt: skip


def _others(documents: Sequence[StepDocument], chosen: Sequence[StepDocument]) -> list[StepDocument]:
    names = {one.document for one in chosen}
    return [one for one in documents if one.document not in names]


def _not_finite_by_themselves(
    documents: Sequence[StepDocument], is_finite_with: Callable[[Sequence[StepDocument]], bool]
) -> Sequence[StepDocument]:
    """Return those of documents, with which a step is not finite, that cause it, each alone or all together."""
    if len(documents) == 1:
        return documents
    middle = math.ceil(len(documents) / 2)
    halves = [half for half in (documents[:middle], documents[middle:]) if not is_finite_with(half)]
    if halves:
        return [one for half in halves for one in _not_finite_by_themselves(half, is_finite_with)]
    for one in documents:  # they act only together: what can be left out is no part of it
        rest = [other for other in documents if other is not one]
        documents = documents if is_finite_with(rest) else rest
    return documents


def _recorded_origin(execution: ReExecution, step: int) -> str:
    """Return where the run found the first value of a step that is not finite; empty if that is not on record."""
    try:
        found = read_json(RunLayout(execution.run_directory).nonfinite_record(step), dict)["origin"]
        return str(
            NonfiniteOrigin(int(found["micro_batch"]), math.nan, str(found["activation"]), str(found["gradient"]))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _of(effect: Effect | None, quantity: Quantity) -> float:
    return 0.0 if effect is None else effect.of(quantity)


def _halved(trials: _Trials, documents: Sequence[StepDocument], quantity: Quantity) -> Sequence[StepDocument]:
    """Return the documents that are worth a trial each."""
    if len(documents) <= _MOST_ALONE:
        return documents
    while len(documents) > _LEAST_HALF:
        middle = math.ceil(len(documents) / 2)
        halves = [documents[:middle], documents[middle:]]
        effects = [trials.effect([one.document for one in half]).of(quantity) for half in halves]
        documents = halves[effects.index(max(effects))]
    return documents


class _Trials:
    """The steps of a re-execution, computed with documents masked. A context manager.

    Data, model and engine are opened once, as long as the state to start from is a checkpoint.

    Raises:
        VoroxError: The unchanged steps differ from the record.
    """

    def __init__(self, execution: ReExecution, make_workload: MakeWorkload, on_trial: Callable[[int], None]) -> None:
        self.execution, self.step, self.num_trials = execution, execution.first_step + 1, 0
        self._make_workload, self._on_trial = make_workload, on_trial
        self._open: list[tuple[RunConfig, _KeptWorkload]] = []
        self._norms: dict[str, float] = {}
        self._trials: dict[frozenset[MaskedDocument], dict[int, ChainEntry]] = {}

    def __enter__(self) -> _Trials:
        try:
            self._compute_unchanged()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for _, workload in self._open:
            workload.corpus.close()

    def _compute_unchanged(self) -> None:
        is_finite = nonfinite_quantity(self.execution.recorded.entries[self.step]) is None
        self._entries, self._norms = self._computed(self.execution, measures=is_finite)
        for at, entry in self._entries.items():
            recorded = self.execution.recorded.entries[at]
            difference = first_difference(recorded, entry)
            if difference is not None and not _is_equally_nonfinite(recorded, entry):
                report = ReplayReport(
                    self.step - 1, self.execution.last_step, at - self.step, 0, difference,
                    tuple(self.execution.environment),
                )  # fmt: skip
                raise difference_error(report, self.execution.run_directory)

    def step_without(self, documents: Sequence[MaskedDocument]) -> ChainEntry:
        """Return the step as it is without documents."""
        return self._without(documents).get(self.step, self._entries[self.step])

    def _without(self, documents: Sequence[MaskedDocument]) -> dict[int, ChainEntry]:
        """Return the steps without documents; computed once for each choice, and empty without any."""
        if not documents:
            return {}
        chosen = frozenset(documents)
        if chosen not in self._trials:
            self._trials[chosen], _ = self._computed(self.execution.without(documents))
            self.num_trials += 1
            self._on_trial(self.num_trials)
        return self._trials[chosen]

    def effect(self, documents: Sequence[MaskedDocument]) -> Effect:
        """Return what documents added."""
        found = self._without(documents)
        changes = (
            number(before.loss) - number(found[at].loss)
            for at, before in self._entries.items()
            if at > self.step and at in found and found[at].batch == before.batch
        )
        later = [change for change in changes if math.isfinite(change)]
        before, after = self._entries[self.step], found.get(self.step, self._entries[self.step])
        return Effect(
            number(before.loss) - number(after.loss),
            number(before.grad_norm) - number(after.grad_norm),
            statistics.fmean(later) if later else None,
        )

    def layers(self, document: MaskedDocument | None) -> list[LayerNorm]:
        """Return the layers by norm of the gradient, with and without a document."""
        without = None
        if document is not None and self._norms:
            _, without = self._computed(self.execution.without([document]), measures=True)
        squares, others = _by_layer(self._norms), _by_layer(without or {})
        whole = math.sqrt(sum(squares.values()))
        scale = number(self._entries[self.step].grad_norm) / whole if whole > 0 else 0.0
        found = [
            LayerNorm(name, scale * math.sqrt(square), scale * math.sqrt(others[name]) if without else None)
            for name, square in squares.items()
        ]
        return sorted(found, key=lambda one: -one.norm)

    def _computed(
        self, execution: ReExecution, *, measures: bool = False
    ) -> tuple[dict[int, ChainEntry], dict[str, float]]:
        norms = dict[str, float]()

        def measure(workload: Workload, batch: Batch) -> None:
            if batch.step + 1 == self.step:
                with contextlib.suppress(ConfigError):  # the engine has no such feature
                    norms.update(workload.engine.gradient_norms(batch))

        steps = execution.steps(self._workload, measure if measures else None)
        with contextlib.closing(steps):
            return {one.step: one.entry for one in steps}, norms

    def _workload(self, config: RunConfig) -> Workload:
        if self.execution.checkpoint is None:
            return self._make_workload(config)  # the initial weights are those of a new engine
        for known, workload in self._open:
            if known == config:
                return workload
        made = self._make_workload(config)
        self._open.append((config, _KeptWorkload(*(getattr(made, one.name) for one in fields(made)))))
        return self._open[-1][1]


def _is_equally_nonfinite(recorded: ChainEntry, found: ChainEntry) -> bool:
    """Whether a step of the same rows is not finite in the same way; the bits of a NaN say nothing."""
    if nonfinite_quantity(recorded) is None or recorded.batch != found.batch:
        return False
    pairs = ((recorded.loss, found.loss), (recorded.grad_norm, found.grad_norm))
    return all(then == now or (math.isnan(number(then)) and math.isnan(number(now))) for then, now in pairs)


class _KeptWorkload(Workload):
    """A workload that serves several re-executions."""

    def close(self) -> None:
        """Stay open."""


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of squares of the norms of the parameters of each layer."""
    found: dict[str, float] = {}
    for name, norm in norms.items():
        match = _LAYER.match(name)
        layer = name if match is None else match[1]
        found[layer] = found.get(layer, 0.0) + norm * norm
    return found
