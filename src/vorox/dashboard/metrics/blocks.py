"""Decode blocks of ``metrics.jsonl`` as columns, without holding the interpreter lock.

A block of complete lines goes in; its steps, attempts, times and values come out. Only plain blocks are decoded: those
with a resume, a non-finite value, a damaged line or anything else unusual are left to the reader of single lines, so
that both readers return the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pa_json

from vorox.core.files.json_reader import is_step
from vorox.dashboard.metrics.downsampling import Numbers
from vorox.experiments.metrics_lines import MetricsLine

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MetricBlock:
    """The columns of a block.

    Attributes:
        steps: Step of each line.
        attempts: Attempt of each line.
        times: Seconds since the epoch of each line; NaN where it has none.
        values: Per metric, in the order of its first value, the lines that have it and their values.
    """

    steps: Rows
    attempts: Rows
    times: Numbers
    values: dict[str, tuple[Rows, Numbers]]


def decode(block: bytes) -> MetricBlock | None:
    """Return the columns of a block of complete lines, or ``None`` if it has to be read line by line."""
    if not block.isascii():
        return None
    options = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = pa_json.read_json(pa.BufferReader(block), read_options=options)
    except pa.ArrowInvalid:
        return None
    if table.num_rows != block.count(b"\n") or "resume_step" in table.column_names:
        return None
    if not set(MetricsLine._fields) <= set(table.column_names):
        return None
    columns = {name: table.column(name).combine_chunks() for name in MetricsLine._fields}
    steps, attempts, times, values = columns.values()
    are_counts = all(_is_count(one) for one in (steps, attempts))
    if not are_counts or not _is_numeric(times.type) or not pa.types.is_struct(values.type) or values.null_count:
        return None
    if not all(_is_numeric(values.type.field(index).type) for index in range(values.type.num_fields)):
        return None
    found: list[tuple[str, Rows, Numbers]] = []
    for index in range(values.type.num_fields):
        column = values.field(index)
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        if rows.size:
            found.append((values.type.field(index).name, rows, _floats(column)[rows]))
    found.sort(key=lambda one: one[1][0])
    return MetricBlock(
        steps.to_numpy(), attempts.to_numpy(), _floats(times), {name: (rows, data) for name, rows, data in found}
    )


def _is_count(column: pa.Array) -> bool:
    if column.type != pa.int64() or column.null_count:
        return False
    numbers = column.to_numpy()
    return is_step(int(numbers.min())) and is_step(int(numbers.max()))


def _is_numeric(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or kind in (pa.int64(), pa.float64())


def _floats(column: pa.Array) -> Numbers:
    """Return a column as floats, NaN where it is null."""
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), np.float64)
