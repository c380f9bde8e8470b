"""The sources of a configuration: their files, holdout rules and tokenizer.

A dry run and training both start here; nothing is built yet. Invariants: a file of ``data.validation.sources`` is never
trained on, even if a training source lists it under a different name; the same configuration and files give the same
sources.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import cast

from vorox.core.config.config_for_text import CHATML_TOKENS
from vorox.core.config.yaml.writer import write_overrides
from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.files.json_reader import read_json
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.core.schema.data import DataConfig, SourceConfig, Split, ValidationConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.cache.building.initialize import planned_inputs
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.cache.files.manifest import Manifest
from vorox.data.chat.template import BUILT_IN
from vorox.data.corpus.cache_location import changed_files, with_recorded
from vorox.data.corpus.cache_opener import recipe_for
from vorox.data.corpus.growing_tokenizer import growing_tokenizer
from vorox.data.corpus.run_views import RunViews
from vorox.data.corpus.sampled_lengths import cut_conversations, sample_lengths
from vorox.data.corpus.view_records import is_restored
from vorox.data.documents import SourceFile
from vorox.data.images.layout import image_layout
from vorox.data.recipe import read_recipe
from vorox.data.storage import ContentVersions, cache_ranges
from vorox.data.text.holdout import ALL_HELD_OUT, recorded_holdout
from vorox.data.text.holdout_selection import describe_holdout, select_holdout
from vorox.data.text.listing import Note
from vorox.data.text.record_sample import check_columns
from vorox.data.text.sources import (
    Source,
    found_again,
    list_source,
    recorded_source,
    with_files,
    with_tokenizer,
    without_files,
)
from vorox.data.tokenizers.spelled_tokens import may_spell_tokens, spelled_tokens
from vorox.data.tokenizers.store import resolve_tokenizer, with_chat_template
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

VERSIONS_NAME = "versions"
"""Directory below the cache root with content hashes and holdout rules, so that a restart need not read the text."""


@dataclass(frozen=True, slots=True)
class ListedSources:
    """The listed sources of a configuration and their tokenizer.

    Attributes:
        train: The sources of ``data.sources``, each with its holdout rule.
        validation: The sources of ``data.validation.sources``.
        tokenizer: The tokenizer of all sources; ``None`` in a dry run if it has yet to be trained.
        notes: Notes for the user that are not errors.
    """

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    tokenizer: Tokenizer | None
    notes: tuple[Note, ...] = ()

    @property
    def held_out(self) -> str:
        """Description of the validation text."""
        if self.validation:
            files = sum(len(source.files) for source in self.validation)
            names = ", ".join(source.config.name for source in self.validation)
            return f"{pluralize(files, 'file')} of data.validation.sources ({names})"
        return "; ".join(describe_holdout(source) for source in self.train)


def list_sources(
    config: RunConfig,
    weights: Sequence[Fraction],
    root: Path,
    report: PrepareProgress,
    *,
    tokenizer: Tokenizer | None = None,
    build: bool = True,
    is_dry: bool = False,
    force_rebuild: bool = False,
    reads: ExitStack | None = None,
    views: RunViews | None = None,
) -> ListedSources:
    """List the files of all sources, choose the holdout rules, and load or train the tokenizer.

    Args:
        config: The configuration.
        weights: Share of each source in the training rows.
        root: Root directory of the caches.
        report: Called with the progress.
        tokenizer: A tokenizer that is already known; ``None`` loads or trains the configured one, or takes that of the
            caches that ``data.cache.grow`` extends.
        build: Whether to train a missing tokenizer.
        is_dry: Write nothing, and do not train a tokenizer.
        force_rebuild: Whether every cache is rebuilt.
        reads: Bytes read from the files are shared in memory until this stack is closed, so none is fetched twice.
        views: The views of the run that continues; a source is listed only for files that its view still needs.

    Raises:
        ConfigError: The configuration contradicts itself, or its holdout is empty.
        DataError: Text is missing or unreadable, the tokenizer is missing and ``build`` is off, or a cache cannot grow.
    """
    data = config.data
    known = _known_sources(config, views, tokenizer) if views and tokenizer and not force_rebuild else {}
    notes: list[Note] = []

    def find(source: SourceConfig, key: str) -> Source:
        recorded = known.get(key)
        if recorded is not None and recorded.is_complete and not build:
            return found_again(recorded.source, _versions(source, root))
        grows = data.cache.grow and data.mode == "cached"
        return _find(recorded, lambda config: _list(config, key, root, report, is_dry), source, root, grows=grows)

    validation = [
        replace(find(source, f"data.validation.sources.{index}"), holdout=ALL_HELD_OUT)
        for index, source in enumerate(data.validation.sources)
    ]
    for source in validation:
        if source.key not in known:
            check_columns(source.config, source.stored, source.key)
    held_out = frozenset(file.version for source in validation for file in source.files)
    found = [find(source, f"data.sources.{index}") for index, source in enumerate(data.sources)]
    sources = [_without(source, held_out) for source in found]
    if reads is not None:
        for source in (*sources, *validation):
            if source.is_listed:
                reads.enter_context(cache_ranges(source.stored))
    # The documents of token shards end at the tokenizer's end-of-text id; a tokenizer is never trained on them.

    def choose_holdout(source: Source) -> Source:
        if source.key in known:
            return source
        return _with_cached_holdout(source, data, root / VERSIONS_NAME, remember=not is_dry)

    sources = [source if source.config.has_tokens else choose_holdout(source) for source in sources]
    growth_notes: list[Note] = []
    if tokenizer is None:
        tokenizer, growth_notes = growing_tokenizer(config, sources, weights, root, force_rebuild=force_rebuild)
    if tokenizer is None:
        tokenizer = _tokenizer(config, sources, validation, weights, root, report, build=build, is_dry=is_dry)
    if tokenizer is not None:
        sources, validation, tokenizer = _tokenized(sources, validation, tokenizer, config, choose_holdout)
    notes += [*_notes((*sources, *validation), tokenizer, config), *growth_notes]
    new = [source for source in sources if source.key not in known]
    notes += _spelled_notes(new, tokenizer, config.tokenizer, root / VERSIONS_NAME, remember=not is_dry)
    if tokenizer is not None:
        notes += _length_notes(new, tokenizer, data.sequence_length_tokens)
    return ListedSources(tuple(sources), tuple(validation), tokenizer, tuple(notes))


@dataclass(frozen=True, slots=True)
class _KnownSource:
    """A source with the files of its view.

    Attributes:
        source: The source.
        is_complete: Whether all units of its views are built.
        needed: The files that the missing units are built from.
        is_restored: Whether its views are those that the run directory describes, and were lost.
    """

    source: Source
    is_complete: bool
    needed: tuple[SourceFile, ...] = ()
    is_restored: bool = False


def _find(
    recorded: _KnownSource | None,
    list_now: Callable[[SourceConfig], Source],
    config: SourceConfig,
    root: Path,
    *,
    grows: bool,
) -> Source:
    """Return a source as it is listed now, with the files and the holdout rule that a run has recorded of it."""
    try:
        listed = list_now(config)
    except DataError as error:
        if recorded is None or not recorded.is_complete:
            raise
        what = f"source {recorded.source.config.name!r} cannot be listed: {error.what} ({error.where})"
        notes = (Note("unlisted", f"{what}; the run keeps the rows that it has"),)
        return replace(found_again(recorded.source, _versions(recorded.source.config, root)), notes=notes)
    if recorded is None:
        return listed
    if recorded.is_complete and any(note.kind == "fallback" for note in listed.notes):
        itself = found_again(recorded.source, _versions(recorded.source.config, root))
        return replace(itself, notes=listed.notes)
    listed = _with_needed(listed, recorded, list_now)
    changes = _changes(listed, recorded.source, grows=grows)
    known = {(file.size_bytes, file.version) for file in recorded.source.files}
    if not grows:
        listed = with_recorded(listed, recorded.source.files, ())
    is_same = all((file.size_bytes, file.version) in known for file in listed.files)
    share = recorded.source.held_out_share if is_same else None
    return replace(listed, holdout=recorded.source.holdout, held_out_share=share, notes=(*listed.notes, *changes))


def _with_needed(listed: Source, recorded: _KnownSource, list_now: Callable[[SourceConfig], Source]) -> Source:
    """Return a source with every file that a run's lost views are built from again.

    The record is untrusted, so only files that the source itself lists are read.

    Raises:
        DataError: The source no longer has one of them.
    """
    if not recorded.is_restored:
        return listed
    present = {(file.size_bytes, file.version) for file in listed.files}
    lost = [file for file in recorded.needed if (file.size_bytes, file.version) not in present]
    if lost and listed.config.max_bytes is not None:  # files that came later may have displaced them
        wanted = {(file.size_bytes, file.version) for file in lost}
        whole = list_now(listed.config.model_copy(update={"max_bytes": None}))
        displaced = [i for i, file in enumerate(whole.files) if (file.size_bytes, file.version) in wanted]
        more = with_files(whole, displaced)
        listed = replace(
            listed,
            stored=(*listed.stored, *more.stored),
            files=(*listed.files, *more.files),
            relative_paths=(*listed.relative_paths, *more.relative_paths),
            end_bytes=(*listed.end_bytes, *more.end_bytes),
        )
        present |= {(file.size_bytes, file.version) for file in more.files}
        lost = [file for file in lost if (file.size_bytes, file.version) not in present]
    if lost:
        raise _lost_file_error(listed, lost)
    return listed


def _lost_file_error(listed: Source, lost: Sequence[SourceFile]) -> DataError:
    first, name = lost[0], listed.config.name
    is_there = first.uri in {file.uri for file in listed.files} or first.path in listed.relative_paths
    what = "has changed since the run read it" if is_there else "is gone, and the run has read it"
    more = f"; so {pluralize(len(lost) - 1, 'other file')}: {', '.join(f.path for f in lost[1:4])}" if lost[1:] else ""
    return DataError(
        f"File {first.path or first.uri} of source {name!r} {what}: the run's cache is lost, and cannot be rebuilt "
        f"without it{more}",
        where=first.uri, saved="the run was not changed",
        hint=f"restore the file as it was ({first.size_bytes:,} bytes, version {first.version}) below one of "
        f"{listed.key}.paths, or restore the run's cache directory; a new run on the files as they are: "
        "vorox train ... --resume never",
    )  # fmt: skip


def _tokenized(
    sources: Sequence[Source], validation: Sequence[Source], tokenizer: Tokenizer, config: RunConfig,
    choose_holdout: Callable[[Source], Source],
) -> tuple[list[Source], list[Source], Tokenizer]:  # fmt: skip
    """Return the sources with what they take from the tokenizer, and the tokenizer with its chat template."""
    identity = (tokenizer.fingerprint, tokenizer.end_of_text_id, [config.tokenizer.path or config.tokenizer.kind])
    sources = [
        choose_holdout(with_tokenizer(source, *identity)) if source.config.has_tokens else source for source in sources
    ]
    validation = [with_tokenizer(source, *identity) for source in validation]
    if config.tokenizer.chat_template is not None or any(s.config.chat_fields for s in (*sources, *validation)):
        tokenizer = with_chat_template(tokenizer, config.tokenizer)
    training, held_out = (
        [replace(s, chat_template=tokenizer.chat_template) if s.config.chat_fields else s for s in listed]
        for listed in (sources, validation)
    )
    return training, held_out, tokenizer


def _known_sources(config: RunConfig, views: RunViews, tokenizer: Tokenizer) -> dict[str, _KnownSource]:
    """Return the sources whose views a run has recorded with the recipes of its configuration, by key."""
    data, found = config.data, dict[str, _KnownSource]()
    sections = [
        *((f"data.sources.{index}", source) for index, source in enumerate(data.sources)),
        *((f"data.validation.sources.{index}", source) for index, source in enumerate(data.validation.sources)),
    ]
    for key, section in sections:
        split: Split = "validation" if key.startswith("data.validation") else "train"
        directory = views.named(section.name, key, split)
        if directory is None:
            continue
        recipe, manifest = read_recipe(directory), Manifest.open(directory)
        rule = ALL_HELD_OUT if split == "validation" else recorded_holdout(recipe.split, data.validation)
        source = recorded_source(section, key, planned_inputs(directory, manifest)[0], rule)
        source = _with_tokenizer(source, config, tokenizer)
        if recipe_for(data, source, split, tokenizer, images=image_layout(config.model)).digest != recipe.digest:
            continue  # other settings: the resume names them
        directories = [directory]
        if split == "train" and rule.held_out_fraction and not data.validation.sources:
            directories += [views.named(section.name, key, "validation")]
        parts = [None if one is None else _needed_files(one) for one in directories]
        needed = dict.fromkeys(file for part in parts for file in (source.files if part is None else part))
        restored = any(one is not None and is_restored(one) for one in directories)
        source = replace(source, held_out_share=views.held_out_shares.get(section.name) if split == "train" else None)
        found[key] = _KnownSource(source, all(part == [] for part in parts), tuple(needed), restored)
    return found


def _needed_files(directory: Path) -> list[SourceFile] | None:
    """Return the files that the missing units of a view are built from; ``None`` if nothing is planned."""
    manifest = Manifest.open(directory)
    if not manifest.planned_units:
        return None
    missing = cast("list[int]", manifest.missing_units().tolist())
    if not missing and manifest.units_final:
        return []
    files, units = planned_inputs(directory, manifest)
    needed = {index for unit in missing for index in units[unit].file_indexes}
    if not manifest.units_final:  # the rest of the text is still to be split
        needed |= set(range(units[-1].spans[-1].file_index, len(files)))
    return [files[index] for index in sorted(needed)]


def _with_tokenizer(source: Source, config: RunConfig, tokenizer: Tokenizer) -> Source:
    """Return a source with what its recipe takes from the tokenizer."""
    names = [config.tokenizer.path or config.tokenizer.kind]
    source = with_tokenizer(source, tokenizer.fingerprint, tokenizer.end_of_text_id, names)
    if not source.config.chat_fields:
        return source
    return replace(source, chat_template=with_chat_template(tokenizer, config.tokenizer).chat_template)


def _changes(listed: Source, recorded: Source, *, grows: bool) -> list[Note]:
    """Return notes on what a source lists otherwise than a run has recorded."""
    name, known = listed.config.name, {(file.size_bytes, file.version) for file in recorded.files}
    changed = changed_files(listed, recorded.files)
    present = {file.uri for file in listed.files} | {(file.size_bytes, file.version) for file in listed.files}
    gone = [f.uri for f in recorded.files if f.uri not in present and (f.size_bytes, f.version) not in present]
    uris = {file.uri for file in recorded.files}
    added = [f.uri for f in listed.files if f.uri not in uris and (f.size_bytes, f.version) not in known]
    notes: list[Note] = []
    for kind, files, what, then in (
        ("changed_files", changed, "other than the run has read", "it keeps the rows of the earlier text"),
        ("missing_files", gone, "no longer there", "the run keeps the rows"),
        ("added_files", added, "new since the run started", "not read: data.cache.grow=true adds new files"),
    ):
        if files and not (grows and kind == "added_files"):
            more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
            text = f"{pluralize(len(files), 'file')} of source {name!r} {'is' if len(files) == 1 else 'are'} {what}"
            notes.append(Note(kind, f"{text}: {', '.join(files[:3])}{more}; {then}"))
    return notes


def _notes(sources: Sequence[Source], tokenizer: Tokenizer | None, config: RunConfig) -> list[Note]:
    """Return what was noticed about sources with their tokenizer."""
    section = config.tokenizer
    notes = [note for source in sources for note in source.notes]
    notes += _chat_notes(sources, section, is_adapter=config.adapter.kind != "none")
    if tokenizer is not None and section.kind == "bpe" and tokenizer.vocab_size < section.vocab_size:
        text = f"the vocabulary has {tokenizer.vocab_size:,} tokens, not tokenizer.vocab_size={section.vocab_size:,}"
        notes.append(Note("vocabulary", f"{text}: the text has no further pairs to merge"))
    return notes


def _chat_notes(sources: Sequence[Source], section: TokenizerConfig, *, is_adapter: bool) -> list[Note]:
    names = ", ".join(source.config.name for source in sources if source.chat_template is not None)
    template = next((source.chat_template for source in sources if source.chat_template is not None), None)
    if template is None:
        return []
    set_to = section.chat_template
    own = template.built_in_name or "of the tokenizer"
    name = own if set_to is None else set_to if set_to in BUILT_IN else f"of {set_to}"
    text = ""
    if name == "chatml" and CHATML_TOKENS[1] not in template.special_tokens:
        added = write_overrides({"tokenizer.special_tokens": [*section.special_tokens, *CHATML_TOKENS]})
        text = f"; its tokens are text, not special tokens of this tokenizer, so answers end with {template.eos_token}"
        text += "" if is_adapter else f"; to add them: {added}"  # an adapter would not train their rows
    is_optional = all(source.config.preference_pairs for source in sources if source.chat_template is not None)
    template_of = " for lists of messages" if is_optional else ""  # pairs of texts have no template
    notes = [Note("conversations", f"trains on the answers of {names}; chat template {name}{template_of}{text}")]
    if not is_optional and not template.turn_end().startswith(template.special_tokens):
        text = (
            f"the chat template {name} writes no special token after an answer, so the model learns none to stop at: "
            "generate, serve and exports run on where vorox chat ends at a text; write {{ eos_token }} after an answer"
        )
        notes.append(Note("turn_end", text))
    return notes


def _spelled_notes(
    sources: Sequence[Source], tokenizer: Tokenizer | None, section: TokenizerConfig, directory: Path, *, remember: bool
) -> Iterator[Note]:
    """Yield the sources whose texts spell special tokens; of a tokenizer to be trained, those that it will have.

    What was found is stored under the digest of the files, so that another start does not read them.
    """
    end_of_text = section.end_of_text or END_OF_TEXT if tokenizer is None else tokenizer.end_of_text
    special = (end_of_text, *section.special_tokens) if tokenizer is None else tokenizer.special_tokens
    for source in sources:
        identity = [source.digest, source.definition, source.key, source.config.name, special, end_of_text]
        key = hashlib.sha256(canonical_json(identity)).hexdigest()
        path = directory / f"spelled-{key[:24]}.json"
        text, is_known = None, False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = read_json(path)
            text, is_known = known["text"], known["key"] == key
        if not is_known:
            text = spelled_tokens(source, special, end_of_text)
            if remember and may_spell_tokens(source):
                with contextlib.suppress(OSError):  # on a read-only disk, the next start reads them again
                    make_directory(directory)
                    write_file(path, canonical_json({"key": key, "text": text}))
        if text is not None:
            yield Note("spelled_tokens", text)


def _length_notes(sources: Sequence[Source], tokenizer: Tokenizer, row_tokens: int) -> Iterator[Note]:
    """Yield what does not fit into a row: conversations are sampled, because a cut one loses its question."""
    for source in sources:
        if source.config.chat_fields and not source.config.images_field:
            lengths = sample_lengths(source.config, source.stored, tokenizer)
            are_pairs = source.config.preference_pairs
            text = cut_conversations(source.config.name, lengths, row_tokens, are_pairs=are_pairs)
            if text is not None:
                yield Note("cut_conversations", text)


def _versions(config: SourceConfig, root: Path) -> ContentVersions:
    """Return the remembered hashes of the files of a source."""
    definition = canonical_json([config.format, list(config.paths)])
    return ContentVersions(root / VERSIONS_NAME / f"{hashlib.sha256(definition).hexdigest()[:16]}.json")


def _list(config: SourceConfig, key: str, root: Path, report: PrepareProgress, is_dry: bool) -> Source:
    return list_source(
        config, key=key, versions=_versions(config, root), remember=not is_dry,
        on_progress=lambda done, total: report(f"list {config.name}", done, total, {}),
    )  # fmt: skip


def _without(source: Source, versions: frozenset[str]) -> Source:
    """Return the source without the files of ``data.validation.sources``.

    Raises:
        DataError: No file remains.
    """
    found = [index for index, file in enumerate(source.files) if file.version in versions]
    if not found:
        return source
    if len(found) == len(source.files):
        raise DataError(
            f"All files of source {source.config.name!r} are in data.validation.sources, so no training text remains",
            where=f"{source.key}.paths", hint="name different files in one of the two",
        )  # fmt: skip
    note = Note("validation", f"{len(found):,} of the files of source {source.config.name!r} validate and do not train")
    return without_files(source, found, note)


def _tokenizer(
    config: RunConfig,
    sources: Sequence[Source],
    validation: Sequence[Source],
    weights: Sequence[Fraction],
    root: Path,
    report: PrepareProgress,
    *,
    build: bool,
    is_dry: bool,
) -> Tokenizer | None:
    try:
        return resolve_tokenizer(
            config.tokenizer, config.data, sources, weights, validation=validation, root=root, build=build,
            on_progress=lambda done, total: report("tokenizer", done, total, {}),
        )  # fmt: skip
    except DataError:
        if is_dry and config.tokenizer.kind in {"bpe", "char"}:
            return None  # the run will train it
        raise


def _with_cached_holdout(source: Source, data: DataConfig, directory: Path, *, remember: bool = True) -> Source:
    """Return the source with its holdout rule, from the cache of rules if possible.

    A cached rule applies only to the same files, definition and settings. A lost or damaged entry only costs reading
    the source again. Before a rule is chosen, the columns of the source are checked.

    Args:
        source: The source.
        data: The section ``data``.
        directory: Directory of the cached rules.
        remember: Whether to cache a new rule.

    Raises:
        ConfigError: The configured rule holds out nothing, or leaves nothing to train on; or a column is missing.
        DataError: A file cannot be read.
    """
    settings = [data.validation.model_dump(mode="json"), data.cache.unit_bytes, data.cache.grow]
    key = hashlib.sha256(canonical_json([source.digest, source.definition, *settings])).hexdigest()
    path = directory / f"holdout-{key[:24]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = read_json(path)
        if known["key"] == key:
            notes = [Note(kind, text) for kind, text in known["notes"]]
            rule = ValidationConfig.model_validate(known["rule"])
            share = known["held_out_share"]
            return replace(source, holdout=rule, held_out_share=share, notes=(*source.notes, *notes))
    unseen = [Note("unseen_column", text) for text in check_columns(source.config, source.stored, source.key)]
    chosen = select_holdout(replace(source, notes=(*source.notes, *unseen)), data)
    if remember:
        notes = [[note.kind, note.text] for note in chosen.notes[len(source.notes) :]]
        rule = chosen.holdout.model_dump(mode="json")
        body = {"key": key, "rule": rule, "held_out_share": chosen.held_out_share, "notes": notes}
        with contextlib.suppress(OSError):  # on a read-only disk, the next start chooses it again
            make_directory(directory)
            write_file(path, canonical_json(body))
    return chosen
