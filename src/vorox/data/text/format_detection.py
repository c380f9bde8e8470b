"""Format detection: from paths to a source, with its format, text column and size.

Paths go in; an entry of ``data.sources`` comes out, with the statistics that select a model and a one-line summary.
Only listings, headers and the first MiB of text are read. An ambiguous format or column is rejected with the setting
that decides it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any, Final, cast

from vorox.core.config.file_extensions import format_of_path
from vorox.core.errors import ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.documents import Document, UnitSpan
from vorox.data.storage import StoredFile, has_magic, scheme_of
from vorox.data.text import file_signatures
from vorox.data.text.file_content import Limits, open_content
from vorox.data.text.formats import arrow, mds, read_records, split_blocks, suffixes

_SAMPLE_BYTES = 1 << 20
_SAMPLE_FILES = 64
_SAMPLED_RECORDS = 50
_TEXT_FIELDS = ("text", "content", "body", "document", "article")
_EXPANSION: Final[Mapping[str, int]] = {"gz": 3, "zst": 3, "parquet": 2}
_WORD = re.compile(r"\s?\w+|[^\w\s]+")
_PROMPT_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class DetectedSource:
    """A source detected from paths.

    Attributes:
        source: An entry of ``data.sources``.
        text_bytes: Approximate size of its text.
        repeated_words: Distinct words that occur at least twice in the first MiB: a lower bound for BPE tokens.
        opening: The first words, as a prompt for samples; empty for token shards.
        summary: What was detected and how it is read; a second line lists what is left out.
    """

    source: dict[str, Any]
    text_bytes: int
    repeated_words: int
    opening: str
    summary: str


def detect_source(paths: Sequence[str], given: Mapping[str, Any] | None = None) -> DetectedSource:
    """Detect the source that files, folders or globs form.

    Args:
        paths: Locations of the text.
        given: Settings of the user (``format``, ``text_field``, ``delimiter``), which take precedence.

    Raises:
        ConfigError: The format or the text column is ambiguous.
        DataError: Nothing is found, all files are empty, or one cannot be read.
    """
    given = given or {}
    files = [file for path in paths for file in storage.list_files(path, ("",))]
    sizes = _bytes_by_format(files)
    if not sizes and "format" not in given:
        endings = ", ".join(sorted({PurePath(file.uri).suffix or "(none)" for file in files})[:6])
        raise ConfigError(
            f"The format cannot be detected from the suffixes: {endings or 'no files'}", where=", ".join(paths),
            hint="add data.sources.0.format=txt, or jsonl, csv, parquet, arrow, mds or bin",
        )  # fmt: skip
    name = str(given.get("format") or max(sizes, key=lambda key: sizes[key]))
    chosen = [file for file in files if format_of_path(file.uri) == name] or files
    if chosen and not any(file.size_bytes for file in chosen):
        what = f"{chosen[0].uri} is" if len(chosen) == 1 else f"All {len(chosen):,} {name} files are"
        raise DataError(f"{what} empty: 0 bytes", where=", ".join(paths), hint="give a path to text")
    source: dict[str, Any] = {"name": _name(paths), "format": name, "paths": _locations(paths, name, chosen), **given}
    if name == "csv" and "delimiter" not in given:
        source["delimiter"] = _delimiter(chosen[0])
    if name not in {"txt", "bin"} and not given.keys() & {"text_field", "tokens_field"}:
        source |= _field(name, chosen[0], str(source.get("delimiter", ",")))
    has_tokens = name == "bin" or "tokens_field" in source
    sample = "" if has_tokens else _sample(source, chosen)
    return DetectedSource(
        source, _text_bytes(chosen), _repeated_words(sample), _opening(sample), _summary(source, files, chosen, sizes)
    )


def _bytes_by_format(files: Sequence[StoredFile]) -> dict[str, int]:
    """Return the bytes of each format; a single file of unknown suffix counts as txt."""
    sizes: dict[str, int] = {}
    for file in files:
        known = format_of_path(file.uri)
        if known is None and len(files) == 1:
            known = "txt"
        if known is not None:
            sizes[known] = sizes.get(known, 0) + file.size_bytes
    return sizes


def _name(paths: Sequence[str]) -> str:
    path = PurePath(paths[0].rstrip("/"))
    stem = path.name
    while PurePath(stem).suffix:
        stem = PurePath(stem).stem
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "text"


def _locations(paths: Sequence[str], name: str, chosen: Sequence[StoredFile]) -> list[str]:
    """Return the paths, with a glob per suffix for folders whose files have suffixes that the format does not list."""
    listed = suffixes(SourceConfig.model_validate({"name": "x", "format": name}))
    others = sorted({_ending(file.uri) for file in chosen if not file.uri.lower().endswith(listed)})
    locations: list[str] = []
    for path in paths:
        root = storage.canonical_uri(path)
        inside = [file for file in chosen if storage.relative_name(root, file.uri) not in {None, ""}]
        is_folder = scheme_of(path) is None and not has_magic(path) and any(
            file.uri.startswith(f"{root.rstrip('/')}/") for file in inside
        )  # fmt: skip
        if not is_folder or not others:
            locations.append(path)
            continue
        here = {_ending(file.uri) for file in inside}
        if here - set(others):
            locations.append(path)
        locations += [f"{path.rstrip('/')}/**/*{ending}" for ending in others if ending in here]
    return locations


def _ending(uri: str) -> str:
    path = PurePath(uri)
    return "".join(path.suffixes[-2:]) if path.suffix in file_signatures.SUFFIXES else path.suffix


def _delimiter(file: StoredFile) -> str:
    first = next(iter(_lines(file)), "")
    return max(",\t;|", key=first.count)


def _lines(file: StoredFile) -> Iterator[str]:
    with open_content(file, 0, _SAMPLE_BYTES // 4) as content:
        head = content.read(_SAMPLE_BYTES // 4)
    yield from head.decode("utf-8-sig", "replace").splitlines()


def _text_field(name: str, file: StoredFile, delimiter: str) -> str:
    """Return the text column: the first with a usual name, else the only one that holds text.

    Raises:
        ConfigError: The text column is ambiguous.
    """
    columns = _text_columns(name, file, delimiter)
    by_depth = sorted(columns, key=lambda column: column.count("."))  # stable
    for field in _TEXT_FIELDS:
        usual = next((column for column in by_depth if column.rpartition(".")[2] == field), None)
        if usual is not None:
            return usual
    if len(columns) == 1:
        return columns[0]
    found = f"{', '.join(columns[:8])} all hold text" if columns else "no column holds text"
    raise ConfigError(
        f"The text column is ambiguous: {found}", where=file.uri,
        hint=f"add data.sources.0.text_field={columns[0] if columns else 'COLUMN'}",
    )  # fmt: skip


def _field(name: str, file: StoredFile, delimiter: str) -> dict[str, str]:
    """Return the text column; for MDS shards without one, the only column of token ids."""
    if name == "mds":
        texts, ids = mds.columns_of(file)
        if not texts and len(ids) == 1:
            return {"tokens_field": ids[0]}
    return {"text_field": _text_field(name, file, delimiter)}


def _text_columns(name: str, file: StoredFile, delimiter: str) -> list[str]:
    if name == "mds":
        return list(mds.columns_of(file)[0])
    if name in {"parquet", "arrow"}:
        if name == "arrow":
            schema = arrow.schema_of(file, Limits())
        else:
            parquet: Any = import_module("pyarrow.parquet")  # untyped, and slow to import
            with storage.open_seekable(file) as content:
                schema = parquet.read_schema(content)
        return list(_text_leaves([(one.name, one.type) for one in schema]))
    if name == "csv":
        rows = list(itertools.islice(csv.reader(io.StringIO("\n".join(_lines(file))), delimiter=delimiter), 51))
        columns = rows[0] if rows else []
        held = {column: [row[index] for row in rows[1:] if index < len(row)] for index, column in enumerate(columns)}
        return [column for column, values in held.items() if any(re.search(r"[^\W\d_]", value) for value in values)]
    found: dict[str, None] = {}
    for line in itertools.islice((line for line in _lines(file) if line.strip()), _SAMPLED_RECORDS):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # truncated by the sample, or an error that the reader will report
        if isinstance(record, dict):
            found |= dict.fromkeys(_text_values(cast("dict[str, Any]", record)))
    return list(found)


def _text_leaves(fields: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield the text columns of an Arrow schema; ``a.b`` is field b of struct a."""
    types: Any = import_module("pyarrow.types")
    for name, kind in fields:
        if types.is_struct(kind):
            inner = [kind.field(index) for index in range(kind.num_fields)]
            yield from _text_leaves([(f"{name}.{one.name}", one.type) for one in inner])
        elif str(kind) in {"string", "large_string", "string_view"}:
            yield name


