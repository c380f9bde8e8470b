"""Sources: their files, listed, pinned by SHA-256 and deduplicated.

A ``SourceConfig`` goes in; ``list_source`` returns its files in order. Invariant: the files depend only on the
configuration and their content, so that the same files give the same rows on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vorox.core.config.checks.sources import path_problems, refuse
from vorox.core.config.layers.setting_dependencies import source_conflicts
from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.files.atomic import canonical_json
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import SourceConfig, ValidationConfig
from vorox.core.schema.source_formats import source_format
from vorox.core.user_code.extensions import identity_text, is_extension
from vorox.data import storage
from vorox.data.chat.column_meaning import FURTHER_FIELDS
from vorox.data.chat.template import ChatTemplate
from vorox.data.documents import SourceFile
from vorox.data.storage import ContentVersions, RetryPolicy, StoredFile, content_hash, retry_budget, scheme_of
from vorox.data.text.decompression import UTF_8
from vorox.data.text.file_content import detect_damage, is_stored_as_read, limits_of
from vorox.data.text.formats import first_block, has_many_records, has_row_groups, measure, split_blocks
from vorox.data.text.holdout import NO_HOLDOUT
from vorox.data.text.listing import STDLIB_SELECTION, FoundFile, Note, find_files

ListingProgress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes to hash)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source with its files listed and pinned.

    Attributes:
        config: Its configuration; that of its fallback if the fallback is read.
        key: Its key in the configuration, for messages: ``data.sources.0``.
        stored: The files as listed; a file that has changed since is rejected when it is read.
        files: The same files, identified by content.
        relative_paths: Their paths relative to the location of the source; the holdout rule hashes these.
        end_bytes: End of the part of each file that belongs to the source: its length, unless ``max_bytes`` ends in
            it. ``None`` for all of a compressed, Parquet or Arrow file, whose length in text is known when it is read.
        notes: Messages for the user that are not errors.
        holdout: Its holdout rule, once ``holdout_selection`` has selected one.
        held_out_share: Share of its text in the held-out spans, or of its records among the held-out ones; ``None`` if
            it is not measured.
        chat_template: Renders its conversations; ``None`` until the tokenizer is known, and for sources of text.
        is_listed: Whether its files were listed; else they are those that a run has recorded.
    """

    config: SourceConfig
    key: str
    stored: tuple[StoredFile, ...]
    files: tuple[SourceFile, ...]
    relative_paths: tuple[str, ...]
    end_bytes: tuple[int | None, ...]
    notes: tuple[Note, ...] = ()
    holdout: ValidationConfig = NO_HOLDOUT
    held_out_share: float | None = None
    chat_template: ChatTemplate | None = None
    is_listed: bool = True

    @property
    def size_bytes(self) -> int:
        """Bytes of its files that are used; stored bytes where the length in text is unknown."""
        pairs = zip(self.end_bytes, self.files, strict=True)
        return sum(file.size_bytes if end is None else end for end, file in pairs)

    @property
    def definition(self) -> dict[str, str]:
        """The settings that determine the documents, without defaults; part of the recipe of caches."""
        config = self.config
        definition = {"format": config.format}
        if config.format == "python_stdlib":
            definition["selection"] = STDLIB_SELECTION
        if is_extension(config.format):
            identity = identity_text(config.format, f"{self.key}.format", kind="format")
            definition["format"], _, definition["function"] = identity.partition(" ")  # without its file path
        if config.chat_fields:
            definition["chat_fields"] = ",".join(config.chat_fields)
            definition |= {"preference_pairs": "true"} if config.preference_pairs else {}
            definition |= {name: value for name in FURTHER_FIELDS if (value := getattr(config, name)) is not None}
            definition |= {} if self.chat_template is None else {"chat_template": self.chat_template.digest}
        elif source_format(config.format).has_fields:
            definition |= {"tokens_field": config.tokens_field} if config.tokens_field else {
                "text_field": config.text_field,
            }  # fmt: skip
        if config.images_field is not None:
            definition["images_field"] = config.images_field
        if config.ignored_fields:
            definition["ignored_fields"] = ",".join(sorted(config.ignored_fields))
        if limits_of(config).encoding != UTF_8:
            definition["encoding"] = limits_of(config).encoding
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
        """SHA-256 over the relative paths, contents and used lengths of the files; unchanged if a folder is moved."""
        content = [
            [path, file.version, end]
            for path, file, end in zip(self.relative_paths, self.files, self.end_bytes, strict=True)
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
    """List and pin the files of a source: sorted by URI, not empty, deduplicated by content, up to ``max_bytes``.

    Args:
        config: The source.
        key: Its key in the configuration, for messages.
        versions: Cache of content hashes, so that unchanged files are not read again.
        remember: Save new hashes in that cache.
        on_progress: Called while files are hashed.

    Raises:
        ConfigError: The settings of the source conflict.
        DataError: A location is missing, unreadable or empty.
    """
    _check(config, key)
    versions = versions or ContentVersions()
    with retry_budget(RetryPolicy.from_source(config)):
        config, found, notes = find_files(config, key)
    _check(config.model_copy(update={"fallback": ()}), key)  # of a fallback, only its own settings count
    candidates = [file for file in found if file.stored.size_bytes > 0]
    total = sum(file.stored.size_bytes for file in candidates)
    limit = total if config.max_bytes is None else min(config.max_bytes, total)
    chosen: list[tuple[FoundFile, SourceFile, int | None]] = []
    duplicates: list[str] = []
    seen: dict[str, str] = {}
    used = hashed = 0
    for file in candidates:
        stored = file.stored
        version = versions.version(stored)
        hashed += stored.size_bytes
        if on_progress is not None:
            on_progress(min(hashed, limit), limit)
        first = seen.setdefault(stored.content or version, stored.uri)
        if first != stored.uri:
            duplicates.append(f"{stored.uri} (as {first})")
            continue
        end, text_bytes, is_last = _apply_limit(config, stored, used)
        if text_bytes or (end is None and detect_damage(stored, limits_of(config)) is not None):
            chosen.append((file, SourceFile(stored.uri, stored.size_bytes, version, file.relative_path), end))
        used += text_bytes
        if is_last:
            break
    if remember:
        versions.save()
    if not chosen:
        raise _empty_source_error(config, key, found, candidates)
    if config.format != "python_stdlib":
        empty = [file.stored.uri for file in found if file.stored.size_bytes == 0]
        notes += _note("empty_files", "empty file", config.name, empty)
        notes += _note("duplicates", "duplicate file", config.name, duplicates)
    return Source(
        config=config,
        key=key,
        stored=tuple(file.stored for file, _, _ in chosen),
        files=tuple(file for _, file, _ in chosen),
        relative_paths=tuple(file.relative_path for file, _, _ in chosen),
        end_bytes=tuple(end for _, _, end in chosen),
        notes=tuple(notes),
    )


def _note(kind: str, what: str, source: str, names: Sequence[str]) -> list[Note]:
    if not names:
        return []
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return [Note(kind, f"Skipped {pluralize(len(names), what)} of source {source!r}: {', '.join(names[:3])}{more}")]


def _apply_limit(config: SourceConfig, file: StoredFile, used_bytes: int) -> tuple[int | None, int, bool]:
    """Return (end, bytes of text, is last file) for the next file under ``max_bytes``."""
    is_plain = is_stored_as_read(file, limits_of(config))
    in_text = has_row_groups(config.format) or not is_plain
    whole = None if in_text else file.size_bytes
    if config.max_bytes is None:
        return whole, file.size_bytes, False
    left = config.max_bytes - used_bytes
    if is_plain:
        size = measure(config, file)
        if size <= left:
            return whole, size, size == left
        first = first_block(config, file, None, left)
    else:  # the length is unknown, and finding it would read the whole file
        blocks = (block for block in split_blocks(config, file, 0, None, left) if block.text_bytes)
        first = next(blocks, None)
        if first is None:
            return None, 0, False
        if first.text_bytes <= left and next(blocks, None) is None:
            return None, first.text_bytes, first.text_bytes == left
    if first is None or first.text_bytes > left:
        return 0, 0, True
    return first.end_byte, first.text_bytes, True


def with_tokenizer(source: Source, fingerprint: str, end_of_text_id: int, names: Sequence[str]) -> Source:
    """Return a source of token shards with the end-of-text id of the run's tokenizer; other sources unchanged.

    Args:
        source: The source.
        fingerprint: Fingerprint of the tokenizer.
        end_of_text_id: Its end-of-text id, for shards whose source does not set one.
        names: Other names of the tokenizer in the configuration, such as its path.

    Raises:
        ConfigError: The shards were written with a different tokenizer.
    """
    config = source.config
    if not config.has_tokens:
        return source
    declared = config.tokenizer or ""
    same = names == ["none"] or declared in names or (len(declared) >= 8 and fingerprint.startswith(declared))
    if not same:
        raise ConfigError(
            f"The token shards of source {config.name!r} were written with tokenizer {declared or '(none given)'}, "
            f"but this run uses {', '.join([*names, fingerprint[:16]])}",
            where=f"{source.key}.tokenizer",
            hint="use the tokenizer that wrote them; if it is this one, set this to its path or fingerprint",
        )
    if config.end_of_text_id is not None:
        return source
    return replace(source, config=config.model_copy(update={"end_of_text_id": end_of_text_id}))


def without_files(source: Source, indexes: Sequence[int], note: Note) -> Source:
    """Return the source without some of its files, with a note for the user."""
    kept = [index for index in range(len(source.files)) if index not in set(indexes)]
    return replace(with_files(source, kept), notes=(*source.notes, note))


def with_files(source: Source, indexes: Sequence[int]) -> Source:
    """Return the source with the files at these indexes, in this order."""
    return replace(
        source,
        stored=tuple(source.stored[index] for index in indexes),
        files=tuple(source.files[index] for index in indexes),
        relative_paths=tuple(source.relative_paths[index] for index in indexes),
        end_bytes=tuple(source.end_bytes[index] for index in indexes),
    )


def recorded_source(config: SourceConfig, key: str, files: Sequence[SourceFile], holdout: ValidationConfig) -> Source:
    """Return a source with the files and the holdout rule that a run has recorded, without listing it."""
    stored, paths = tuple(map(unlisted, files)), tuple(file.path for file in files)
    return Source(config, key, stored, tuple(files), paths, (None,) * len(files), holdout=holdout, is_listed=False)


def unlisted(file: SourceFile) -> StoredFile:
    """Return a recorded file that was not listed, or is gone or changed; reading it from a local disk is an error."""
    is_pinned = scheme_of(file.uri) is not None
    return StoredFile(file.uri, file.size_bytes, "", 0, version=file.version if is_pinned else None)


def found_again(source: Source, versions: ContentVersions) -> Source:
    """Return a recorded source in which the files that are unchanged on disk can be read."""
    return replace(source, stored=tuple(listed_again(file, versions) or unlisted(file) for file in source.files))


def listed_again(file: SourceFile, versions: ContentVersions | None = None) -> StoredFile | None:
    """Return a recorded file if it is still in its place on a local disk, with the same content."""
    if scheme_of(file.uri) is not None:
        return None
    try:
        (found,) = storage.list_files(file.uri, ())
        is_same = found.size_bytes == file.size_bytes and (versions or ContentVersions()).version(found) == file.version
    except (DataError, ValueError):
        return None
    return found if is_same else None


def on_disk(source: Source) -> Source:
    """Return a recorded source with its files as they are on disk now, even if their content has changed."""

    def find(stored: StoredFile) -> StoredFile:
        if source.is_listed or stored.scheme is not None:
            return stored
        try:
            return storage.list_files(stored.uri, ())[0]
        except (DataError, IndexError):
            return stored  # the error is raised when it is read

    return replace(source, stored=tuple(map(find, source.stored)))


def found_elsewhere(source: Source, indexes: Sequence[int]) -> Source:
    """Return a source in which some local files are where its locations have their content now, if they have it."""
    wanted = {(source.files[index].size_bytes, source.files[index].version): index for index in indexes}
    sizes = {size_bytes for size_bytes, _ in wanted}
    try:
        _, listed, _ = find_files(source.config, source.key)
    except VoroxError:  # its locations are gone, too
        return source
    stored, paths = list(source.stored), list(source.relative_paths)
    for file in listed:
        if file.stored.size_bytes not in sizes or file.stored.version is not None:
            continue
        index = wanted.get((file.stored.size_bytes, content_hash(file.stored)))
        if index is not None:
            stored[index], paths[index] = file.stored, file.relative_path
    return replace(source, stored=tuple(stored), relative_paths=tuple(paths))


def list_files(source: SourceConfig) -> tuple[SourceFile, ...]:
    """Return the files of a source: sorted, deduplicated, up to ``max_bytes``."""
    return list_source(source).files


def _check(config: SourceConfig, key: str) -> None:
    for name, remedy in source_conflicts(config):
        raise ConfigError(
            f"{name} {getattr(config, name)!r} means {remedy}",
            where=f"{key}.{name}", hint="leave it out",
        )  # fmt: skip
    refuse(path_problems(key, config))


def _empty_source_error(
    config: SourceConfig, key: str, found: list[FoundFile], candidates: list[FoundFile]
) -> DataError:
    if config.max_bytes is not None and candidates:
        first = candidates[0].stored
        what = f"Source {config.name!r} has no record that ends within max_bytes = {config.max_bytes:,}"
        hint = f"raise {key}.max_bytes; the first file, {first.uri}, has {first.size_bytes:,} bytes"
    elif config.format == "python_stdlib":
        what = f"Source {config.name!r} is empty: this Python has no library sources on disk"
        hint = "use a Python installation with library files, or another source"
    elif not found:
        what, hint = f"Source {config.name!r} is empty: no file was found", f"add files, or change {key}.paths"
    else:
        which = found[0].stored.uri if len(found) == 1 else "every file"
        what, hint = f"Source {config.name!r} is empty: {which} has 0 bytes", f"check {key}.paths"
    return DataError(what, where=", ".join(config.paths) or key, hint=hint)
