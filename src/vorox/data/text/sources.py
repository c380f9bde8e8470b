"""Named sources: which files they are, and what a unit of them reads.

A ``SourceConfig`` goes in; ``list_source`` fixes its files (sorted, each content once, pinned by SHA-256),
``read_unit`` yields the documents and bad records of a unit that ``cutting`` made. Invariant: the list and the
records are functions of the configuration and of the files' content alone, so that the same files give the same rows
on every machine and however often a build was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vorox.core.atomic import canonical_json
from vorox.core.config.setting_dependencies import source_conflicts
from vorox.core.errors import ConfigError, DataError
from vorox.core.extensions import identity_text, is_extension
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.data.documents import Record, SourceFile, Unit
from vorox.data.storage import ContentVersions, RetryPolicy, StoredFile, iterate_in_budget, retry_budget
from vorox.data.text.file_content import Limits, SequentialReads, detect_damage
from vorox.data.text.formats import first_block, has_many_records, has_row_groups, measure, read_records, split_blocks
from vorox.data.text.holdout import NO_HOLDOUT, Split, document_filter
from vorox.data.text.listing import STDLIB_SELECTION, FoundFile, Note, find_files
from vorox.data.text.signatures import compression_by_suffix

_FIELDS = frozenset({"jsonl", "csv", "parquet", "arrow", "mds"})

ListingProgress = Callable[[int, int], None]
"""Called with (bytes identified, bytes to identify)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source with its files fixed.

    Attributes:
        config: What was asked for; with the keys of its fallback where that is read.
        key: Where that stands in the configuration, for messages: ``data.sources.0``.
        stored: The files as listed; reads refuse any other state of them.
        files: The same files by content.
        places: Their names relative to the location they were found under: what the held-out split goes by.
        end_bytes: How much of each file's content belongs to the source: all of it, except where ``max_bytes`` ends.
            ``None`` for all of a compressed, Parquet or Arrow file: its length in text is known when it is read.
        notes: What a person should know although nothing is wrong.
        holdout: Which of its text is held out: a rule that fits it, once ``holdout`` has chosen one.
    """

    config: SourceConfig
    key: str
    stored: tuple[StoredFile, ...]
    files: tuple[SourceFile, ...]
    places: tuple[str, ...]
    end_bytes: tuple[int | None, ...]
    notes: tuple[Note, ...] = ()
    holdout: ValidationConfig = NO_HOLDOUT

    @property
    def size_bytes(self) -> int:
        """Bytes of its files that are used, as they are stored where their length in text is not known."""
        pairs = zip(self.end_bytes, self.files, strict=True)
        return sum(file.size_bytes if end is None else end for end, file in pairs)

    @property
    def definition(self) -> dict[str, str]:
        """What makes documents of the files' bytes. Only what differs from the default is in it."""
        config = self.config
        definition = {"format": config.format}
        if config.format == "python_stdlib":
            definition["selection"] = STDLIB_SELECTION
        if is_extension(config.format):
            identity = identity_text(config.format, f"{self.key}.format", kind="format")
            definition["format"], _, definition["function"] = identity.partition(" ")  # not where its file lies
        if config.format in _FIELDS:
            definition |= {"tokens_field": config.tokens_field} if config.tokens_field else {
                "text_field": config.text_field,
            }  # fmt: skip
        if config.format == "csv":
            definition["delimiter"] = config.delimiter
        if config.has_tokens:
            definition["end_of_text_id"] = str(config.end_of_text_id)
            definition |= {} if config.ids_dtype is None else {"ids_dtype": config.ids_dtype}
        default = type(config).model_fields["max_record_bytes"].default
        if config.damaged_files != "stop":
            definition["damaged_files"] = config.damaged_files
        if has_many_records(config) and config.max_record_bytes != default:
            definition["max_record_bytes"] = str(config.max_record_bytes)
        return definition

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
    remember: bool = True,
    on_progress: ListingProgress | None = None,
) -> Source:
    """Fix the files of a source: sorted by uri, without empty ones, the first of each content, up to ``max_bytes``.

    Args:
        config: The source.
        key: Its place in the configuration, for messages.
        versions: Memory of content hashes, so that unchanged files are not read.
        remember: Keep what is hashed now in that memory.
        on_progress: Told while files are hashed.

    Raises:
        ConfigError: The section contradicts itself.
        DataError: A location is missing, unreadable or holds nothing.
    """
    _check(config, key)
    versions = versions or ContentVersions()
    with retry_budget(patience(config)):
        config, found, notes = find_files(config, key)
    _check(config.model_copy(update={"fallback": ()}), key)  # of a fallback that is read, only its own settings count
    candidates = [file for file in found if file.stored.size_bytes > 0]
    total = sum(file.stored.size_bytes for file in candidates)
    limit = total if config.max_bytes is None else min(config.max_bytes, total)
    chosen: list[tuple[FoundFile, SourceFile, int | None]] = []
    duplicates: list[str] = []
    seen: dict[str, str] = {}
    used = identified = 0
    for file in candidates:
        stored = file.stored
        version = versions.version(stored)
        identified += stored.size_bytes
        if on_progress is not None:
            on_progress(min(identified, limit), limit)
        first = seen.setdefault(stored.content or version, stored.uri)
        if first != stored.uri:
            duplicates.append(f"{stored.uri} (as {first})")
            continue
        end, text_bytes, is_last = _use(config, stored, used)
        if text_bytes or (end is None and detect_damage(stored, Limits.from_source(config)) is not None):
            chosen.append((file, SourceFile(stored.uri, stored.size_bytes, version), end))
        used += text_bytes
        if is_last:
            break
    if remember:
        versions.save()
    if not chosen:
        raise _empty(config, key, found, candidates)
    if config.format != "python_stdlib":
        empty = [file.stored.uri for file in found if file.stored.size_bytes == 0]
        notes += _note("empty_files", f"empty file of source {config.name!r} left out", empty)
        notes += _note("duplicates", f"file of source {config.name!r} used once: the same content is there", duplicates)
    return Source(
        config=config,
        key=key,
        stored=tuple(file.stored for file, _, _ in chosen),
        files=tuple(file for _, file, _ in chosen),
        places=tuple(file.place for file, _, _ in chosen),
        end_bytes=tuple(end for _, _, end in chosen),
        notes=tuple(notes),
    )


