"""Source formats by file extension."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

COMPRESSED_ENDINGS: Final = frozenset({".gz", ".zst", ".zstd"})
FORMAT_OF_ENDING: Final[Mapping[str, str]] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".bin": "bin",
    ".arrow": "arrow", ".mds": "mds",
    **dict.fromkeys((".txt", ".md", ".markdown", ".rst", ".text", ".tex", ".html", ".htm", ".xml", ".org"), "txt"),
    **dict.fromkeys((".py", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".go", ".rs", ".rb"), "txt"),
}  # fmt: skip


def format_of_path(path: str) -> str | None:
    """Return the format of a file by its extension, ignoring compression; ``None`` for an unknown extension."""
    endings = [ending.lower() for ending in PurePosixPath(path).suffixes]
    while endings and endings[-1] in COMPRESSED_ENDINGS:
        endings.pop()
    return FORMAT_OF_ENDING.get(endings[-1]) if endings else None
