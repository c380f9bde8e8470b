"""Records of steps that were not finite: rows, documents and the first place, in ``nonfinite/`` of the run.

In: a settled step whose loss or gradient was not finite. Out: ``nonfinite/step-00000010.json``. The batch is repeated
without an update to find the place, and its rows are looked up in the plan; both happen only then, so finite steps pay
nothing. The first step of every series is recorded, and the one that ends the run.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox.core import atomic
from vorox.core.engine import Engine, NonfiniteOrigin
from vorox.core.errors import VoroxError
from vorox.core.json_lines import finite_json
from vorox.core.log import RunLog
from vorox.core.run_layout import RunLayout
from vorox.data.provenance_queries import RunDataIndex, where

if TYPE_CHECKING:
    from vorox.training.pending_steps import InFlightStep, SettledStep

_FORMAT = "vorox-nonfinite/1"
_MAX_RECORDS = 32


class NonfiniteRecorder:
    """Writes the records of one running process.

    Args:
        run_directory: The run.
        engine: Repeats the batch. ``None`` in a run of several processes, whose parts of a batch differ.
        log: Told where a record is.
        writes: Off in all processes of a run but one.
    """

    def __init__(self, run_directory: Path, engine: Engine | None, log: RunLog, *, writes: bool = True) -> None:
        self._run_directory, self._engine, self._log, self._writes = run_directory, engine, log, writes
        self._num_records = 0

    def record(self, settled: SettledStep) -> str:
        """Record a non-finite step, if it is the first of its series or ends the run.

        Returns:
            The record's path; empty if there is none.
        """
        in_a_row, values, step, number = settled.nonfinite_in_a_row, settled.values, settled.step, settled.number
        is_first = in_a_row == 1 and self._num_records < _MAX_RECORDS
        if not self._writes or not (settled.ends_run or is_first):
            return ""
        self._num_records += 1
        origin, unknown = self._locate(step)
        record: dict[str, Any] = {
            "format": _FORMAT,
            "step": number,
            "nonfinite_in_a_row": in_a_row,
            "loss": values.loss,
            "grad_norm": values.grad_norm,
            "loss_scale": values.extra.get("loss_scale"),
            "learning_rate": step.lr,
            "weight_decay": step.weight_decay,
            "batch_digest": step.batch_digest,
            "origin": None if origin is None else asdict(origin),
            "origin_unknown_because": unknown,
            **self._rows(number),
        }
        path = RunLayout(self._run_directory).nonfinite_record(number)
        try:
            atomic.make_directory(path.parent)
            atomic.write_file(path, atomic.pretty_json(finite_json(record)))
        except OSError as error:
            text = f"Step {number:,} was not finite, and its record cannot be written: {error.strerror}"
            self._log.event("nonfinite_record", text, level="warning", step=number)
            return ""
        what = f"first in {origin}" if origin is not None else f"where is unknown: {unknown}"
        text = f"Step {number:,} was not finite, {what}; recorded in {path.parent.name}/{path.name}"
        self._log.event("nonfinite_record", text, level="warning", step=number, path=str(path))
        return str(path)

    def _locate(self, step: InFlightStep) -> tuple[NonfiniteOrigin | None, str]:
        if self._engine is None or step.batch is None:
            return None, "the batch is spread over several processes"
        try:
            found = self._engine.locate_nonfinite(step.batch)
        except Exception as error:  # the record matters less than the run
            return None, f"the batch cannot be repeated: {error}"
        return found, "" if found is not None else "repeated with the parameters of the step after it, all is finite"

    def _rows(self, number: int) -> dict[str, Any]:
        try:
            with RunDataIndex.open(self._run_directory) as run_data:
                return {"rows": [asdict(row) for row in where(run_data, number)]}
        except (VoroxError, OSError) as error:
            return {"rows": None, "rows_unknown_because": str(error)}
