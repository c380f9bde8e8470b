"""Where documents still act in a run that masks them, and what shares their text.

In: a run and documents of it. Out: every way in which a run depends on a document besides an update that reads it, each
answered with its evidence, and the documents that share its text. Masking leaves a document its place: what only its
length decides stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vorox.core.config import config_values
from vorox.core.files.json_reader import mapping
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.core.schema.data import SourceConfig
from vorox.core.user_code.trusted_code import function_names
from vorox.data.cache.building.report import transform_counts
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.run_views import HOLDOUT_NOTE, VALIDATION_NOTE
from vorox.data.order.difficulty_buckets import cache_of
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.contamination import NGRAM_TOKENS, EvaluationRecord, find_contamination
from vorox.data.provenance.queries import when
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.transforms.apply import TransformCount
from vorox.data.transforms.registry import transforms_of
from vorox.records.run_lookup import attempt_notes
from vorox.training.reports.document_search import Finding

Answer = Literal["yes", "no", "unknown"]
Documents = Mapping[str, Sequence[MaskedDocument]]
"""By the name that was typed, as ``named_documents`` returns them."""
_LEAST_FRACTION = 0.1
_MOST_SHARING = 20


@dataclass(frozen=True, slots=True)
class Trace:
    """A way in which documents may act in a run that masks them.

    Attributes:
        place: What they may act through.
        answer: Whether they do.
        evidence: How that is known.
    """

    place: str
    answer: Answer
    evidence: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A document that shares text with one that is unlearned, and stays.

    Attributes:
        name: It, as ``FILE:RECORD``.
        of: The unlearned document.
        fraction: Share of that document's n-grams that it has; 1 of an equal text.
        steps: The steps that read it, ascending.
    """

    name: str
    of: str
    fraction: float
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DocumentText:
    """What the caches of a run hold of a document.

    Attributes:
        name: As it was typed.
        uri: Its file.
        ordinal: Index of the record in it, from 0.
        source: Its source in the configuration.
        cache: The directory that holds it.
        ids: Its tokens, in every copy that transforms made of it; empty if they are erased.
        hashes: The xxh3-64 of its text; empty if it is erased.
        num_rows: Rows with tokens of it.
        num_tokens: Its tokens in them, erased or not.
    """

    name: str
    uri: str
    ordinal: int
    source: str
    cache: Path
    ids: tuple[npt.NDArray[np.int64], ...]
    hashes: frozenset[int]
    num_rows: int
    num_tokens: int


def texts_of(run_data: RunDataIndex, documents: Documents) -> list[DocumentText]:
    """Return what the caches of a run hold of documents.

    Raises:
        DataError: A chunk is missing or damaged.
    """
    caches = caches_by_source(run_data)
    return [
        _text_of(name, document, caches[document.source]) for name, named in documents.items() for document in named
    ]


def caches_by_source(run_data: RunDataIndex) -> dict[str, CacheReader]:
    """Return the cache of every configured source."""
    pairs = zip(run_data.plan.sources, run_data.readers, strict=True)
    return {source.configured_name: cache_of(reader) for source, reader in pairs}


def _text_of(name: str, document: MaskedDocument, cache: CacheReader) -> DocumentText:
    parts: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    hashes, rows, uri = set[int](), set[int](), ""
    for number, file in enumerate(cache.files):
        if file.version != document.file_version:
            continue
        for row in cache.rows_of_document(number, ordinal=document.ordinal).tolist():
            tokens, end = cache.read_rows(np.array([row])).tokens_NC[0].astype(np.int64), 0
            for span in cache.documents_of(row):
                start, end = end, end + span.length
                if (span.file_index, span.ordinal) == (number, document.ordinal):
                    parts.setdefault(span.copy, {})[span.document_token_offset] = tokens[start:end]
                    hashes.add(span.text_xxh3)
                    rows.add(row)
                    uri = file.uri
    num_tokens = sum(len(part) for found in parts.values() for part in found.values())
    hashes.discard(0)
    if not hashes:
        parts.clear()  # its text is erased, and these are filler
    ids = tuple(np.concatenate([found[at] for at in sorted(found)]) for found in parts.values())
    return DocumentText(
        name, uri, document.ordinal, document.source, cache.directory, ids, frozenset(hashes), len(rows), num_tokens
    )