def _note(kind: str, what: str, names: Sequence[str]) -> list[Note]:
    if not names:
        return []
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return [Note(kind, f"{len(names):,} x {what}: {', '.join(names[:3])}{more}")]


def _use(config: SourceConfig, file: StoredFile, used_bytes: int) -> tuple[int | None, int, bool]:
    """How much of the next file ``max_bytes`` leaves: where it ends, its text, and whether nothing may follow it."""
    in_text = has_row_groups(config.format) or compression_by_suffix(file.uri) is not None
    whole = None if in_text else file.size_bytes
    if config.max_bytes is None:
        return whole, file.size_bytes, False
    left = config.max_bytes - used_bytes
    if compression_by_suffix(file.uri) is None:
        size = measure(config, file)
        if size <= left:
            return whole, size, size == left
        first = first_block(config, file, None, left)
    else:  # its length is not known, and not worth reading all of it
        pieces = (piece for piece in split_blocks(config, file, 0, None, left) if piece.text_bytes)
        first = next(pieces, None)
        if first is None:
            return None, 0, False
        if first.text_bytes <= left and next(pieces, None) is None:
            return None, first.text_bytes, first.text_bytes == left
    if first is None or first.text_bytes > left:
        return 0, 0, True
    return first.end_byte, first.text_bytes, True


