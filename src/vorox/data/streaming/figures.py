"""What a stream did since it was opened, counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vorox.data.cache.unit_builder import BuiltUnit


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What a stream did since it was opened.

    Attributes:
        units_built: Units built for the first time.
        units_rebuilt: Units built again because their chunks had been removed.
        text_bytes: UTF-8 bytes of text that became tokens, those of units built again included.
        tokens: Their tokens.
        evicted_units: Units whose chunks were removed.
    """

    units_built: int = 0
    units_rebuilt: int = 0
    text_bytes: int = 0
    tokens: int = 0
    evicted_units: int = 0

    def with_unit(self, built: BuiltUnit, *, is_new: bool) -> StreamStatistics:
        """Counted with a unit that was built, for the first time or again."""
        return replace(
            self,
            units_built=self.units_built + is_new,
            units_rebuilt=self.units_rebuilt + (not is_new),
            text_bytes=self.text_bytes + built.statistics.text_bytes,
            tokens=self.tokens + built.statistics.tokens,
        )

    def with_evicted_unit(self) -> StreamStatistics:
        """Counted with a unit whose chunks were removed."""
        return replace(self, evicted_units=self.evicted_units + 1)
