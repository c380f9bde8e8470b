"""The sources of a configuration, listed: their files, the tokenizer of their text, and what of it is held out.

What training and a dry run both need, and all that can be known before anything is built. Invariants: a file that
validates trains nothing, under whatever name it is listed a second time; the same configuration and files give the
same lists.
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
from vorox.data.cache_opener import PrepareProgress
from vorox.data.storage import ContentVersions, cache_ranges
from vorox.data.text.holdout import ALL_HELD_OUT
from vorox.data.text.holdout_selection import describe_holdout, select_holdout
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source, list_source, with_tokenizer, without_files
from vorox.data.tokenizers.store import resolve_tokenizer
from vorox.data.tokenizers.tokenizer import Tokenizer

VERSIONS_NAME = "versions"
"""Below the root of the caches: what is remembered of sources, so that a second start need not read them."""


@dataclass(frozen=True, slots=True)
class ListedSources:
    """What a run reads, before anything of it is built.

    Attributes:
        train: The sources of ``data.sources``, each with its held-out rule.
        validation: Those of ``data.validation.sources``.
        tokenizer: Of all of them; ``None`` where it is still to be trained and was not to be.
        notes: What a person should know although nothing is wrong.
    """

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    tokenizer: Tokenizer | None
    notes: tuple[Note, ...] = ()

    @property
    def held_out(self) -> str:
        """What is validated on, for a person."""
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
    reads: ExitStack | None = None,
) -> ListedSources:
    """List all sources and choose what is held out.

    Args:
        config: The whole configuration.
        weights: Share of each source in the training rows.
        root: Root of the caches.
        report: Told how it goes.
        tokenizer: That of the run which goes on; ``None`` takes or trains the configured one.
        build: Train a tokenizer that is missing.
        is_dry: Write nothing, and go without a tokenizer that is still to be trained.
        reads: What is read of the files is shared in memory until this is closed, so that it is not fetched twice.

    Raises:
        ConfigError: The configuration contradicts itself, or holds out nothing where it should.
        DataError: Text is missing or unreadable, or the tokenizer is missing and ``build`` is off.
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
    # Where the documents of token shards end, only the tokenizer tells; it is never trained on them.

    def choose_holdout(source: Source) -> Source:
        return _with_cached_holdout(source, data, root / VERSIONS_NAME, remember=not is_dry)

    sources = [source if source.config.has_tokens else choose_holdout(source) for source in sources]
    if tokenizer is None:
        tokenizer = _tokenizer(config, sources, validation, weights, root, report, build=build, is_dry=is_dry)
    if tokenizer is not None:
        identity = (tokenizer.fingerprint, tokenizer.end_of_text_id, [config.tokenizer.path or config.tokenizer.kind])
        sources = [
            choose_holdout(with_tokenizer(source, *identity)) if source.config.has_tokens else source
            for source in sources
        ]
        validation = [with_tokenizer(source, *identity) for source in validation]
    notes = [note for source in (*sources, *validation) for note in source.notes]
    section = config.tokenizer
    if tokenizer is not None and section.kind == "bpe" and tokenizer.vocab_size < section.vocab_size:
        text = f"the vocabulary has {tokenizer.vocab_size:,} tokens, not tokenizer.vocab_size={section.vocab_size:,}"
        notes.append(Note("vocabulary", f"{text}: the text has no more pairs of tokens"))
    return ListedSources(tuple(sources), tuple(validation), tokenizer, tuple(notes))


def _list(config: SourceConfig, key: str, root: Path, report: PrepareProgress, is_dry: bool) -> Source:
    definition = canonical_json([config.format, list(config.paths)])
    versions = ContentVersions(root / VERSIONS_NAME / f"{hashlib.sha256(definition).hexdigest()[:16]}.json")
    return list_source(
        config, key=key, versions=versions, remember=not is_dry,
        on_progress=lambda done, total: report(f"list {config.name}", done, total, {}),
    )  # fmt: skip


def _without(source: Source, versions: frozenset[str]) -> Source:
    """The source without the files of data.validation.sources.

    Raises:
        DataError: None is left.
    """
    found = [index for index, file in enumerate(source.files) if file.version in versions]
    if not found:
        return source
    if len(found) == len(source.files):
        raise DataError(
            f"all files of source {source.config.name!r} are in data.validation.sources, so none is left to train on",
            where=f"{source.key}.paths", hint="name other files in one of the two",
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
            return None  # it will be trained
        raise


def _with_cached_holdout(source: Source, data: DataConfig, directory: Path, *, remember: bool = True) -> Source:
    """Return the source with the rule by which its text is held out.

    Args:
        source: The source.
        data: The section ``data``.
        directory: Where rules are remembered.
        remember: Keep a rule that is chosen now.

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
            return replace(source, holdout=rule, notes=(*source.notes, *notes))
    chosen = select_holdout(source, data)
    if remember:
        notes = [[note.kind, note.text] for note in chosen.notes[len(source.notes) :]]
        body = {"key": key, "rule": chosen.holdout.model_dump(mode="json"), "notes": notes}
        with contextlib.suppress(OSError):  # on a disk that is read-only it is chosen again
            make_directory(directory)
            write_file(path, canonical_json(body))
    return chosen
