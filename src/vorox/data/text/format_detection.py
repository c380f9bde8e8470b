"""Format detection: from paths to a source, with its format, text column and size.

Paths go in; an entry of ``data.sources`` comes out, with the statistics that select a model and a one-line summary.
Only listings and the first records are read, by the readers that a build uses. An ambiguous format or column is
rejected with the setting that decides it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.source_formats import (
    COMPRESSIONS,
    EXPANSION,
    FORMATS,
    format_of_path,
    formats_that,
    source_format,
)
from vorox.data import storage
from vorox.data.documents import Document, UnitSpan
from vorox.data.storage import StoredFile, scheme_of
from vorox.data.text.column_detection import detect_columns
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import compressed_copies, limits_of, open_content
from vorox.data.text.formats import mds, read_records, split_blocks, suffixes
from vorox.data.text.formats.record_blocks import BYTE_ORDER_MARK
from vorox.data.text.hub_datasets import cloned_files
from vorox.data.text.record_sample import check_columns, first_records, further_files
from vorox.data.text.shard_index import list_indexed_files
from vorox.data.text.split_names import other_splits, refuse_several

_SAMPLE_BYTES = 1 << 20
_HEAD_BYTES = 1 << 18
_SAMPLE_FILES = 64
_SHOWN_COLUMNS = 24
_FURTHER: Final[Mapping[str, str]] = {
    "system_field": "system message", "history_field": "earlier turns", "tools_field": "tools",
}  # fmt: skip
_ALIKE: Final = ("format", "delimiter", "tokens_field", "chat_fields", "preference_pairs", "text_field")
"""Settings that paths of one source share."""
_DELIMITERS = ",\t;|"
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
        ConfigError: The format or the columns are ambiguous or not understood, or differ between the paths.
        DataError: Nothing is found, all files are empty, or one cannot be read.
    """
    given = dict(given or {})
    for setting in ("chat_fields", "ignored_fields", "metadata_fields"):
        if isinstance(fields := given.get(setting), str):  # as on the command line
            given[setting] = [field.strip(" '\"") for field in fields.strip(" []").split(",")]
    locations = {path: cloned_files(path) for path in paths}
    listed = {
        path: [file for location in locations[path] for file in storage.list_files(location, ("",))] for path in paths
    }
    files = list({file.uri: file for path in paths for file in listed[path]}.values())
    filled_paths = [path for path in listed if any(file.size_bytes for file in listed[path])]
    if len(filled_paths) > 1:
        _check_alike({path: detect_source([path], given) for path in filled_paths})
    if not files:
        raise DataError("The folder contains no files", where=", ".join(paths), hint="give a path to text")
    sizes = _bytes_by_format(files)
    if not sizes and "format" not in given:
        endings = ", ".join(sorted({PurePath(file.uri).suffix or "(none)" for file in files})[:6])
        raise ConfigError(
            f"The format cannot be detected from the suffixes: {endings or 'no files'}", where=", ".join(paths),
            hint=f"add data.sources.0.format={', or '.join(('txt', ', '.join(formats_that('endings')[2:])))}",
        )  # fmt: skip
    name = str(given.get("format") or max(sizes, key=lambda key: sizes[key]))
    named = {file.uri for path in paths if not _is_folder(path, listed[path]) for file in listed[path]}
    chosen = [file for file in files if format_of_path(file.uri) == name] or files
    if "format" in given:
        chosen = [file for file in files if file.uri in named or file in chosen]
    else:
        _check_named([file for file in files if file.uri in named and file not in chosen], chosen, name)
    if source_format(name).index_name:  # not the cache files of map and filter
        form = SourceConfig.model_validate({"name": "x", "format": name})
        named |= {file.uri for path in paths for file in list_indexed_files(form, path, suffixes(form))}
        chosen = [file for file in chosen if file.uri in named]
    kept = {file.uri for file in chosen}
    found = {path: [file.uri for file in listed[path] if file.uri in kept] for path in paths}
    for path in paths:
        if locations[path] == (path,):
            refuse_several(path, found[path])
    others = other_splits(found, folders_are_splits=bool(source_format(name).index_name))
    copies = compressed_copies(kept).keys() - {storage.canonical_uri(path) for path in paths}
    files, chosen = ([file for file in some if file.uri not in others] for some in (files, chosen))
    chosen = [file for file in chosen if file.uri not in copies]
    filled = next((file for file in chosen if file.size_bytes), None)
    if filled is None:
        what = f"{chosen[0].uri} is" if len(chosen) == 1 else f"All {len(chosen):,} {name} files are"
        raise DataError(f"{what} empty: 0 bytes", where=", ".join(paths), hint="give a path to text")
    settings = {"name": _name(paths), "format": name, **given}
    if "format" not in given:
        settings["format"] = _format_of_content(filled, name, limits_of(_draft(settings)))
    settings["paths"] = _locations(paths, settings["format"], chosen)
    source = {key: settings[key] for key in ("name", "format", "paths", *given)}
    unread: tuple[str, ...] = ()
    if source_format(source["format"]).has_fields:
        source, unread = _with_columns(source, filled, [file for file in chosen if file != filled])
    sample = "" if _draft(source).has_tokens else _sample(source, chosen)
    return DetectedSource(
        source, _text_bytes(chosen), _repeated_words(sample), _opening(sample),
        _summary(source, files, chosen, sizes, unread),
    )  # fmt: skip


