"""Named sources: which files they are, how the files are cut into units of work, and what a unit reads.

A ``SourceConfig`` goes in; ``list_source`` fixes its files (sorted, each content once, pinned by SHA-256),
``cut_units`` divides them before any work is done, ``read_unit`` yields documents and bad records. Invariant: the
list, the units and the records are functions of the configuration and of the files' content alone, so that the same
files give the same rows on every machine and however often a build was interrupted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from vorox.core.atomic import canonical_json
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data import storage
from vorox.data.documents import BadRecord, Document, SourceFile, Unit, UnitSpan
from vorox.data.storage import STANDARD_LIBRARY, ContentVersions, StoredFile, root_of
from vorox.data.text.formats import (
    SUFFIXES,
    boundary_after,
    boundary_before,
    count_records,
    cut,
    read_records,
    records_are_lines,
)
from vorox.data.text.splits import Split, document_filter, file_split, tail_start

_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
_FOREIGN_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "_bundled"})
_BUILD_SPECIFIC_FILES = frozenset({"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"})
_BUILD_SPECIFIC_PREFIXES = ("_sysconfigdata", "config-")

ListingProgress = Callable[[int, int], None]
"""Called with (bytes identified, bytes to identify)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source with its files fixed.

    Attributes:
        config: What was asked for.
        key: Where that stands in the configuration, for messages: ``data.sources.0``.
        stored: The files as listed; reads refuse any other state of them.
        files: The same files by content.
        places: Their names relative to the location they were found under: what the held-out split goes by.
        end_bytes: How much of each file belongs to the source: all of it, except where ``max_bytes`` ends.
    """

    config: SourceConfig
    key: str
    stored: tuple[StoredFile, ...]
    files: tuple[SourceFile, ...]
    places: tuple[str, ...]
    end_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.end_bytes)

    @property
    def definition(self) -> dict[str, str]:
        """What makes documents of the files' bytes."""
        lines = {"text_field": self.config.text_field} if records_are_lines(self.config) else {}
        return {"format": self.config.format, **lines}

    @property
    def digest(self) -> str:
        """SHA-256 over the places and the content of the files and over how much of them is used.

        A folder that moves as a whole keeps it.
        """
        content = [
            [place, file.version, end]
            for place, file, end in zip(self.places, self.files, self.end_bytes, strict=True)
        ]  # fmt: skip
        return hashlib.sha256(canonical_json(content)).hexdigest()


def list_source(
    config: SourceConfig,
    *,
    key: str = "data.sources",
    versions: ContentVersions | None = None,
    on_progress: ListingProgress | None = None,
) -> Source:
    """Fix the files of a source: sorted by uri, without empty ones, the first of each content, up to ``max_bytes``.

    Args:
        config: The source.
        key: Its place in the configuration, for messages.
        versions: Memory of content hashes, so that unchanged files are not read.
        on_progress: Told while files are hashed.

    Raises:
        ConfigError: The section contradicts itself.
        DataError: A location is missing, unreadable or holds nothing.
    """
    _check(config, key)
    versions = versions or ContentVersions()
    candidates = [file for file in _candidates(config) if file.size_bytes > 0]
    limit = config.max_bytes if config.max_bytes is not None else sum(file.size_bytes for file in candidates)
    chosen: list[tuple[StoredFile, SourceFile, int]] = []
    seen: set[str] = set()
    used = identified = 0
    for file in candidates:
        version = versions.version(file)
        identified += file.size_bytes
        if on_progress is not None:
            on_progress(min(identified, limit), limit)
        if version in seen:
            continue
        seen.add(version)
        end = file.size_bytes
        if used + end > limit:
            end = boundary_before(config, file, limit - used, 0) or 0
        if end:
            chosen.append((file, SourceFile(file.uri, file.size_bytes, version), end))
        used += end
        if end < file.size_bytes or used == limit:
            break
    versions.save()
    if not chosen:
        raise _empty(config, key, candidates)
    return Source(
        config=config,
        key=key,
        stored=tuple(stored for stored, _, _ in chosen),
        files=tuple(file for _, file, _ in chosen),
        places=tuple(_place(config, stored.uri) for stored, _, _ in chosen),
        end_bytes=tuple(end for _, _, end in chosen),
    )


def list_files(source: SourceConfig) -> tuple[SourceFile, ...]:
    """The files of a source by content: sorted, deduplicated, up to ``max_bytes``."""
    return list_source(source).files


def _check(config: SourceConfig, key: str) -> None:
    if config.format == "python_stdlib" and config.paths:
        raise ConfigError(
            "format python_stdlib takes its files from this Python and has no paths", where=f"{key}.paths",
            hint="leave paths away, or say format: txt to read other folders",
        )  # fmt: skip
    if config.format != "python_stdlib" and not config.paths:
        raise ConfigError(
            f"format {config.format} needs at least one path", where=f"{key}.paths",
            hint="give files, folders or globs",
        )  # fmt: skip
    if config.format != "jsonl" and config.text_field != "text":
        raise ConfigError(
            f"format {config.format} has no fields, so text_field {config.text_field!r} would be ignored",
            where=f"{key}.text_field", hint="leave it away, or say format: jsonl",
        )  # fmt: skip


