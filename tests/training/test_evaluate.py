"""Validation against sums worked out by hand, and the record of which validations are done."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor, Progress
from vorox.core.engine import EvalValues
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import EvalConfig
from vorox.training.steps.evaluate import Evaluations, evaluate
from vorox.training.steps.stop import StopRequest

CURSOR = DataCursor("d", 1, 0, 0, 7)
BYTES = np.array([1, 2, 3, 0], np.int32)


class Fixed:
    """An engine with a loss of 0.25 nats on every target, right on every token 1."""

    def __init__(self) -> None:
        self.batches = 0

    def eval_step(self, batch: Batch) -> EvalValues:
        self.batches += 1
        kept = batch.labels_ABT[batch.labels_ABT != IGNORED_LABEL]
        return EvalValues(0.25 * len(kept), len(kept), int((kept == 1).sum()))


def batch(labels: list[int]) -> Batch:
    array = np.array(labels, np.int32).reshape(1, 1, -1)
    kept = int((array != IGNORED_LABEL).sum())
    return Batch(0, array, array, None, None, np.zeros((1, 1), np.uint64), kept, CURSOR)


BATCHES = [batch([0, 1, 2, 3]), batch([1, IGNORED_LABEL, IGNORED_LABEL, 2])]


def at(step: int) -> Progress:
    return Progress(step, 0, CURSOR)


def test_by_hand() -> None:
    found = evaluate(Fixed(), BATCHES, BYTES)  # type: ignore[arg-type]
    assert found.loss == 0.25
    assert found.perplexity == pytest.approx(math.exp(0.25))
    assert found.num_target_tokens == 6
    assert found.num_target_bytes == 1 + 2 + 3 + 0 + 2 + 3
    assert found.bits_per_byte == pytest.approx(6 * 0.25 / math.log(2) / 11)
    assert found.accuracy == pytest.approx(2 / 6)


def test_no_bits_per_byte_where_they_would_not_be_exact() -> None:
    found = evaluate(Fixed(), BATCHES, None)  # type: ignore[arg-type]
    assert found.loss == 0.25
    assert found.bits_per_byte is None
    assert found.num_target_bytes == 0


def test_nothing_to_predict() -> None:
    with pytest.raises(DataError, match="no token to predict"):
        evaluate(Fixed(), [batch([IGNORED_LABEL] * 4)], BYTES)  # type: ignore[arg-type]
    assert evaluate(Fixed(), [batch([3, 3])], BYTES).bits_per_byte is None  # type: ignore[arg-type]


def open_evaluations(
    directory: Path,
    progress: Progress,
    *,
    held_out: bool = True,
    every: int | None = 3,
    at_end: bool = True,
    at_start: bool = False,
) -> Evaluations:
    return Evaluations(
        directory, EvalConfig(every_steps=every, at_end=at_end, at_start=at_start), 10, progress,
        batches=(lambda: BATCHES) if held_out else None, token_byte_lengths=BYTES,
    )  # fmt: skip


def test_due(tmp_path: Path) -> None:
    assert [s for s in range(11) if open_evaluations(tmp_path, at(0)).due(at(s))] == [3, 6, 9, 10]
    assert [s for s in range(11) if open_evaluations(tmp_path, at(0), at_end=False).due(at(s))] == [3, 6, 9]
    assert [s for s in range(11) if open_evaluations(tmp_path, at(0), every=None).due(at(s))] == [10]
    assert [s for s in range(11) if open_evaluations(tmp_path, at(0), at_start=True).due(at(s))] == [0, 3, 6, 9, 10]
    assert not any(open_evaluations(tmp_path, at(0), held_out=False).due(at(s)) for s in range(11))


def test_none_twice_and_none_forgotten(tmp_path: Path) -> None:
    evaluations = open_evaluations(tmp_path, at(0))
    for step in (3, 6):
        assert evaluations.run(Fixed(), at(step), StopRequest()) is not None  # type: ignore[arg-type]
        assert not evaluations.due(at(step))
    resumed = open_evaluations(tmp_path, at(6))
    assert resumed.losses == {3: 0.25, 6: 0.25}
    assert not resumed.due(at(6))
    assert resumed.due(at(9))
    earlier = open_evaluations(tmp_path, at(5))  # what was validated at 6 belongs to work that was lost
    assert earlier.losses == {3: 0.25}
    assert earlier.due(at(6))


def test_the_best_so_far(tmp_path: Path) -> None:
    evaluations = open_evaluations(tmp_path, at(0))
    assert evaluations.best(at(0)).best_eval_loss is None
    evaluations.losses.update({3: 2.0, 6: math.nan, 9: 3.0})
    assert evaluations.best(at(9)).best_eval_loss == 2.0
    assert evaluations.best(replace(at(9), best_eval_loss=1.5)).best_eval_loss == 1.5


def test_a_stop_leaves_no_record(tmp_path: Path) -> None:
    stop, engine = StopRequest(), Fixed()
    stop.requested = "SIGTERM"
    evaluations = open_evaluations(tmp_path, at(0))
    assert evaluations.run(engine, at(3), stop) is None  # type: ignore[arg-type]
    assert engine.batches == 0
    assert evaluations.due(at(3))
    assert not RunLayout(tmp_path).evaluations.exists()


def test_a_model_that_diverged_is_recorded_all_the_same(tmp_path: Path) -> None:
    class Diverged(Fixed):
        def eval_step(self, batch: Batch) -> EvalValues:
            return replace(super().eval_step(batch), loss_sum=math.inf)

    evaluations = open_evaluations(tmp_path, at(0))
    found = evaluations.run(Diverged(), at(3), StopRequest())  # type: ignore[arg-type]
    assert found is not None
    assert math.isinf(found.loss)
    assert open_evaluations(tmp_path, at(3)).losses == {3: math.inf}


def test_a_damaged_record_is_refused_with_its_line(tmp_path: Path) -> None:
    """The losses decide which checkpoints stay, so a run does not go on with one missing in silence."""
    evaluations = open_evaluations(tmp_path, at(0))
    for step in (3, 6):
        evaluations.run(Fixed(), at(step), StopRequest())  # type: ignore[arg-type]
    path = tmp_path / "evaluations.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole)
    with pytest.raises(DataError, match="keep_best") as caught:
        open_evaluations(tmp_path, at(6))
    assert caught.value.where == f"{path}:1"
    path.write_bytes(whole.partition(b"\n")[2])
    assert sorted(open_evaluations(tmp_path, at(6)).losses) == [6], "as the remedy says"
    path.write_bytes(whole + b'{"step":9,"lo')
    assert sorted(open_evaluations(tmp_path, at(6)).losses) == [3, 6], "a torn last line was never recorded"


def test_losses_by_source(tmp_path: Path) -> None:
    class ByLabel(Fixed):
        def eval_step(self, batch: Batch) -> EvalValues:
            return replace(super().eval_step(batch), loss_sum=float(batch.labels_ABT[0, 0, 0]))

    sources = {"law": lambda: [batch([2, 1])], "general": lambda: [batch([1, 1, 1, 1]), batch([3, 0, 0, 0])]}
    evaluations = Evaluations(
        tmp_path, EvalConfig(every_steps=3), 10, at(0), batches=lambda: BATCHES, token_byte_lengths=BYTES,
        by_source=sources, custom=lambda step: {"eval/custom/f": 1.0},
    )  # fmt: skip
    found = evaluations.run(ByLabel(), at(3), StopRequest())  # type: ignore[arg-type]
    assert found is not None
    assert found.loss == pytest.approx(1 / 6)
    assert found.custom == {
        "eval/sources/law/loss": 1.0, "eval/sources/law/perplexity": pytest.approx(math.e),
        "eval/sources/law/bits_per_byte": pytest.approx(2 / math.log(2) / 5),
        "eval/sources/general/loss": 0.5, "eval/sources/general/perplexity": pytest.approx(math.exp(0.5)),
        "eval/sources/general/bits_per_byte": pytest.approx(4 / math.log(2) / 11),
        "eval/custom/f": 1.0,
    }  # fmt: skip