def _is_folder(path: str, files: Sequence[StoredFile]) -> bool:
    """Whether a path is a folder, of which the files of one format are read; of a file or a glob, all are read."""
    root = storage.canonical_uri(path).rstrip("/")
    return scheme_of(path) == "hf" or any(file.uri.startswith(f"{root}/") for file in files)


def _check_named(others: Sequence[StoredFile], chosen: Sequence[StoredFile], name: str) -> None:
    """Refuse files of a glob that would be read in the format of the others.

    Raises:
        ConfigError: There are some.
    """
    if not others:
        return
    of_format = format_of_path(others[0].uri)
    what = "has a suffix of no known format" if of_format is None else f"is {of_format}"
    raise ConfigError(
        f"The glob matches files of several formats: {pluralize(len(chosen), 'file')} of {name}, and {others[0].uri} "
        f"{what}",
        where=others[0].uri,
        hint=f"write a glob for one format (*{_ending(chosen[0].uri)}), or add data.sources.0.format={name} to read "
        f"all files as {name}",
    )  # fmt: skip


def _check_alike(found: Mapping[str, DetectedSource]) -> None:
    """Check that paths form one source: each, detected by itself, has the same format and columns.

    Raises:
        ConfigError: They differ.
    """
    (first_path, first), *others = found.items()
    for path, other in others:
        differing = next((key for key in _ALIKE if first.source.get(key) != other.source.get(key)), None)
        if differing is None:
            continue
        values = [source.source.get(differing, "none") for source in (first, other)]
        shown = [", ".join(cast("list[str]", value)) if isinstance(value, list) else repr(value) for value in values]
        sources = json.dumps(_of_own([source.source for source in found.values()]), ensure_ascii=False)
        raise ConfigError(
            f"{first_path} and {path} differ in {differing}: {shown[0]} and {shown[1]}; they cannot be one source",
            where=path,
            hint=f"give one of them, or a source to each: --data {shlex.quote(first_path)} "
            f"{shlex.quote(f'data.sources={sources}')} (sampled in equal shares, unless you set their weights)",
        )  # fmt: skip


