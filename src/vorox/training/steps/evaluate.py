"""Validation: the loss over one fixed set of rows in a fixed order, summed exactly; and its schedule.

In: an engine and the validation batches. Out: an ``Evaluation`` (nats per token, bits per byte of text, accuracy).
Every result is recorded durably in ``evaluations.jsonl`` before anything else happens, so a run that was killed
between a checkpoint and its validation validates after the resume, and never twice. Training is unaffected, bit for
bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vorox.core.batch import IGNORED_LABEL, Batch, Progress
from vorox.core.engine import Engine, EvalValues
from vorox.core.errors import DataError
from vorox.core.files.json_lines import StepHistory, read_history
from vorox.core.run_layout import RunLayout
from vorox.core.schema import EvalConfig
from vorox.training.steps.stop import Stop


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one pass over the validation rows.

    Attributes:
        loss: Mean cross entropy in nats over all target tokens; with DPO, its mean loss over pairs.
        perplexity: ``exp(loss)``; ``None`` with DPO.
        bits_per_byte: Cross entropy in bits per UTF-8 byte of the target tokens: comparable between tokenizers and
            with compressors. ``None`` if the targets have no text, or ids do not determine its bytes exactly.
        accuracy: Share of targets that had the highest logit; with DPO, of pairs whose chosen answer has the higher
            reward.
        num_target_tokens: Tokens in the sums; with DPO, pairs.
        num_target_bytes: Bytes of their text; 0 if unknown.
        custom: Further results by metric: of each source (``eval.by_source``), of the functions in ``eval.functions``.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    accuracy: float
    num_target_tokens: int
    num_target_bytes: int
    custom: Mapping[str, float] = field(default_factory=dict[str, float])


class ComputesLoss(Protocol):
    """An engine, or another model that sums losses."""

    def eval_step(self, batch: Batch) -> EvalValues:
        """Sum the loss of a batch without training on it."""
        ...


def evaluate(
    engine: ComputesLoss, batches: Iterable[Batch], token_byte_lengths: npt.NDArray[np.int32] | None
) -> Evaluation:
    """Compute loss and accuracy over batches; the engine is not changed.

    Args:
        engine: The engine, or another model.
        batches: The validation rows.
        token_byte_lengths: UTF-8 bytes of each token id, shape [vocabulary]; ``None`` if the tokenizer is lossy.

    Raises:
        DataError: The batches have no target.
    """
    losses: list[float] = []
    num_tokens = num_bytes = num_correct = 0
    is_cross_entropy = True
    for batch in batches:
        values = engine.eval_step(batch)
        losses.append(values.loss_sum)
        num_tokens += values.num_target_tokens
        num_correct += values.num_correct
        is_cross_entropy = values.is_cross_entropy
        targets = batch.labels_ABT[batch.labels_ABT != IGNORED_LABEL]
        if token_byte_lengths is not None:
            num_bytes += int(token_byte_lengths[targets].sum(dtype=np.int64))
    if num_tokens == 0:
        raise DataError(
            "Validation set has no token to predict",
            where="data.validation",
            hint="hold out more text, or set data.validation.held_out_fraction=0 to train without validation",
        )
    loss_sum = math.fsum(losses)
    loss = loss_sum / num_tokens
    return Evaluation(
        loss=loss,
        perplexity=(math.exp(loss) if loss < 700 else math.inf) if is_cross_entropy else None,
        bits_per_byte=loss_sum / math.log(2) / num_bytes if num_bytes and is_cross_entropy else None,
        accuracy=num_correct / num_tokens,
        num_target_tokens=num_tokens,
        num_target_bytes=num_bytes,
    )


class CustomEvaluations(Protocol):
    """The functions in ``eval.functions``."""

    def __call__(self, step: int) -> Mapping[str, float]: ...
    def rehearse(self) -> None: ...


class Evaluations:
    """The validations of a running process: due and finished ones.

    Args:
        run_directory: The run; ``evaluations.jsonl`` is in it.
        config: When to validate.
        total_steps: Length of the run.
        progress: The state that the process starts from.
        batches: Opens the validation batches from the first; ``None`` without a validation set.
        token_byte_lengths: See ``evaluate``.
        by_source: Opens the validation batches of each source by itself; empty without ``eval.by_source``.
        writes: Whether this rank records the results.
        custom: Calls the functions in ``eval.functions`` after a step.

    Attributes:
        losses: Validation loss by step.

    Raises:
        DataError: A recorded validation is damaged.
    """

    def __init__(
        self,
        run_directory: Path,
        config: EvalConfig,
        total_steps: int,
        progress: Progress,
        *,
        batches: Callable[[], Iterable[Batch]] | None,
        token_byte_lengths: npt.NDArray[np.int32] | None,
        by_source: Mapping[str, Callable[[], Iterable[Batch]]] | None = None,
        writes: bool = True,
        custom: CustomEvaluations | None = None,
    ) -> None:
        self._custom = custom
        path = RunLayout(run_directory).evaluations
        self._config, self._total_steps = config, total_steps
        self._batches, self._token_byte_lengths = batches, token_byte_lengths
        self._by_source = by_source or {}
        self._history = StepHistory(path if writes else None, progress.step)
        known = recorded_losses(run_directory)
        self.losses: dict[int, float] = {step: loss for step, loss in known.items() if step <= progress.step}

    def due(self, progress: Progress) -> bool:
        """Whether this step is due for validation and not validated yet."""
        if self._batches is None or progress.step in self.losses:
            return False
        if progress.step == 0:
            return self._config.at_start
        every = self._config.every_steps
        at_end = self._config.at_end and progress.step >= self._total_steps
        return at_end or (every is not None and progress.step % every == 0)

    def rehearse(self, engine: Engine) -> bool:
        """Validate on the first batch of every set and call all functions; nothing is recorded.

        Returns:
            Whether the run has a validation.

        Raises:
            ConfigError: A function fails.
        """
        if self._batches is None or not self._config.validates:
            return False
        for batches in (self._batches, *self._by_source.values()):
            evaluate(engine, itertools.islice(batches(), 1), self._token_byte_lengths)
        if self._custom is not None:
            self._custom.rehearse()
        return True

    def run(
        self, engine: Engine, progress: Progress, stop: Stop, progressed: Callable[[], None] = lambda: None
    ) -> Evaluation | None:
        """Validate this step and record the result; ``None`` if a stop was requested meanwhile.

        Args:
            engine: The engine, in the state after the step.
            progress: Progress of the run.
            stop: Polled before every batch.
            progressed: Called before every batch.
        """
        assert self._batches is not None, "without a validation set, no validation is due"
        try:
            found = evaluate(engine, _until_stopped(self._batches(), stop, progressed), self._token_byte_lengths)
            for name, batches in self._by_source.items():
                source = evaluate(engine, _until_stopped(batches(), stop, progressed), self._token_byte_lengths)
                values = {
                    "loss": source.loss, "perplexity": source.perplexity, "bits_per_byte": source.bits_per_byte
                }  # fmt: skip
                metrics = {f"eval/sources/{name}/{key}": value for key, value in values.items() if value is not None}
                found = replace(found, custom={**found.custom, **metrics})
        except _Stopped:
            return None
        if self._custom is not None:
            found = replace(found, custom={**found.custom, **self._custom(progress.step)})
        self.losses[progress.step] = found.loss
        record = asdict(found)
        custom = _finite(record.pop("custom"))
        self._history.append({"step": progress.step, **_finite(record), **({"custom": custom} if custom else {})})
        self._history.flush()
        return found

    def best(self, progress: Progress) -> Progress:
        """Return the progress with the lowest validation loss of the run so far."""
        known: Sequence[float] = [loss for loss in self.losses.values() if math.isfinite(loss)]
        if progress.best_eval_loss is not None:
            known = [*known, progress.best_eval_loss]
        return replace(progress, best_eval_loss=min(known, default=None))


def recorded_losses(run_directory: Path) -> dict[int, float]:
    """Return the recorded validation losses by step; none is skipped, because they decide which checkpoints are kept.

    Raises:
        DataError: A line is damaged.
    """
    try:
        history = read_history(RunLayout(run_directory).evaluations)
    except DataError as error:
        raise DataError(
            "A recorded validation is damaged, and checkpoint.keep_best depends on it", where=error.where,
            hint="restore the line from a copy, or delete it: the checkpoint of its step is then not among the best",
        ) from error  # fmt: skip
    return {step: float(record["loss"]) for step, record in history.items()}


class _Stopped(Exception):
    """Ends a validation after a stop request."""


def _until_stopped(batches: Iterable[Batch], stop: Stop, progressed: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        progressed()
        if stop.requested:
            raise _Stopped
        yield batch


def _finite(record: dict[str, float | int | None]) -> dict[str, float | int | str | None]:
    """Encode non-finite numbers as strings, because JSON has none."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
