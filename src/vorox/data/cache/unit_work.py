"""What a unit of a cache comes to, and everything that decides it.

A ``UnitWork`` is what the units of one cache are a function of; ``run`` takes units and gives ``BuiltUnit``s in the
same order. Nothing is written here: whoever runs it (the builder, a process of it, a machine far away, the ring of a
stream) keeps the bytes or throws them away. Invariant: a unit's content is a function of the work and of the unit
alone, not of what else is run, where, in which order or by how many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vorox.core.errors import DataError
from vorox.data.cache import inventory
from vorox.data.cache.assemble import Encoder, chunk_contents, read_text
from vorox.data.cache.format import ChunkOrigin, ChunkRecord, encode_chunk
from vorox.data.cache.manifest import UnitStatistics
from vorox.data.cache.recipe import Recipe
from vorox.data.documents import BadRecord, Document, SourceFile, Unit

ReadUnit = Callable[[Unit], Iterable[Document | BadRecord]]
"""The records of a unit, in order. One that other processes can have: ``functools.partial(read_unit, source, ...)``."""

OnDocuments = Callable[[int, int, int], None]
"""Told the documents, UTF-8 bytes of text and tokens that were added, in the order of the units."""


@dataclass(frozen=True, slots=True)
class BuiltUnit:
    """All that a unit came to; nothing of it is written yet.

    Attributes:
        unit_id: The unit.
        chunks: The bytes of each chunk file and what the manifest says of it, in the order of their parts.
        statistics: What is in the chunks.
        bad_records: Records that could not be read.
        records_read: Records of the unit, bad and removed ones included: what the budget of bad ones is a share of.
        gave_up: Reading stopped because record after record was bad; the unit must not be committed.
    """

    unit_id: int
    chunks: tuple[tuple[bytes | bytearray, ChunkRecord], ...]
    statistics: UnitStatistics
    bad_records: tuple[BadRecord, ...]
    records_read: int
    gave_up: bool


@dataclass(frozen=True)
class UnitWork:
    """Everything that the units of a cache are a pure function of.

    It can be pickled where ``read_unit`` and ``tokenizer`` can, so that other processes and machines can run it.

    Attributes:
        files: The source's files.
        read_unit: Gives the records of a unit, in order.
        tokenizer: The recipe's tokenizer.
        recipe: What the rows are a function of.
        codec: Compression of the chunks; it changes their bytes, never their content.
        block_rows: Rows compressed together; None for about a thousand tokens.
    """

    files: Sequence[SourceFile]
    read_unit: ReadUnit
    tokenizer: Encoder
    recipe: Recipe
    codec: str = "lz4"
    block_rows: int | None = None

    def run(
        self,
        units: Iterable[Unit],
        *,
        on_documents: OnDocuments | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[BuiltUnit]:
        """Build units in the order given, reading ahead.

        Args:
            units: Taken one by one when there is room for another, so that they may be leased as they are taken.
            on_documents: Told after every batch of documents.
            stop: Asked before every unit; once it says yes, no more are taken.

        Raises:
            DataError: A text cannot be read or tokenised. The units before it have been given out.
        """
        for unit in units:
            if stop is not None and stop():
                return
            yield self._built(unit, on_documents or _silent)

    def origin(self, unit: Unit, part: int, num_parts: int) -> ChunkOrigin:
        """What the header of a chunk says that it belongs to."""
        source_set = inventory.source_set_digest(unit, self.files)
        return ChunkOrigin(unit.unit_id, part, num_parts, bytes.fromhex(self.recipe.digest), source_set)

    def _built(self, unit: Unit, on_documents: OnDocuments) -> BuiltUnit:
        try:
            text = read_text(self.read_unit(unit), self.files, self.tokenizer, self.recipe, on_documents)
        except OSError as error:
            raise DataError(
                f"unit {unit.unit_id} of the source cannot be read: {error.strerror or error}",
                where=str(error.filename or self.files[unit.spans[0].file_index].uri),
                hint="check that the file is there and may be read, then run the same command again",
            ) from error
        contents = [] if text.gave_up else chunk_contents(unit.unit_id, text, self.recipe)
        chunks = [
            encode_chunk(content, self.origin(unit, part, len(contents)), codec=self.codec, block_rows=self.block_rows)
            for part, content in enumerate(contents)
        ]
        return BuiltUnit(
            unit_id=unit.unit_id,
            chunks=tuple(chunks),
            statistics=text.statistics(unit.unit_id),
            bad_records=text.bad_records,
            records_read=len(text.documents_D) + len(text.bad_records),
            gave_up=text.gave_up,
        )


def _silent(documents: int, text_bytes: int, tokens: int) -> None:
    del documents, text_bytes, tokens
