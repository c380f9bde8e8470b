"""The text behind tokens: read from the document's file if unchanged, else decoded from the cache.

A run and a document in one of its rows go in; the text of exactly those tokens comes out, with its origin. The file is
unchanged if the record's text has the hash recorded at packing and its tokens equal those of the row; otherwise the
result includes the reason.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import VoroxError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import SourceConfig
from vorox.data.cache.units.document_tokens import encode, framed
from vorox.data.chat.loss_mask import marked_text, target_ranges
from vorox.data.chat.template import rendered
from vorox.data.documents import BadRecord, Ranges, TokenDocument
from vorox.data.images.reading import ImageFolder, load_images, placed
from vorox.data.order.difficulty_buckets import cache_of
from vorox.data.provenance.queries import DocumentOrigin, RowOrigin, RunDataIndex
from vorox.data.recipe import Recipe
from vorox.data.storage import StoredFile, cache_ranges, list_files, relative_name
from vorox.data.text.formats import read_record
from vorox.data.tokenizers.loading import load
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.records.run_context import recorded_config


@dataclass(frozen=True, slots=True)
class FoundText:
    """A text and its origin.

    Attributes:
        text: The text of the tokens in the row.
        origin: ``source``: read from the file, identical to the text trained on. ``cache``: decoded from the tokens.
        why: The reason why it is not from the source; empty if it is.
        targets: Ranges of its tokens that are trained on; ``None``: all but the first are.
        marked_text: The decoded tokens with the targets between brackets; ``None`` like ``targets``.
    """

    text: str
    origin: Literal["source", "cache"]
    why: str = ""
    targets: Ranges | None = None
    marked_text: str | None = None


class TextFinder:
    """Finds the texts of a run; lists each file once."""

    def __init__(self, run_data: RunDataIndex) -> None:
        self._run_data = run_data
        self._files: dict[str, StoredFile] = {}
        self._cached_ranges = ExitStack()

    def close(self) -> None:
        """Release the cached bytes of the files. Idempotent."""
        self._cached_ranges.close()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load(RunLayout(self._run_data.directory).tokenizer)

    @cached_property
    def _sources(self) -> dict[str, SourceConfig]:
        """The configured sources by name; sources removed from the configuration are missing."""
        return {source.name: source for source in recorded_config(self._run_data.directory).data.sources}

    def find(self, row: RowOrigin, document: DocumentOrigin) -> FoundText:
        """Return the text of a document's tokens in a row.

        Raises:
            DataError: The row cannot be read, or the run's tokenizer is missing.
        """
        if document.is_masked:
            return FoundText("", "cache", "the document is masked: the run trained on a filler in its place")
        if document.is_erased:
            return FoundText("", "cache", "the document was erased from the cache")
        block = cache_of(self._run_data.readers[row.source_index]).read_rows(np.array([row.row], np.int64))
        part = slice(document.row_token, document.row_token + document.num_tokens)
        found = self._find(row, document, block.tokens_NC[0, part].tolist())
        if block.loss_mask_NC is None:
            return found
        targets = target_ranges(block.loss_mask_NC[0, part])
        marked = marked_text(block.tokens_NC[0, part], targets, self._tokenizer.decode)
        return replace(found, targets=targets, marked_text=marked)

    def _find(self, row: RowOrigin, document: DocumentOrigin, tokens: list[int]) -> FoundText:
        try:
            return FoundText(self._from_source(row, document, tokens), "source")
        except _ChangedError as error:
            why = str(error)
        except VoroxError as error:
            why = error.what
        recipe = self._run_data.readers[row.source_index].recipe
        return FoundText(self._decoded(recipe, document, tokens), "cache", why)

    def _decoded(self, recipe: Recipe, document: DocumentOrigin, tokens: list[int]) -> str:
        """Decode tokens, without those before and after a document, which are no text."""
        first = max(len(recipe.start_ids) - document.first_token, 0)
        text_end = document.document_tokens - len(recipe.document_end_ids)
        return self._tokenizer.decode(tokens[first : max(text_end - document.first_token, 0)])

    def _from_source(self, row: RowOrigin, document: DocumentOrigin, tokens: list[int]) -> str:
        config = self._sources.get(self._run_data.plan.sources[row.source_index].configured_name)
        if config is None:
            raise _ChangedError("the run's configuration no longer has this source")
        place = (document.ordinal, document.byte_offset, document.byte_length)
        recipe = self._run_data.readers[row.source_index].recipe
        if config.has_tokens and config.end_of_text_id is None:
            config = config.model_copy(update={"end_of_text_id": recipe.end_of_text_id})
        template = self._tokenizer.chat_template if config.chat_fields else None
        names = (relative_name(path, document.uri) for path in config.paths)
        folder = ImageFolder.of(document.uri, next((name for name in names if name is not None), ""))
        record = placed(rendered(read_record(config, self._file(document), 0, *place), template), folder)
        if isinstance(record, BadRecord):
            raise _ChangedError(f"the file has changed since it was packed: bad record, {record.reason}")
        if isinstance(record, TokenDocument):
            made, text = record.tokens, None
        else:
            text = record.text
            if xxhash.xxh3_64_intdigest(text.encode()) != document.text_xxh3:
                raise _ChangedError("the file has changed since it was packed, or a transform changed the text")
            if record.images and recipe.images is not None:
                record = load_images(record, recipe.images)
            made = encode([record], (), self._tokenizer, images=recipe.images)[1][0]
        if _slice_framed(made, recipe, document.first_token, document.num_tokens) != tokens:
            raise _ChangedError("a transform changed the tokens, or the file has changed since it was packed")
        whole = text is not None and document.num_tokens == document.document_tokens
        return text if whole and text is not None else self._decoded(recipe, document, tokens)

    def _file(self, document: DocumentOrigin) -> StoredFile:
        """Return the file as it is now, or the version that was read if the store keeps versions."""
        known = self._files.get(document.uri)
        if known is None:
            (known,) = list_files(document.uri, ())
            if known.version is not None and known.version != document.version:
                known = replace(known, version=document.version)
            self._files[document.uri] = known
            self._cached_ranges.enter_context(cache_ranges([known]))
        return known


def _slice_framed(ids: npt.NDArray[Any], recipe: Recipe, first: int, count: int) -> list[int]:
    """Return some tokens of a document that has those before and after it, without a copy of a long one."""
    before = len(recipe.start_ids)
    if before <= first and first + count <= before + len(ids):
        return ids[first - before : first - before + count].tolist()
    return framed(ids, recipe)[first : first + count].tolist()


class _ChangedError(Exception):
    """The source no longer has the text that was packed; the message is the reason."""