def with_tokenizer(source: Source, fingerprint: str, end_of_text_id: int, names: Sequence[str]) -> Source:
    """The source with what a run's tokenizer decides: where the documents of token shards end.

    Args:
        source: Any source; one of text comes back as it is.
        fingerprint: Of the tokenizer.
        end_of_text_id: Its end of text, for shards that do not say their own.
        names: What else the tokenizer is called in the configuration: its path.

    Raises:
        ConfigError: The shards were written with another tokenizer.
    """
    config = source.config
    if not config.has_tokens:
        return source
    declared = config.tokenizer or ""
    same = names == ["none"] or declared in names or (len(declared) >= 8 and fingerprint.startswith(declared))
    if not same:
        raise ConfigError(
            f"the token shards of source {config.name!r} were written with tokenizer {declared or '(none given)'}, "
            f"this run's is {', '.join([*names, fingerprint[:16]])}",
            where=f"{source.key}.tokenizer",
            hint="run with the tokenizer that wrote them; if it is this one, write its path or fingerprint here",
        )
    if config.end_of_text_id is not None:
        return source
    return replace(source, config=config.model_copy(update={"end_of_text_id": end_of_text_id}))


def without_files(source: Source, indexes: Sequence[int], note: Note) -> Source:
    """The source without some of its files, and a note that says so."""
    kept = [index for index in range(len(source.files)) if index not in set(indexes)]
    return replace(with_files(source, kept), notes=(*source.notes, note))


def with_files(source: Source, indexes: Sequence[int]) -> Source:
    """The source with some of its files, in another order."""
    return replace(
        source,
        stored=tuple(source.stored[index] for index in indexes),
        files=tuple(source.files[index] for index in indexes),
        places=tuple(source.places[index] for index in indexes),
        end_bytes=tuple(source.end_bytes[index] for index in indexes),
    )


def list_files(source: SourceConfig) -> tuple[SourceFile, ...]:
    """The files of a source by content: sorted, deduplicated, up to ``max_bytes``."""
    return list_source(source).files


def _check(config: SourceConfig, key: str) -> None:
    for name, remedy in source_conflicts(config):
        raise ConfigError(
            f"{name} {getattr(config, name)!r} means {remedy}",
            where=f"{key}.{name}", hint="leave it out",
        )  # fmt: skip
    if config.format != "python_stdlib" and not config.paths:
        raise ConfigError(
            f"format {config.format} needs at least one path", where=f"{key}.paths",
            hint="give files, folders or globs",
        )  # fmt: skip


def _empty(config: SourceConfig, key: str, found: list[FoundFile], candidates: list[FoundFile]) -> DataError:
    if config.max_bytes is not None and candidates:
        first = candidates[0].stored
        what = f"source {config.name!r} has no record that ends within max_bytes = {config.max_bytes:,}"
        hint = f"raise {key}.max_bytes; the first file, {first.uri}, has {first.size_bytes:,} bytes"
    elif config.format == "python_stdlib":
        what = f"source {config.name!r} is empty: this Python has no library sources on disk"
        hint = "use a Python that is installed as files, or another source"
    elif not found:
        what, hint = f"source {config.name!r} is empty: there is no file", f"put files there, or change {key}.paths"
    else:
        what, hint = f"source {config.name!r} is empty: every file has 0 bytes", f"check {key}.paths"
    return DataError(what, where=", ".join(config.paths) or key, hint=hint)


def read_unit(source: Source, unit: Unit, split: Split, validation: ValidationConfig) -> Iterator[Record]:
    """The records of one unit that belong to the split, in order.

    Raises:
        DataError: A file cannot be read, or changed since it was listed.
    """
    yield from iterate_in_budget(_read_unit(source, unit, split, validation), patience(source.config))


def read_units(
    source: Source, units: Iterable[Unit], split: Split, validation: ValidationConfig
) -> Iterator[Record]:  # fmt: skip
    """Yield the records of units one after the other; a compressed file is decoded once for consecutive units."""
    with contextlib.closing(SequentialReads()) as reads:
        for unit in units:
            yield from reads.during(read_unit(source, unit, split, validation))


def _read_unit(source: Source, unit: Unit, split: Split, validation: ValidationConfig) -> Iterator[Record]:
    for span in unit.spans:
        accept = document_filter(validation, split, source.places[span.file_index])
        yield from read_records(source.config, source.stored[span.file_index], span, accept)


def patience(config: SourceConfig) -> RetryPolicy:
    """How a source wants its stores to be asked."""
    return RetryPolicy(retries_per_unit=config.max_retries_per_unit, stall_seconds=config.stall_seconds)
