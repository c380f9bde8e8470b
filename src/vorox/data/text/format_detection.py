"""Format detection: from paths to a source, with its format, text column and size.

Paths go in; an entry of ``data.sources`` comes out, with the statistics that select a model and a one-line summary.
Only listings, headers and the first MiB of text are read. An ambiguous format or column is rejected with the setting
that decides it.
"""

from __future__ import annotations

import contextlib
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
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import COMPRESSED_SUFFIXES, open_content
from vorox.data.text.formats import arrow, mds, read_records, split_blocks, suffixes

_SAMPLE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 128 << 20
_SAMPLE_FILES = 64
_SAMPLED_RECORDS = 50
_TEXT_FIELDS = ("text", "content", "body", "document", "article")
_MESSAGE_FIELDS = ("messages", "conversations", "conversation")
_ANSWERED_FIELDS = (
    ("instruction", "input", "output"), ("instruction", "output"), ("instruction", "response"),
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"),
)  # fmt: skip
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
    given = dict(given or {})
    if isinstance(fields := given.get("chat_fields"), str):  # as on the command line
        given["chat_fields"] = [field.strip(" '\"") for field in fields.strip(" []").split(",")]
    files = [file for path in paths for file in storage.list_files(path, ("",))]
    if not files:
        raise DataError("The folder contains no files", where=", ".join(paths), hint="give a path to text")
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
    if name not in {"txt", "bin"} and not given.keys() & {"text_field", "tokens_field", "chat_fields"}:
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
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED_SUFFIXES else path.suffix


def _delimiter(file: StoredFile) -> str:
    first = next(iter(_lines(file)), "")
    return max(",\t;|", key=first.count)


