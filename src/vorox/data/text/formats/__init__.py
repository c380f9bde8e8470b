"""What a record is in each format: where records begin, and how their bytes become documents."""

from vorox.data.text.formats.lines import (
    SUFFIXES,
    UnreadableRecord,
    boundary_after,
    boundary_before,
    count_lines,
    count_records,
    cut,
    lone_surrogate,
    parse_line,
    read_lines_of,
    read_records,
    records_are_lines,
)

__all__ = [
    "SUFFIXES",
    "UnreadableRecord",
    "boundary_after",
    "boundary_before",
    "count_lines",
    "count_records",
    "cut",
    "lone_surrogate",
    "parse_line",
    "read_lines_of",
    "read_records",
    "records_are_lines",
]