def copies_of(run_data: RunDataIndex, texts: Sequence[DocumentText]) -> list[Copy]:
    """Return the documents that updates read and that share text with others, those with most first.

    Of other texts, n-grams of 13 tokens are compared, as ``contamination`` does; equal ones are found at any length.
    Documents that the run masks are left out.

    Raises:
        DataError: A chunk is missing or damaged.
    """
    if not len(run_data.applied_steps()):
        return []
    length = min(NGRAM_TOKENS, *(reader.row_tokens for reader in run_data.readers))
    records = [EvaluationRecord(text.uri, text.ordinal, ids) for text in texts for ids in text.ids]
    num_ngrams = {(one.uri, one.ordinal): _num_ngrams(one.ids, length) for one in records}
    shared = find_contamination(run_data, records, ngram_tokens=length, num_documents=_MOST_SHARING).records
    masked = _masked(run_data) | {(text.uri, text.ordinal) for text in texts}
    found: dict[tuple[str, int, str], Copy] = {}
    for record in shared:
        of = f"{record.uri}:{record.ordinal}"
        for one in record.documents:
            fraction = min(1.0, one.num_ngrams / num_ngrams[record.uri, record.ordinal])
            if (one.uri, one.ordinal) not in masked and one.steps and fraction >= _LEAST_FRACTION:
                found[one.uri, one.ordinal, of] = Copy(f"{one.uri}:{one.ordinal}", of, fraction, one.steps)
    for text, uri, ordinal in _equal_texts(run_data, texts):
        if (uri, ordinal) in masked:
            continue
        occurrences = when(run_data, uri, ordinal=ordinal)
        if steps := {one.step for one in occurrences if one.state in ("kept", "open") and not one.is_masked}:
            of = f"{text.uri}:{text.ordinal}"
            found[uri, ordinal, of] = Copy(f"{uri}:{ordinal}", of, 1.0, tuple(sorted(steps)))
    return sorted(found.values(), key=lambda copy: (-copy.fraction, copy.name, copy.of))


def _num_ngrams(ids: npt.NDArray[np.int64], length: int) -> int:
    """Return the number of distinct n-grams, at least 1."""
    if len(ids) < length:
        return 1
    return len(np.unique(np.lib.stride_tricks.sliding_window_view(ids, length), axis=0))


def _masked(run_data: RunDataIndex) -> set[tuple[str, int]]:
    """Return file and record of every document that the plan masks."""
    caches = caches_by_source(run_data)
    masked = {one for event in run_data.plan.state.masks for one in event.documents}
    return {
        (file.uri, one.ordinal)
        for one in masked
        if one.source in caches
        for file in caches[one.source].files
        if file.version == one.file_version
    }


def _equal_texts(run_data: RunDataIndex, texts: Sequence[DocumentText]) -> Iterator[tuple[DocumentText, str, int]]:
    """Yield the documents with an equal text: whose it equals, their file and record."""
    by_hash = {found: text for text in texts for found in text.hashes}
    for cache in {one.directory: one for one in caches_by_source(run_data).values()}.values():
        spans = {span for row in cache.rows_of_text([*by_hash]).tolist() for span in cache.documents_of(row)}
        for uri, ordinal, found in sorted({(span.uri, span.ordinal, span.text_xxh3) for span in spans}):
            if found in by_hash:
                yield by_hash[found], uri, ordinal


def traces_of(
    run_data: RunDataIndex, config: RunConfig, texts: Sequence[DocumentText], findings: Sequence[Finding]
) -> list[Trace]:
    """Return every way in which documents may act in a run that masks them, those first that matter most.

    Args:
        run_data: The run.
        config: Its configuration.
        texts: The documents.
        findings: What all known runs saw of them, this run among them.
    """
    num_rows, num_tokens = sum(text.num_rows for text in texts), sum(text.num_tokens for text in texts)
    is_erased, validation = not all(text.hashes for text in texts), _validation(run_data, texts)
    tokens = f"{pluralize(num_tokens, 'token')} in {pluralize(num_rows, 'row')}"
    sources = [source for source in config.data.sources if source.name in {text.source for text in texts}]
    train = config.train
    has_images = any(cache.recipe.images is not None for cache in caches_by_source(run_data).values())
    filler = "filler and black images of the same shape" if has_images else "filler"
    counted = "preference pairs" if config.loss.name == "dpo" else "targets"
    return [
        _base_weights(run_data.directory, config, findings, is_erased=is_erased),
        _teacher(config, findings, is_erased=is_erased),
        _tokenizer(run_data, config),
        Trace("borders of rows", "yes", f"its {tokens} keep their places, as {filler}: other text lies where it lay"),
        Trace("order of rows", "yes", "the keys that shuffle rows hash their text, its own among it"),
        Trace("divisor of the loss", "yes", f"steps divide by the recorded number of {counted}, its own among them"),
        _deduplication(run_data, config, sources),
        _buckets(sources),
        Trace("mixture of sources", "yes", "a source counts its rows, which also hold its filler")
        if len(config.data.sources) > 1
        else Trace("mixture of sources", "no", "the run has one source"),
        Trace("length of the run", "no", f"train.num_steps={train.num_steps}")
        if train.num_steps is not None
        else Trace("length of the run", "no", f"train.num_tokens={train.num_tokens}")
        if train.num_tokens is not None
        else Trace("length of the run", "yes", f"train.num_epochs={train.num_epochs} counts the rows of the text"),
        validation,
        Trace("choice of checkpoints", validation.answer, "the fork validates itself, on what its validation set has"),
        Trace("moving average of the weights", "no", "it goes on from a state that no update from it had changed")
        if config.train.ema_decay is not None
        else Trace("moving average of the weights", "no", "the run keeps none"),
        _own_code(config),
    ]


