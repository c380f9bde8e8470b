"""How caches are built: the one bag of options, from the command line down to a worker. Nothing in it changes a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Depth = Literal["quick", "full"]
Mode = Literal["forward", "inverse", "gaps"]
Executor = Literal["process", "ray"]


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How caches are built.

    Attributes:
        build: Build what is missing. Off: refuse instead.
        verify: Check all chunks first, this closely, and rebuild damaged ones.
        mode: Which missing unit is next: ``forward`` the lowest, ``inverse`` the highest, ``gaps`` those below one that
            is done, then the others.
        workers: Builders that work at once; 1 builds with the threads of this process.
        executor: What several workers are: processes, or Ray tasks (also a single one).
        force_rebuild: Build everything again and replace what is there once the new cache is complete.
        wait_for: ``first_segment`` returns when the first units of the training text are built and lets the others
            follow; ``complete`` when all are. None: as ``data.growth.mode`` says.
        last_unit: Build only units below this; None for all.
        stop: Polled between units; once it returns true, the build ends and what was committed stays.
        on_mend: Called with a message for every unit that is rebuilt because a chunk was found damaged while reading.
    """

    build: bool = True
    verify: Depth | None = None
    mode: Mode = "forward"
    workers: int = 1
    executor: Executor = "process"
    force_rebuild: bool = False
    wait_for: Literal["complete", "first_segment"] | None = None
    last_unit: int | None = None
    stop: Callable[[], bool] = never
    on_mend: Callable[[str], None] | None = None
