"""The sources of a configuration: their files, holdout rules and tokenizer.

A dry run and training both start here; nothing is built yet. Invariants: a file of ``data.validation.sources`` is never
trained on, even if a training source lists it under a different name; the same configuration and files give the same
sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.core.schema.data import DataConfig, SourceConfig, ValidationConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.cache.report import PrepareProgress
from vorox.data.chat_template import BUILT_IN
from vorox.data.growing_tokenizer import growing_tokenizer
from vorox.data.storage import ContentVersions, cache_ranges
from vorox.data.text.holdout import ALL_HELD_OUT
from vorox.data.text.holdout_selection import describe_holdout, select_holdout
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source, list_source, with_tokenizer, without_files
from vorox.data.tokenizers.store import resolve_tokenizer, with_chat_template
from vorox.data.tokenizers.tokenizer import Tokenizer

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

    Raises:
        ConfigError: The configuration contradicts itself, or its holdout is empty.
        DataError: Text is missing or unreadable, the tokenizer is missing and ``build`` is off, or a cache cannot grow.
    """
    data = config.data
    validation = [
        replace(_list(source, f"data.validation.sources.{index}", root, report, is_dry), holdout=ALL_HELD_OUT)
        for index, source in enumerate(data.validation.sources)
    ]
    held_out = frozenset(file.version for source in validation for file in source.files)
    listed = [_list(source, f"data.sources.{index}", root, report, is_dry) for index, source in enumerate(data.sources)]
    sources = [_without(source, held_out) for source in listed]
    if reads is not None:
        for source in (*sources, *validation):
            reads.enter_context(cache_ranges(source.stored))
    # The documents of token shards end at the tokenizer's end-of-text id; a tokenizer is never trained on them.

    def choose_holdout(source: Source) -> Source:
        return _with_cached_holdout(source, data, root / VERSIONS_NAME, remember=not is_dry)

    sources = [source if source.config.has_tokens else choose_holdout(source) for source in sources]
    growth_notes: list[Note] = []
    if tokenizer is None:
        tokenizer, growth_notes = growing_tokenizer(config, sources, weights, root, force_rebuild=force_rebuild)
    if tokenizer is None:
        tokenizer = _tokenizer(config, sources, validation, weights, root, report, build=build, is_dry=is_dry)
    if tokenizer is not None:
        identity = (tokenizer.fingerprint, tokenizer.end_of_text_id, [config.tokenizer.path or config.tokenizer.kind])
        sources = [
            choose_holdout(with_tokenizer(source, *identity)) if source.config.has_tokens else source
            for source in sources
        ]
        validation = [with_tokenizer(source, *identity) for source in validation]
        if config.tokenizer.chat_template is not None or any(s.config.chat_fields for s in (*sources, *validation)):
            tokenizer = with_chat_template(tokenizer, config.tokenizer)
        sources, validation = (
            [replace(s, chat_template=tokenizer.chat_template) if s.config.chat_fields else s for s in listed]
            for listed in (sources, validation)
        )
    notes = [*_notes((*sources, *validation), tokenizer, config.tokenizer), *growth_notes]
    return ListedSources(tuple(sources), tuple(validation), tokenizer, tuple(notes))


def _notes(sources: Sequence[Source], tokenizer: Tokenizer | None, section: TokenizerConfig) -> list[Note]:
    """Return what was noticed about sources with their tokenizer."""
    notes = [note for source in sources for note in source.notes] + _chat_notes(sources)
    if tokenizer is not None and section.kind == "bpe" and tokenizer.vocab_size < section.vocab_size:
        text = f"the vocabulary has {tokenizer.vocab_size:,} tokens, not tokenizer.vocab_size={section.vocab_size:,}"
        notes.append(Note("vocabulary", f"{text}: the text has no further pairs to merge"))
    return notes


def _chat_notes(sources: Sequence[Source]) -> list[Note]:
    names = ", ".join(source.config.name for source in sources if source.chat_template is not None)
    template = next((source.chat_template for source in sources if source.chat_template is not None), None)
    if template is None:
        return []
    name = next((name for name, source in BUILT_IN.items() if source == template.source), "of the tokenizer or a file")
    is_text = name == "chatml" and "<|im_end|>" not in template.special_tokens
    text = "; its tokens are text, not special tokens of this tokenizer" if is_text else ""
    is_optional = all(source.config.preference_pairs for source in sources if source.chat_template is not None)
    template_of = " for lists of messages" if is_optional else ""  # pairs of texts have no template
    return [Note("conversations", f"trains on the answers of {names}; chat template {name}{template_of}{text}")]


def _list(config: SourceConfig, key: str, root: Path, report: PrepareProgress, is_dry: bool) -> Source:
    definition = canonical_json([config.format, list(config.paths)])
    versions = ContentVersions(root / VERSIONS_NAME / f"{hashlib.sha256(definition).hexdigest()[:16]}.json")
    return list_source(
        config, key=key, versions=versions, remember=not is_dry,
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
    the source again.

    Args:
        source: The source.
        data: The section ``data``.
        directory: Directory of the cached rules.
        remember: Whether to cache a new rule.

    Raises:
        ConfigError: The configured rule holds out nothing, or leaves nothing to train on.
        DataError: A file cannot be read.
    """
    settings = [data.validation.model_dump(mode="json"), data.cache.unit_bytes, data.cache.grow]
    key = hashlib.sha256(canonical_json([source.digest, source.definition, *settings])).hexdigest()
    path = directory / f"holdout-{key[:24]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_bytes())
        if known["key"] == key:
            notes = [Note(kind, text) for kind, text in known["notes"]]
            rule = ValidationConfig.model_validate(known["rule"])
            share = known["held_out_share"]
            return replace(source, holdout=rule, held_out_share=share, notes=(*source.notes, *notes))
    chosen = select_holdout(source, data)
    if remember:
        notes = [[note.kind, note.text] for note in chosen.notes[len(source.notes) :]]
        rule = chosen.holdout.model_dump(mode="json")
        body = {"key": key, "rule": rule, "held_out_share": chosen.held_out_share, "notes": notes}
        with contextlib.suppress(OSError):  # on a read-only disk, the next start chooses it again
            make_directory(directory)
            write_file(path, canonical_json(body))
    return chosen