def _text_values(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a JSON object that hold text; ``a.b`` is key b of object a."""
    for key, value in record.items():
        if isinstance(value, str):
            yield prefix + key
        elif isinstance(value, dict) and not prefix:
            yield from _text_values(cast("dict[str, Any]", value), f"{key}.")


def _sample(source: Mapping[str, Any], files: Sequence[StoredFile]) -> str:
    """Return the first texts, up to a MiB."""
    config = SourceConfig.model_validate({**source, "paths": ("-",)})
    texts: list[str] = []
    left = _SAMPLE_BYTES
    for index, file in enumerate(files[:_SAMPLE_FILES]):
        block = next(split_blocks(config, file, 0, None, left), None) if file.size_bytes else None
        if block is None:
            continue
        span = UnitSpan(index, block.start_byte, block.end_byte, 0)
        for record in read_records(config, file, span, lambda _: True):
            if isinstance(record, Document):
                texts.append(record.text[:left])
                left -= len(texts[-1])
            if left <= 0:
                return "\n".join(texts)
    return "\n".join(texts)


def _repeated_words(sample: str) -> int:
    counts: dict[str, int] = {}
    for word in _WORD.findall(sample):
        counts[word] = counts.get(word, 0) + 1
    return sum(count > 1 and len(word.encode()) > 1 for word, count in counts.items())


def _opening(sample: str) -> str:
    line = next((line.strip() for line in sample.splitlines() if len(line.strip()) > 1), "")
    if len(line) <= _PROMPT_CHARACTERS:
        return line
    return line[:_PROMPT_CHARACTERS].rpartition(" ")[0] or line[:_PROMPT_CHARACTERS]


def _text_bytes(files: Sequence[StoredFile]) -> int:
    total = 0
    for file in files:
        kind = file_signatures.SUFFIXES.get(PurePath(file.uri).suffix.lower()) or PurePath(file.uri).suffix.lower()[1:]
        total += file.size_bytes * _EXPANSION.get(kind, 1)
    return total


def _summary(
    source: Mapping[str, Any], files: Sequence[StoredFile], chosen: Sequence[StoredFile], sizes: Mapping[str, int]
) -> str:
    size = sum(file.size_bytes for file in chosen)
    detail = {
        "txt": "a file is a document",
        "jsonl": f"a line is a document, its text in {source.get('text_field')!r}",
        "csv": f"a row is a document, its text in {source.get('text_field')!r}",
        "parquet": f"a row is a document, its text in {source.get('text_field')!r}",
        "arrow": f"a row is a document, its text in {source.get('text_field')!r}",
        "mds": f"a sample is a document, its ids in {source.get('tokens_field')!r}"
        if "tokens_field" in source
        else f"a sample is a document, its text in {source.get('text_field')!r}",
        "bin": "token shards",
    }[str(source["format"])]
    others = sorted(name for name in sizes if name != source["format"])
    read = {file.uri for file in chosen}
    left_out = [file.uri for file in files if file.uri not in read]
    unknown = sorted({PurePath(uri).suffix or "no suffix" for uri in left_out if format_of_path(uri) is None})
    instead = f"; data.sources.0.format={others[0]} reads {others[0]} instead" if others else ""
    kinds = ", ".join([*others, *unknown[:3]])
    rest = f"\n  left out: {pluralize(len(left_out), 'file')} ({kinds}){instead}" if left_out else ""
    return (
        f"Data {source['name']}: {source['format']}, {pluralize(len(chosen), 'file')}, {size:,} bytes, {detail}{rest}"
    )


def text_path_error(path: str) -> ConfigError | None:
    """Return the error for a path to text given instead of a configuration; ``None`` for any other path."""
    try:
        files = storage.list_files(path, ("",))
    except DataError:
        return None
    known = {format_of_path(file.uri) for file in files} - {None}
    if not known:
        return None
    return ConfigError(
        f"{path} is text to train on, not a configuration", where=path, hint=f"run vorox train --data {path}"
    )