def _candidates(config: SourceConfig) -> list[StoredFile]:
    suffixes = SUFFIXES[config.format]
    if config.format == "python_stdlib":
        skip = _TEST_DIRECTORIES | _FOREIGN_DIRECTORIES
        return [
            file
            for file in storage.list_files(STANDARD_LIBRARY, suffixes, skip_directories=skip)
            if _is_portable(file.uri)
        ]
    found = {file.uri: file for path in config.paths for file in storage.list_files(path, suffixes)}
    return [found[uri] for uri in sorted(found)]


def _is_portable(uri: str) -> bool:
    """Whether a file of the standard library is the same wherever the version of Python is."""
    parts = uri.removeprefix(STANDARD_LIBRARY).split("/")
    return parts[-1] not in _BUILD_SPECIFIC_FILES and not any(
        part.startswith(_BUILD_SPECIFIC_PREFIXES) for part in parts
    )


def _place(config: SourceConfig, uri: str) -> str:
    if uri.startswith(STANDARD_LIBRARY):
        return uri.removeprefix(STANDARD_LIBRARY)
    for path in config.paths:
        root = root_of(path).rstrip("/\\")
        if uri.startswith(root) and uri[len(root) :][:1] in {"/", "\\"}:
            return uri[len(root) + 1 :].replace("\\", "/")
    raise AssertionError(f"{uri} lies under none of {config.paths}")


def _empty(config: SourceConfig, key: str, candidates: list[StoredFile]) -> DataError:
    if config.max_bytes is not None and candidates:
        what = f"source {config.name!r} has no record that ends within max_bytes = {config.max_bytes:,}"
        hint = f"raise {key}.max_bytes; the first file, {candidates[0].uri}, has {candidates[0].size_bytes:,} bytes"
    elif config.format == "python_stdlib":
        what = f"source {config.name!r} is empty: this Python has no library sources on disk"
        hint = "use a Python that is installed as files, or another source"
    else:
        what, hint = f"source {config.name!r} is empty: every file has 0 bytes", f"check {key}.paths"
    return DataError(what, where=", ".join(config.paths) or key, hint=hint)


def cut_units(source: Source, split: Split, validation: ValidationConfig, unit_bytes: int) -> tuple[Unit, ...]:
    """Divide a split of a source into units of about ``unit_bytes`` of its text.

    Files larger than a unit are cut at record boundaries. Only lines are ever counted, nothing is parsed: where
    single lines are held out, the units of both splits cover all lines and ``read_unit`` tells them apart.
    """
    if split == "validation" and validation.held_out_fraction == 0:
        return ()
    spans = [
        span for index in range(len(source.files)) for span in _spans(source, index, split, validation, unit_bytes)
    ]
    group_bytes = unit_bytes
    if split == "validation" and validation.split == "document" and records_are_lines(source.config):
        group_bytes = int(unit_bytes / Fraction(str(validation.held_out_fraction)))
    return tuple(Unit(unit_id, tuple(group)) for unit_id, group in enumerate(_group(spans, group_bytes)))


def _spans(
    source: Source, index: int, split: Split, validation: ValidationConfig, unit_bytes: int
) -> Iterator[UnitSpan]:
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    if validation.split == "file" and file_split(validation, source.places[index]) != split:
        return
    parts = [(0, end)]
    if validation.split == "tail":
        middle = _tail_boundary(source, index, validation)
        parts = [(0, middle), (middle, end)]
    accept = document_filter(validation, split, source.places[index])
    wanted = parts[-1] if split == "validation" else parts[0]
    ordinal = 0
    for part in parts[: parts.index(wanted) + 1]:
        boundaries = cut(config, file, *part, unit_bytes) if part[1] > part[0] else []
        for start, stop in itertools.pairwise(boundaries):
            if part == wanted and (records_are_lines(config) or accept(start)):
                yield UnitSpan(index, start, stop, ordinal)
            if stop < end:
                ordinal += count_records(config, file, start, stop)


def _tail_boundary(source: Source, index: int, validation: ValidationConfig) -> int:
    file, end = source.stored[index], source.end_bytes[index]
    start = tail_start(validation, end)
    if start == end:
        return end
    boundary = boundary_before(source.config, file, start, 0)
    return boundary if boundary is not None else boundary_after(file, start, end)


def _group(spans: Iterable[UnitSpan], unit_bytes: int) -> Iterator[list[UnitSpan]]:
    group: list[UnitSpan] = []
    size_bytes = 0
    for span in spans:
        span_bytes = span.end_byte - span.start_byte
        if group and size_bytes + span_bytes > unit_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(span)
        size_bytes += span_bytes
    if group:
        yield group


def read_unit(
    source: Source, unit: Unit, split: Split, validation: ValidationConfig
) -> Iterator[Document | BadRecord]:  # fmt: skip
    """The records of one unit that belong to the split, in order.

    Raises:
        DataError: A file cannot be read, or changed since it was listed.
    """
    for span in unit.spans:
        accept = document_filter(validation, split, source.places[span.file_index])
        yield from read_records(source.config, source.stored[span.file_index], span, accept)