def _base_weights(directory: Path, config: RunConfig, findings: Sequence[Finding], *, is_erased: bool) -> Trace:
    place, run = "initial weights", next(one for one in findings if one.directory.resolve() == directory.resolve())
    started_from = [str(found) for found in attempt_notes(directory, "from_weights")]
    if run.inherited_from:
        return Trace(place, "yes", f"{run.inherited_from} read it: unlearn it there first")
    if run.unknown_weights:
        return Trace(place, "unknown", f"no run that was searched trained {run.unknown_weights}")
    if started_from and is_erased:
        return Trace(place, "unknown", f"its text is erased, and equal texts behind {started_from[0]} cannot be found")
    if started_from:
        return Trace(place, "no", f"no run behind {started_from[0]} read it")
    return Trace(place, "no", f"they are random (run.seed={config.run.seed})")


def _teacher(config: RunConfig, findings: Sequence[Finding], *, is_erased: bool) -> Trace:
    teacher, logits = config.train.distillation.teacher, config.train.distillation.logits
    if logits is not None:
        return Trace("teacher", "unknown", f"nothing says what the teacher of the stored logits in {logits} read")
    if teacher is None:
        return Trace("teacher", "no", "the run has none")
    name, _, step = teacher.partition("@")
    known = [one for one in findings if name in (one.directory.name, str(one.directory)) and not one.problem]
    if not known or known[0].is_incomplete or known[0].unknown_weights:
        return Trace("teacher", "unknown", f"no run that was searched trained {teacher}")
    first = 0 if known[0].inherited_from else known[0].first_step
    if first is None and is_erased:
        return Trace("teacher", "unknown", f"its text is erased, and equal texts that {teacher} read cannot be found")
    if first is None or (step.isdecimal() and int(step) < first):
        return Trace("teacher", "no", f"{teacher} did not read it")
    return Trace("teacher", "yes", f"{teacher} read it: unlearn it there first")


def _tokenizer(run_data: RunDataIndex, config: RunConfig) -> Trace:
    tokenizer, place = config.tokenizer, "tokenizer"
    if tokenizer.kind == "byte":
        return Trace(place, "no", "tokenizer.kind=byte has no training")
    if tokenizer.kind == "char":
        return Trace(place, "yes", "tokenizer.kind=char has the characters of the whole text")
    if tokenizer.kind != "bpe":
        return Trace(place, "unknown", f"tokenizer.kind={tokenizer.kind} is from elsewhere; the run did not train it")
    num_bytes = sum(int(cache.manifest.units["text_bytes"].sum()) for cache in caches_by_source(run_data).values())
    if num_bytes <= tokenizer.train_bytes:
        return Trace(place, "yes", "it was trained on the whole text, and is not trained again")
    return Trace(place, "unknown", f"it was trained on {tokenizer.train_bytes:,} of {num_bytes:,} bytes of the text")


def _deduplication(run_data: RunDataIndex, config: RunConfig, sources: Sequence[SourceConfig]) -> Trace:
    """Return what transforms that compare documents did."""
    caches = caches_by_source(run_data)
    removed = {
        transform.name: transform_counts(caches[source.name].directory).get(transform.purpose, TransformCount()).removed
        for source in sources
        for transform in transforms_of(config.data, source, "train", source.name)
        if transform.kind == "duplicates"
    }
    num_removed = sum(removed.values())
    if not num_removed:
        evidence = f"{', '.join(removed)} removed no document" if removed else "no transform compares documents"
        return Trace("deduplication", "no", evidence)
    return Trace(
        "deduplication", "unknown",
        f"{', '.join(removed)} removed {pluralize(num_removed, 'document')}; one of them may have been like it",
    )  # fmt: skip


def _buckets(sources: Sequence[SourceConfig]) -> Trace:
    split = [source for source in sources if source.split_by is not None]
    if not split:
        return Trace("difficulty buckets", "no", "its source is not split")
    return Trace("difficulty buckets", "yes", f"source {split[0].name} is split by {split[0].split_by} of its chunks")


def _validation(run_data: RunDataIndex, texts: Sequence[DocumentText]) -> Trace:
    """Return whether the validation set has an equal text."""
    if not all(text.hashes for text in texts):
        return Trace("validation", "unknown", "its text is erased from the cache, and cannot be compared")
    hashes = sorted({found for text in texts for found in text.hashes})
    directories = {
        Path(str(path)): None
        for note in (HOLDOUT_NOTE, VALIDATION_NOTE)
        for caches in attempt_notes(run_data.directory, note)
        for path in mapping(caches).values()
    }
    for directory in directories:
        if not directory.is_dir():
            return Trace("validation", "unknown", f"the cache {directory} is gone")
        cache = CacheReader.open(directory, complete=False)
        for row in cache.rows_of_text(hashes).tolist():
            for span in cache.documents_of(row):
                if span.text_xxh3 in hashes:
                    return Trace(
                        "validation",
                        "yes",
                        f"{span.uri}:{span.ordinal} has the same text, and is in the validation set",
                    )
    return Trace("validation", "no", "no validation set has a document of equal text")


def _own_code(config: RunConfig) -> Trace:
    names = sorted(set(function_names(config_values(config))))
    if not names:
        return Trace("own code", "no", "the run has none")
    return Trace("own code", "unknown", f"{', '.join(names)} may have read anything")
