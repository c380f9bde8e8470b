"""Write the training data of a checkpoint as Croissant 1.0 (http://mlcommons.org/croissant/1.0).

In: a passport. Out: JSON-LD, built by the package ``mlcroissant``: every file that was read as a ``FileObject``, and
what was counted as two record sets with inline data, one of sources and one of files.
"""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from vorox.core.files.atomic import pretty_json
from vorox.training.passport.description import Passport, library

_SOURCE_FIELDS = {
    "name": "Text", "tokens": "Integer", "distinct_tokens": "Integer", "documents": "Integer", "rows": "Integer",
    "epochs": "Float", "share": "Float", "licence": "Text", "kind": "Text", "acquired": "Text", "description": "Text",
    "files_sha256": "Text", "content_sha256": "Text",
}  # fmt: skip
_FILE_FIELDS = {"source": "Text", "uri": "Text", "version": "Text", "documents": "Integer", "tokens": "Integer"}
NOT_RECORDED = "not recorded"
"""A text that neither the run nor the facts know; every record of a set has all fields."""


def croissant(passport: Passport) -> bytes:
    """Return the description of the data."""
    mlc = library("mlcroissant")
    record = passport.record
    files = [(index, source, file) for index, source in enumerate(record["sources"]) for file in source["files"]]
    has_hashes = all(_sha256(file) for _, _, file in files)
    context = mlc.Context(is_live_dataset=None if has_hashes else True)
    licences = list(dict.fromkeys(source["licence"] for source in record["sources"] if source["licence"]))
    metadata = mlc.Metadata(
        ctx=context,
        name=f"Training data of {passport.name}",
        description=_description(passport, has_hashes=has_hashes),
        license=licences or None,
        in_language=list(record["general"]["languages"]) or None,
        distribution=[_file(mlc, context, number, *one) for number, one in enumerate(files)],
        record_sets=[
            _record_set(mlc, context, "sources", _SOURCE_FIELDS, record["sources"]),
            _record_set(
                mlc, context, "files", _FILE_FIELDS, [file | {"source": source["name"]} for _, source, file in files]
            ),
        ],
    )
    return pretty_json(metadata.to_json())


def _description(passport: Passport, *, has_hashes: bool) -> str:
    general = passport.record["general"]
    text = (
        f"The documents that run {passport.run_id} trained on up to step {passport.step:,}: {general['tokens']:,} "
        f"tokens with repetitions, {general['distinct_tokens']:,} distinct ones, {general['documents']:,} documents. "
        "Counted from the data plan and the rows, without padding."
    )
    return text if has_hashes else f"{text} Files without a SHA-256 on record are named with their version."


def _sha256(file: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 of a file, which is the version of local ones; another store pins content by its own."""
    return file["version"] if re.fullmatch(r"[0-9a-f]{64}", file["version"]) else None


def _file(mlc: Any, context: Any, number: int, index: int, source: Mapping[str, Any], file: Mapping[str, Any]) -> Any:
    uri: str = file["uri"]
    return mlc.FileObject(
        ctx=context,
        id=f"file-{number}",
        name=PurePosixPath(uri).name or uri,
        description=f"Of source {source['name']} (number {index}); version {file['version']}",
        content_url=f"file://{quote(os.fsencode(uri))}" if uri.startswith("/") else uri,
        content_size=f"{file['size_bytes']} B",
        encoding_formats=[mimetypes.guess_type(uri)[0] or "application/octet-stream"],
        sha256=_sha256(file),
    )


def _record_set(mlc: Any, context: Any, name: str, fields: Mapping[str, str], records: list[Mapping[str, Any]]) -> Any:
    return mlc.RecordSet(
        ctx=context,
        id=name,
        name=name,
        fields=[
            mlc.Field(ctx=context, id=f"{name}/{key}", name=key, data_types=[getattr(mlc.DataType, kind.upper())])
            for key, kind in fields.items()
        ],
        data=[dict(_values(name, fields, record)) for record in records] or None,
    )


def _values(name: str, fields: Mapping[str, str], record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in fields:
        yield f"{name}/{key}", NOT_RECORDED if record[key] is None else record[key]