def _of_own(sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources under names that differ."""
    names: dict[str, int] = {}
    result: list[dict[str, Any]] = []
    for source in sources:
        name = str(source["name"])
        names[name] = names.get(name, 0) + 1
        result.append({**source, "name": name if names[name] == 1 else f"{name}-{names[name]}"})
    return result


def _bytes_by_format(files: Sequence[StoredFile]) -> dict[str, int]:
    """Return the bytes of each format by suffix; a single file of unknown suffix counts as txt.

    JSON files beside others describe them.
    """
    sizes: dict[str, int] = {}
    for file in files:
        known = format_of_path(file.uri)
        if known is None and len(files) == 1:
            known = "txt"
        if known is not None:
            sizes[known] = sizes.get(known, 0) + file.size_bytes
    return {name: size for name, size in sizes.items() if name != "json" or len(sizes) == 1}


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
        root = storage.canonical_uri(path).rstrip("/")
        inside = [file for file in chosen if file.uri.startswith(f"{root}/") and scheme_of(path) != "hf"]
        if not inside or not others:
            locations.append(path)
            continue
        here = {_ending(file.uri) for file in inside}
        if here - set(others):
            locations.append(path)
        locations += [f"{storage.escape_glob(path.rstrip('/'))}/**/*{ending}" for ending in others if ending in here]
    return locations


def _ending(uri: str) -> str:
    path = PurePath(uri)
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSIONS else path.suffix


def _with_columns(
    source: dict[str, Any], file: StoredFile, others: Sequence[StoredFile]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the source with the meaning of its columns, from the first records as its reader yields them.

    Args:
        source: The source so far.
        file: The file whose first records decide, and are named in errors.
        others: Further files; a column that only some of them have counts too.

    Returns:
        The source, and the columns that are not read.

    Raises:
        ConfigError: The columns are not understood, or no record can be read.
    """
    if source["format"] == "csv" and "delimiter" not in source:
        source = {**source, "delimiter": _delimiter(source, file)}
        names = _columns_of(source, file)
        if len(names) == 1 and (set(names[0]) & set(_DELIMITERS) or names[0].startswith("#")):
            raise ConfigError(
                f"The first line, {names[0]!r}, does not divide the rows into columns: it is no header, or many rows "
                "have another number of columns",
                where=file.uri,
                hint="write the header as its first line, or set data.sources.0.delimiter to see which rows do not fit",
            )  # fmt: skip
    rows, bad = first_records(_draft(source), file)
    if source["format"] == "mds" and "tokens_field" not in source:
        ids = mds.token_columns(file)
        if len(ids) == 1 and not any(isinstance(value, str) for row in rows for value in row.values()):
            return {**source, "tokens_field": ids[0]}, ()
    if "tokens_field" in source:
        return source, ()
    if not rows and bad:
        place = file.uri + (f":{bad[0].line}" if bad[0].line is not None else f", byte {bad[0].byte_offset:,}")
        raise DataError(
            f"No record can be read: {bad[0].reason}", where=place,
            hint="correct the file, or set data.sources.0.format (and data.sources.0.encoding) to what it is",
        )  # fmt: skip
    for other in further_files(others):
        rows += first_records(_draft(source), other)[0]
    found = detect_columns(rows, file.uri, source)
    if any(key.endswith(("_field", "_fields")) for key in source):
        check_columns(_draft({**source, **found.settings}), [file, *others], "data.sources.0")
    return {**source, **found.settings}, found.unread


def _draft(source: Mapping[str, Any]) -> SourceConfig:
    return SourceConfig.model_validate({**source, "paths": ("-",)})


def _columns_of(source: Mapping[str, Any], file: StoredFile) -> list[str]:
    """Return the columns of a csv file."""
    rows, _ = first_records(_draft(source), file)
    return list(rows[0]) if rows else []


def _delimiter(source: Mapping[str, Any], file: StoredFile) -> str:
    """Return the delimiter that divides the header and every first record into the most columns."""
    counts: dict[str, int] = {}
    for delimiter in _DELIMITERS:
        try:
            rows, bad = first_records(_draft({**source, "delimiter": delimiter}), file)
        except DataError:
            continue
        counts[delimiter] = len(rows[0]) if len(rows) > 9 * len(bad) and rows else 0
    return max(_DELIMITERS, key=lambda delimiter: counts.get(delimiter, 0))


def _format_of_content(file: StoredFile, name: str, limits: Limits) -> str:
    """Return the format of a file; its content decides where its name leaves it open.

    Raises:
        ConfigError: It is one JSON object.
    """
    is_named = format_of_path(file.uri) is not None
    if name not in {"json", "jsonl"} and is_named:
        return name
    with open_content(file, 0, None, limits) as reader:
        head = reader.read(_HEAD_BYTES)
    if not is_named:
        magic = next((name for name, form in FORMATS.items() if form.magic and head.startswith(form.magic)), None)
        first = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
        if magic is not None or first not in {b"{", b"["}:
            return magic or name
    try:
        return _json_format(file, head)
    except ConfigError:
        if name == "json":
            raise
        return name


def _json_format(file: StoredFile, head: bytes) -> str:
    """Return ``json`` for an array of records, ``jsonl`` for lines, from the start of a file.

    Raises:
        ConfigError: It is neither.
    """
    head = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if head.startswith(b"["):
        return "json"
    first, newline, _ = head.partition(b"\n")
    if not newline and len(head) > _HEAD_BYTES // 2:
        return "jsonl"  # a long first line
    try:
        whole = json.loads(first)
    except (ValueError, RecursionError):
        whole = None
    fields = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    if isinstance(whole, dict) and (newline or not (_is_column(fields) or any(map(_holds_records, fields.values())))):
        return "jsonl"
    if newline and first.rstrip().endswith((b"},", b"}")) and len(first) > 2:
        return "jsonl"  # lines with a mistake in them, which the reader names
    raise ConfigError(
        "The file is one JSON object, not an array of records or JSON Lines", where=file.uri,
        hint="write one record per line: jq -c '.KEY[]' FILE > FILE.jsonl for a list inside it; in pandas, "
        "to_json(orient='records', lines=True)",
    )  # fmt: skip


def _holds_records(value: object) -> bool:
    """Whether a value of an object holds many records: a list of objects or rows, or a column of pandas."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    is_list = bool(items) and (
        all(isinstance(one, dict) for one in items) or all(isinstance(one, list) for one in items)
    )
    return is_list or (isinstance(value, dict) and _is_column(cast("dict[str, object]", value)))


def _is_column(value: Mapping[str, object]) -> bool:
    """Whether an object has the numbers of rows for keys, as pandas writes columns and, under orient=index, rows."""
    return bool(value) and list(value) == [str(number) for number in range(len(value))]


def _sample(source: Mapping[str, Any], files: Sequence[StoredFile]) -> str:
    """Return the first texts, up to a MiB."""
    config = _draft(source)
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
        is_compressed = PurePath(file.uri).suffix.lower() in COMPRESSIONS
        form = source_format(format_of_path(file.uri) or "")
        total += file.size_bytes * (EXPANSION if is_compressed else form.expansion)
    return total


def _summary(
    source: Mapping[str, Any],
    files: Sequence[StoredFile],
    chosen: Sequence[StoredFile],
    sizes: Mapping[str, int],
    unread: Sequence[str],
) -> str:
    size = sum(file.size_bytes for file in chosen)
    form = source_format(str(source["format"]))
    record = f"{'an' if form.record == 'element' else 'a'} {form.record or 'file'}"
    if "chat_fields" in source:
        columns = ", ".join(map(repr, source["chat_fields"]))
        what = f"{record} is a conversation in {columns}, trained on its answers"
        if source.get("preference_pairs"):
            what = f"{record} is a preference pair in {columns}"
        further = [f"its {kind} in {source[key]!r}" for key, kind in _FURTHER.items() if source.get(key)]
        what = ", ".join([what, *further]) + ("; a false label leaves it out" if source.get("label_field") else "")
    elif "tokens_field" in source:
        what = f"{record} is a document, its ids in {source['tokens_field']!r}"
    elif form.has_fields:
        what = f"{record} is a document, its text in {source.get('text_field')!r}"
    else:
        what = "token shards" if form.has_tokens else f"{record} is a document"
    if unread:
        more = f" and {len(unread) - _SHOWN_COLUMNS} more" if len(unread) > _SHOWN_COLUMNS else ""
        what += f"; not read: {', '.join(map(repr, unread[:_SHOWN_COLUMNS]))}{more}"
    by_name = {format_of_path(file.uri) for file in chosen}
    others = sorted(name for name in sizes if name != source["format"] and name not in by_name)
    read = {file.uri for file in chosen}
    left_out = [file.uri for file in files if file.uri not in read]
    kinds = sorted({_kind(uri, sizes) for uri in left_out}, key=lambda kind: (kind[:1] == ".", kind))
    instead = f"; data.sources.0.format={others[0]} reads {others[0]} instead" if others else ""
    shown = ", ".join(kinds[: len(others) + 3])
    rest = f"\n  left out: {pluralize(len(left_out), 'file')} ({shown}){instead}" if left_out else ""
    return f"Data {source['name']}: {source['format']}, {pluralize(len(chosen), 'file')}, {size:,} bytes, {what}{rest}"


def _kind(uri: str, sizes: Mapping[str, int]) -> str:
    """Return the format of a file, or its suffix where that says more: ``.md`` of a README."""
    form, path = format_of_path(uri), PurePath(uri)
    bare = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if form is not None and form in sizes and bare.suffix == f".{form}":
        return form
    return bare.suffix or "no suffix"


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
