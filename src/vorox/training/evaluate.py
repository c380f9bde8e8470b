"""Validation: one fixed set of rows in one fixed order, summed exactly, and when a run does it.

In: an engine and the validation batches. Out: an ``Evaluation`` (nats per token, bits per byte of text, accuracy).
Every result is recorded durably in ``evaluations.jsonl`` before anything else happens, so a run that was killed
between a checkpoint and its validation does it after resuming, and does none twice. Training is not disturbed in any
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.batch import IGNORED_LABEL, Batch, Progress
from vorox.core.engine import Engine
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import EvalConfig
from vorox.training.step_history import StepHistory, read_history
from vorox.training.stop import Stop


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one pass over the validation rows found.

    Attributes:
        loss: Mean cross entropy in nats over all target tokens.
        perplexity: ``exp(loss)``.
        bits_per_byte: Cross entropy in bits over the UTF-8 bytes that the target tokens stand for: comparable between
            tokenizers and with compressors. ``None`` where the targets stand for no text, and where ids do not
            determine the bytes of the text, so that the number would not be exact.
        accuracy: Share of targets that had the highest logit.
        num_target_tokens: Tokens in the sums.
        num_target_bytes: Bytes of text that they stand for; 0 where that is not known.
        custom: What the functions of ``eval.functions`` returned, by metric.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
    num_target_tokens: int
    num_target_bytes: int
    custom: Mapping[str, float] = field(default_factory=dict[str, float])


def evaluate(engine: Engine, batches: Iterable[Batch], token_byte_lengths: npt.NDArray[np.int32] | None) -> Evaluation:
    """Sum the loss of some batches.

    Args:
        engine: In whatever state; it is not changed.
        batches: The validation rows.
        token_byte_lengths: UTF-8 bytes that each token id stands for; ``None`` where the tokenizer loses text.

    Raises:
        DataError: The batches hold no target.
    """
    losses: list[float] = []
    num_tokens = num_bytes = num_correct = 0
    for batch in batches:
        values = engine.eval_step(batch)
        losses.append(values.loss_sum)
        num_tokens += values.num_target_tokens
        num_correct += values.num_correct
        targets = batch.labels_ABT[batch.labels_ABT != IGNORED_LABEL]
        if token_byte_lengths is not None:
            num_bytes += int(token_byte_lengths[targets].sum(dtype=np.int64))
    if num_tokens == 0:
        raise DataError(
            "the validation set has no token to predict",
            where="data.validation",
            hint="hold out more text, or set data.validation.held_out_fraction=0 to go without",
        )
    loss_sum = math.fsum(losses)
    loss = loss_sum / num_tokens
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=loss_sum / math.log(2) / num_bytes if num_bytes else None,
        accuracy=num_correct / num_tokens,
        num_target_tokens=num_tokens,
        num_target_bytes=num_bytes,
    )


class Evaluations:
    """The validations of a running process: which are due, which are done.

    Args:
        run_directory: Where ``evaluations.jsonl`` is.
        config: When to validate.
        total_steps: Length of the run.
        progress: State that the process starts from.
        batches: Opens the validation rows from the first; ``None`` if nothing is held out.
        token_byte_lengths: See ``evaluate``.
        writes: Off in all processes of a run but one.
        custom: Calls the functions of ``eval.functions`` on the model after so many steps.

    Attributes:
        losses: Validation loss by step, for all steps that are part of the run's history.

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
        writes: bool = True,
        custom: Callable[[int], Mapping[str, float]] | None = None,
    ) -> None:
        self._custom = custom
        path = RunLayout(run_directory).evaluations
        self._config, self._total_steps = config, total_steps
        self._batches, self._token_byte_lengths = batches, token_byte_lengths
        self._history = StepHistory(path if writes else None, progress.step)
        known = _read_evaluations(path).items()
        self.losses: dict[int, float] = {step: float(record["loss"]) for step, record in known if step <= progress.step}

    def due(self, progress: Progress) -> bool:
        """Whether this step is to be validated and was not yet."""
        if self._batches is None or progress.step == 0 or progress.step in self.losses:
            return False
        every = self._config.every_steps
        at_end = self._config.at_end and progress.step >= self._total_steps
        return at_end or (every is not None and progress.step % every == 0)

    def run(self, engine: Engine, progress: Progress, stop: Stop) -> Evaluation | None:
        """Validate this step and record the result; ``None`` if the run was asked to stop on the way."""
        assert self._batches is not None, "nothing is held out, so nothing is ever due"
        try:
            found = evaluate(engine, _until_stopped(self._batches(), stop), self._token_byte_lengths)
        except _Stopped:
            return None
        if self._custom is not None:
            found = replace(found, custom=self._custom(progress.step))
        self.losses[progress.step] = found.loss
        record = asdict(found)
        custom = _finite(record.pop("custom"))
        self._history.append({"step": progress.step, **_finite(record), **({"custom": custom} if custom else {})})
        self._history.flush()
        return found

    def best(self, progress: Progress) -> Progress:
        """The progress with the lowest validation loss of the run so far."""
        known: Sequence[float] = [loss for loss in self.losses.values() if math.isfinite(loss)]
        if progress.best_eval_loss is not None:
            known = [*known, progress.best_eval_loss]
        return replace(progress, best_eval_loss=min(known, default=None))


def _read_evaluations(path: Path) -> dict[int, dict[str, Any]]:
    """Read the recorded validations; their losses decide which checkpoints are kept, so none is left out in silence.

    Raises:
        DataError: A line is damaged.
    """
    try:
        return read_history(path)
    except DataError as error:
        raise DataError(
            "a recorded validation is damaged, and checkpoint.keep_best keeps checkpoints by it", where=error.where,
            hint="restore the line from a copy, or delete it: the checkpoint of its step then no longer counts as one "
            "of the best",
        ) from error  # fmt: skip


class _Stopped(Exception):
    """Leaves a validation that nobody waits for any more."""


def _until_stopped(batches: Iterable[Batch], stop: Stop) -> Iterator[Batch]:
    for batch in batches:
        if stop.requested:
            raise _Stopped
        yield batch


def _finite(record: dict[str, float | int | None]) -> dict[str, float | int | str | None]:
    """JSON has no infinity; a model that diverged has one."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