def _lines(file: StoredFile) -> Iterator[str]:
    """Yield the first lines of a file; the first one whole, if it is not extremely long."""
    head, end_byte = b"", 0
    while len(head) == end_byte < _LONGEST_LINE_BYTES and b"\n" not in head:
        end_byte = min(max(2 * end_byte, _SAMPLE_BYTES // 4), _LONGEST_LINE_BYTES)
        with open_content(file, len(head), end_byte) as content:
            head += content.read(end_byte - len(head))
    yield from head.decode("utf-8-sig", "replace").splitlines()


def _only_text_field(columns: Sequence[str], file: StoredFile) -> str:
    """Return the text column: the only one that holds text.

    Raises:
        ConfigError: The text column is ambiguous.
    """
    if len(columns) == 1:
        return columns[0]
    found = f"The text column is ambiguous: {', '.join(columns[:8])} hold text"
    raise ConfigError(
        found if columns else "No column holds text", where=file.uri,
        hint=f"add data.sources.0.text_field={columns[0] if columns else 'COLUMN'}",
    )  # fmt: skip


def _field(name: str, file: StoredFile, delimiter: str) -> dict[str, Any]:
    """Return the columns to read: preference pairs, else text under a usual name, else a conversation, else the only
    text.

    For MDS shards without text, it is the only column of token ids.
    """
    if name == "mds":
        texts, ids = mds.columns_of(file)
        if not texts and len(ids) == 1:
            return {"tokens_field": ids[0]}
    columns, lists = _text_columns(name, file, delimiter), _list_columns(name, file)
    for kind in (columns, lists):
        if {"chosen", "rejected"} <= set(kind):
            prompt = ["prompt"] if "prompt" in kind else []
            return {"chat_fields": [*prompt, "chosen", "rejected"], "preference_pairs": True}
    by_depth = sorted(columns, key=lambda column: column.count("."))  # stable
    for field in _TEXT_FIELDS:
        usual = next((column for column in by_depth if column.rpartition(".")[2] == field), None)
        if usual is not None:
            return {"text_field": usual}
    chat_fields = _chat_fields(name, lists, columns)
    return {"chat_fields": list(chat_fields)} if chat_fields else {"text_field": _only_text_field(columns, file)}


def _list_columns(name: str, file: StoredFile) -> list[str]:
    """Return the columns that hold lists."""
    if name in {"parquet", "arrow"}:
        return [one.name for one in _schema(name, file) if str(one.type).startswith(("list<", "large_list<"))]
    records: Iterable[dict[str, Any]] = _sampled_records(file) if name == "jsonl" else ()
    return [key for record in records for key, value in record.items() if isinstance(value, list)]


def _chat_fields(name: str, lists: Sequence[str], text_columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a conversation: a list of messages, or prompts with answers; empty if there are none."""
    found = next(((field,) for field in _MESSAGE_FIELDS if field in lists), ())
    if found or name == "mds":
        return found
    return next((fields for fields in _ANSWERED_FIELDS if set(fields) <= set(text_columns)), ())


def _schema(name: str, file: StoredFile) -> Any:
    if name == "arrow":
        return arrow.schema_of(file, Limits())
    parquet: Any = import_module("pyarrow.parquet")  # untyped, and slow to import
    with storage.open_seekable(file) as content:
        return parquet.read_schema(content)


def _text_columns(name: str, file: StoredFile, delimiter: str) -> list[str]:
    if name == "mds":
        return list(mds.columns_of(file)[0])
    if name in {"parquet", "arrow"}:
        return list(_text_leaves([(one.name, one.type) for one in _schema(name, file)]))
    if name == "csv":
        rows = list(itertools.islice(csv.reader(io.StringIO("\n".join(_lines(file))), delimiter=delimiter), 51))
        columns = rows[0] if rows else []
        held = {column: [row[index] for row in rows[1:] if index < len(row)] for index, column in enumerate(columns)}
        return [column for column, values in held.items() if any(re.search(r"[^\W\d_]", value) for value in values)]
    return list(dict.fromkeys(key for record in _sampled_records(file) for key in _text_values(record)))


def _sampled_records(file: StoredFile) -> Iterator[dict[str, Any]]:
    """Yield the first JSON objects of a file."""
    for line in itertools.islice((line for line in _lines(file) if line.strip()), _SAMPLED_RECORDS):
        with contextlib.suppress(ValueError):  # truncated by the sample, or an error that the reader will report
            record = json.loads(line)
            if isinstance(record, dict):
                yield cast("dict[str, Any]", record)


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
        kind = COMPRESSED_SUFFIXES.get(PurePath(file.uri).suffix.lower()) or PurePath(file.uri).suffix.lower()[1:]
        total += file.size_bytes * _EXPANSION.get(kind, 1)
    return total


def _summary(
    source: Mapping[str, Any], files: Sequence[StoredFile], chosen: Sequence[StoredFile], sizes: Mapping[str, int]
) -> str:
    size = sum(file.size_bytes for file in chosen)
    name = str(source["format"])
    record = {"jsonl": "line", "mds": "sample"}.get(name, "row")
    if "chat_fields" in source:
        columns = ", ".join(map(repr, source["chat_fields"]))
        what = f"a {record} is a conversation in {columns}, trained on its answers"
        if source.get("preference_pairs"):
            what = f"a {record} is a preference pair in {columns}"
    elif name in {"txt", "bin"}:
        what = {"txt": "a file is a document", "bin": "token shards"}[name]
    elif "tokens_field" in source:
        what = f"a sample is a document, its ids in {source.get('tokens_field')!r}"
    else:
        what = f"a {record} is a document, its text in {source.get('text_field')!r}"
    others = sorted(name for name in sizes if name != source["format"])
    read = {file.uri for file in chosen}
    left_out = [file.uri for file in files if file.uri not in read]
    unknown = sorted({PurePath(uri).suffix or "no suffix" for uri in left_out if format_of_path(uri) is None})
    instead = f"; data.sources.0.format={others[0]} reads {others[0]} instead" if others else ""
    kinds = ", ".join([*others, *unknown[:3]])
    rest = f"\n  left out: {pluralize(len(left_out), 'file')} ({kinds}){instead}" if left_out else ""
    return f"Data {source['name']}: {source['format']}, {pluralize(len(chosen), 'file')}, {size:,} bytes, {what}{rest}"


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
