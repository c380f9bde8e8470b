"""Reading the units of a source: what ``read_unit`` gives, with the bytes fetched before where that is possible.

A source and a split go in once, units go in one by one, records come out. The reader can be pickled, so that other
processes and machines read the same. Invariant: fetching changes when bytes are read, never which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vorox.core.schema.data import ValidationConfig
from vorox.data.documents import Record, Unit
from vorox.data.storage import Fetched, StoredFile, open_range, retry_budget, scheme_of
from vorox.data.text.holdout import Split
from vorox.data.text.range_cache import CUT_RANGES
from vorox.data.text.signatures import compression_by_suffix
from vorox.data.text.sources import Source, patience, read_unit

_PLAIN_FORMATS = frozenset({"txt", "jsonl", "csv", "bin"})


@dataclass(frozen=True, slots=True)
class UnitReader:
    """A ``ReadUnit`` of one split of a source."""

    source: Source
    split: Split
    validation: ValidationConfig

    def __call__(self, unit: Unit) -> Iterator[Record]:
        return read_unit(self.source, unit, self.split, self.validation)

    @property
    def fetches(self) -> bool:
        """Whether any of the text is fetched apart from being decoded: that of plain files in remote stores.

        Compressed files and Parquet decide while they are decoded which bytes they need.
        """
        return any(self._is_plain(file) for file in self.source.stored)

    def fetched_bytes(self, unit: Unit) -> int:
        """Bytes that ``fetch`` would hold."""
        files = self.source.stored
        return sum(span.end_byte - span.start_byte for span in unit.spans if self._is_plain(files[span.file_index]))

    def fetch(self, unit: Unit) -> Fetched:
        """Read the bytes of a unit that can be read without decoding, unless they were read when it was cut.

        Raises:
            DataError: A file cannot be read, or changed since it was listed.
        """
        pieces: list[tuple[StoredFile, int, bytes]] = []
        with retry_budget(patience(self.source.config)):
            for span in unit.spans:
                file = self.source.stored[span.file_index]
                if not self._is_plain(file):
                    continue
                piece = CUT_RANGES.range_of(file, span.start_byte, span.end_byte)
                if piece is None:
                    with open_range(file, span.start_byte, span.end_byte) as reader:
                        piece = reader.read(span.end_byte - span.start_byte)
                pieces.append((file, span.start_byte, piece))
        return Fetched(tuple(pieces))

    def _is_plain(self, file: StoredFile) -> bool:
        plain = self.source.config.format in _PLAIN_FORMATS and compression_by_suffix(file.uri) is None
        return plain and scheme_of(file.uri) is not None
