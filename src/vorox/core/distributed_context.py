"""Who this process is among its peers. The default is one process alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DistributedContext:
    """Identity of this process in a run.

    Attributes:
        process_index: From 0.
        process_count: All processes of the run.
    """

    process_index: int = 0
    process_count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process decides, writes files and prints."""
        return self.process_index == 0
