"""Documents that a command names as ``FILE:RECORD``, such as ``web/part-3.jsonl:17``, as a plan's events name them."""

from __future__ import annotations

from collections.abc import Iterable

from vorox.core.errors import ConfigError
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.queries import files_named
from vorox.data.provenance.run_data_index import RunDataIndex


def named_documents(run_data: RunDataIndex, names: Iterable[str], where: str) -> dict[str, tuple[MaskedDocument, ...]]:
    """Return the documents of a run that names stand for: of each name, one in every source that reads its file.

    Args:
        run_data: The run.
        names: ``FILE:RECORD`` each: a file as ``vorox data where`` shows it, or the end of its name, and the index of
            the record in it, from 0.
        where: The option, for errors.

    Raises:
        ConfigError: A name has no record, no file or several match, or a source has no such record.
        DataError: A chunk is missing or damaged.
    """
    found = dict[str, tuple[MaskedDocument, ...]]()
    for name in names:
        file, _, record = name.rpartition(":")
        if not file or not (record.isascii() and record.isdecimal()):
            raise ConfigError(
                f"{name} names no document", where=where,
                hint="write FILE:RECORD, as text.jsonl:17; `vorox data where RUN --step N` shows both",
            )  # fmt: skip
        documents = {
            MaskedDocument(
                run_data.plan.sources[index].configured_name, reader.files[number].version, int(record)
            ): None
            for index, number in files_named(run_data, file, where)
            for reader in [run_data.readers[index]]
            if len(reader.rows_of_document(number, ordinal=int(record)))
        }
        found[name] = tuple(documents)
        if not documents:
            raise ConfigError(
                f"The run reads no record {int(record):,} of {file}", where=where,
                hint="records count from 0; one may have been filtered out, or be in the validation set: "
                "`vorox data where RUN --step N` shows those of a step",
            )  # fmt: skip
    return found
