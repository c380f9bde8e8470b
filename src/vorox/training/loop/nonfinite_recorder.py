"""Record non-finite steps in ``nonfinite/``: their rows, documents, and the first non-finite tensor.

In: a settled step whose loss or gradient is not finite. Out: ``nonfinite/step-00000010.json``. The batch is recomputed
without an update to locate the tensor, and its rows are looked up in the plan; finite steps cost nothing. The first
step of every series is recorded, and the one that ends the run.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox.core.engine import Engine, NonfiniteOrigin
from vorox.core.errors import VoroxError
from vorox.core.files import atomic
from vorox.core.files.json_lines import finite_json
from vorox.core.run_layout import RunLayout
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.records.log import RunLog

if TYPE_CHECKING:
    from vorox.training.steps.pending_steps import InFlightStep, SettledStep

_FORMAT = "vorox-nonfinite/1"
_MAX_RECORDS = 32


class NonfiniteRecorder:
    """Writes the records of one running process.

    Args:
        run_directory: The run.
        engine: Recomputes the batch; ``None`` with several ranks, each of which has only a part of it.
        log: Receives the path of each record.
        writes: Whether this rank writes records.
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
            text = f"Step {number:,} not finite; its record cannot be written: {error.strerror}"
            self._log.event("nonfinite_record", text, level="warning", step=number)
            return ""
        what = f"first in {origin}" if origin is not None else f"origin unknown: {unknown}"
        text = f"Step {number:,} not finite, {what}; recorded in {path.parent.name}/{path.name}"
        self._log.event("nonfinite_record", text, level="warning", step=number, path=str(path))
        return str(path)

    def _locate(self, step: InFlightStep) -> tuple[NonfiniteOrigin | None, str]:
        if self._engine is None or step.batch is None:
            return None, "the batch is distributed over several ranks"
        try:
            found = self._engine.locate_nonfinite(step.batch)
        except Exception as error:  # a failed diagnosis must not end the run
            return None, f"the batch cannot be recomputed: {error}"
        return found, "" if found is not None else "all finite when recomputed with the parameters after the next step"

    def _rows(self, number: int) -> dict[str, Any]:
        try:
            with RunDataIndex.open(self._run_directory) as run_data:
                return {"rows": [asdict(row) for row in where(run_data, number)]}
        except (VoroxError, OSError) as error:
            return {"rows": None, "rows_unknown_because": str(error)}
