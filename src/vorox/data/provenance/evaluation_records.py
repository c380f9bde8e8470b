"""Read the records of an evaluation set, in any format of a source, and encode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.provenance.contamination import EvaluationRecord
from vorox.data.text.format_detection import detect_source
from vorox.data.text.formats import read_records, split_blocks, suffixes
from vorox.data.tokenizers.tokenizer import Tokenizer

_BLOCK_BYTES = 1 << 24


def read_evaluation_records(
    paths: Sequence[str], tokenizer: Tokenizer, *, text_field: str | None = None
) -> list[EvaluationRecord]:
    """Return every record of some files, in file order.

    Args:
        paths: Files, folders, globs or URLs.
        tokenizer: The run's tokenizer.
        text_field: Column of the text; ``None`` detects it.

    Raises:
        ConfigError: The format or the text column is ambiguous, or the files hold token ids.
        DataError: A file is missing, empty or unreadable, or a record is malformed.
    """
    found = detect_source(paths, {} if text_field is None else {"text_field": text_field})
    if found.source["format"] == "bin" or "tokens_field" in found.source:
        raise ConfigError(
            "The evaluation set holds token ids, whose tokenizer is unknown", where=", ".join(paths),
            hint="give text: txt, jsonl, csv, parquet or arrow",
        )  # fmt: skip
    records = list(_documents(SourceConfig.model_validate(found.source)))
    ids = tokenizer.encode_batch([document.text for _, document in records])
    return [
        EvaluationRecord(uri, document.ordinal, np.asarray(tokens, np.int64))
        for (uri, document), tokens in zip(records, ids, strict=True)
    ]


def _documents(source: SourceConfig) -> Iterator[tuple[str, Document]]:
    files = [file for path in source.paths for file in storage.list_files(path, suffixes(source))]
    for index, file in enumerate(files):
        if not file.size_bytes:
            continue
        for block in split_blocks(source, file, 0, None, _BLOCK_BYTES):
            span = UnitSpan(index, block.start_byte, block.end_byte, block.first_ordinal)
            for record in read_records(source, file, span, lambda _: True):
                if isinstance(record, BadRecord):
                    raise DataError(
                        f"Record {record.ordinal:,} is malformed: {record.reason}", where=file.uri,
                        hint="correct or remove it",
                    )  # fmt: skip
                if isinstance(record, Document):
                    yield file.uri, record
