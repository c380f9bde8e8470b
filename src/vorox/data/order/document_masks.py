"""Masked documents: rows of caches in, rows in which the documents of ``mask`` events are a filler out.

The tokens of a masked document become the end-of-text token, so that segments, positions and lengths stay, and none of
its tokens is a target; the number of targets of a row stays that of the stored row (``rows.py: assemble``). The
positions of its images stay, and the images become blank. A preference pair is one document. A document
is named by source, version of its file, and record, which stay when a cache is shared, grows or moves. Only rows of
units that may hold a masked document are looked at one by one; a plan without ``mask`` events costs nothing.

Shape legend: N rows of a block, C stored tokens of a row.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError, DataError
from vorox.data.documents import units_with
from vorox.data.images.decoding import BlankImage
from vorox.data.images.tokens import find_images, is_image, replace_addresses
from vorox.data.order.difficulty_buckets import SourceReader, cache_of
from vorox.data.order.plan_events import MaskEvent
from vorox.data.order.plan_state import PlanState, Positions
from vorox.data.recipe import Recipe
from vorox.data.rows import RowBlock, RowReader, TokenArray, row_digests

Record = tuple[str, int]
"""Version of a file, and index of a record in it."""


class DocumentMasks:
    """The masked documents of a plan. Thread-safe.

    Args:
        state: The plan.

    Attributes:
        events: The events that mask them.
    """

    def __init__(self, state: PlanState) -> None:
        self.events: tuple[MaskEvent, ...] = state.masks
        self._sources = [source.configured_name for source in state.sources]
        self._starts: dict[str, dict[Record, int]] = defaultdict(dict)
        for event in state.masks:
            for document in event.documents:
                known = self._starts[document.source]
                record = document.file_version, document.ordinal
                known[record] = min(event.start_position, known.get(record, event.start_position))
        self._units: weakref.WeakKeyDictionary[SourceReader, tuple[int, npt.NDArray[np.int64]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def starts_of(self, source: str) -> Mapping[Record, int]:
        """Return the masked documents of a configured source, each with the first position of its filler."""
        return self._starts.get(source, {})

    def is_masked(self, source_index: int, file_version: str, ordinal: int, position: int) -> bool:
        """Whether a document is masked in the row at a position."""
        start = self._of(source_index).get((file_version, ordinal))
        return start is not None and position >= start

    def apply(
        self,
        block: RowBlock,
        positions: Positions,
        source_index: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        readers: Sequence[RowReader | None],
    ) -> RowBlock:
        """Return a block with its masked documents.

        Args:
            block: Rows as stored, in any order.
            positions: Position of each row.
            source_index: Source of each row.
            rows: Row number of each row in the cache of its source.
            readers: The caches of the plan's sources.

        Raises:
            DataError: A chunk is missing or damaged.
        """
        masked_NC = np.zeros(block.tokens_NC.shape, np.bool_)
        tokens_NC, blanks = block.tokens_NC.copy(), dict[int, BlankImage]()
        for index in np.unique(source_index).tolist():
            reader = cast("SourceReader | None", readers[index])
            if reader is None or not self._of(index):
                continue
            chosen = np.flatnonzero(source_index == index)
            units = np.searchsorted(reader.unit_row_starts, rows[chosen], side="right") - 1
            for at in chosen[np.isin(units, self._units_of(index, reader))].tolist():
                end = 0
                for span in reader.documents_of(int(rows[at])):
                    start, end = end, end + span.length
                    version = reader.files[span.file_index].version
                    masked_NC[at, start:end] = self.is_masked(index, version, span.ordinal, int(positions[at]))
                filler_C, found = _filler(tokens_NC[at, masked_NC[at]], reader.recipe, block.images)
                tokens_NC[at, masked_NC[at]], blanks = filler_C, blanks | found
        if not masked_NC.any():
            return block
        return replace(
            block, tokens_NC=tokens_NC, masked_NC=masked_NC, images={**block.images, **blanks},
            stored_digests_N=row_digests(block),
        )  # fmt: skip

    def _of(self, source_index: int) -> Mapping[Record, int]:
        return self.starts_of(self._sources[source_index])

    def _units_of(self, source_index: int, reader: SourceReader) -> npt.NDArray[np.int64]:
        """Return the units of a cache that may hold a masked document of a source."""
        num_units = len(reader.unit_row_starts) - 1
        with self._lock:
            known = self._units.get(reader)
            if known is None or known[0] != num_units:
                known = num_units, units_with(self._of(source_index), reader.files, reader.units)
                self._units[reader] = known
            return known[1]


def _filler(
    tokens_C: TokenArray, recipe: Recipe, images: Mapping[int, bytes | BlankImage]
) -> tuple[TokenArray, dict[int, BlankImage]]:
    """Return what stands for the tokens of masked documents, and the blank images in it by their addresses."""
    filler_C = np.full_like(tokens_C, recipe.filler_id)
    if recipe.images is None:
        return filler_C, {}
    _, digests = find_images(tokens_C[None])
    blanks = [BlankImage.like(cast("bytes", images[digest]), recipe.images) for digest in digests]
    filler_C = np.where(is_image(tokens_C), tokens_C, filler_C)
    replace_addresses(filler_C, [blank.address for blank in blanks])
    return filler_C, {blank.address: blank for blank in blanks}


def check_erased(
    block: RowBlock,
    source_index: npt.NDArray[np.integer],
    rows: npt.NDArray[np.int64],
    readers: Sequence[RowReader | None],
) -> None:
    """Refuse rows with an erased document that is not masked, before anything is computed from them.

    Args:
        block: Rows with their masked documents, in any order.
        source_index: Source of each row.
        rows: Row number of each row in the cache of its source.
        readers: The caches of the sources.

    Raises:
        DataError: A row has such a document.
    """
    if block.erased_NC is None:
        return
    left_NC = block.erased_NC if block.masked_NC is None else block.erased_NC & ~block.masked_NC
    if not left_NC.any():
        return
    at, token = (int(index) for index in np.argwhere(left_NC)[0])
    reader = cast("SourceReader", readers[int(source_index[at])])
    spans = reader.documents_of(int(rows[at]))
    ends = accumulate(span.length for span in spans)
    document = next(span for span, end in zip(spans, ends, strict=True) if token < end)
    name = f"{document.uri}:{document.ordinal}"
    raise DataError(
        f"A row needs document {name}, which was erased from the cache", where=str(cache_of(reader).directory),
        hint=f"leave the document out, with `vorox fork RUN --step N --without-document {name}` at a step before its "
        "first row; or set data.cache.directory to another directory to build a cache from a source that has it",
    )  # fmt: skip


def check_masks(state: PlanState, *, document_mask: bool, is_planned: bool = True) -> None:
    """Refuse masked documents where other documents of their rows see them.

    Args:
        state: The plan, with the masks.
        document_mask: Whether attention is confined to a document.
        is_planned: Whether the plan masks them already; ``False`` to check a mask before it is added.

    Raises:
        ConfigError: Rows are not separated into documents.
    """
    if not state.masks or document_mask:
        return
    what = "documents of a row that see each other (data.document_mask=false)"
    if is_planned:
        raise ConfigError(
            f"The data plan masks documents, which is not possible with {what}", where="data.document_mask",
            hint="continue from a checkpoint before the documents were masked, or start a new run without them",
        )  # fmt: skip
    raise ConfigError(
        f"Documents of this run cannot be masked, because of {what}", where="data.document_mask",
        hint="fork it without a source, or with other settings, instead",
    )  # fmt: skip
