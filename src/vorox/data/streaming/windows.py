"""What is read together, and what the processes that share a stream's directory read at the moment.

Each stream writes the units that it reads next into ``windows/``; others look there before they remove chunks.
Invariant: nothing but time depends on it. A window that is missed costs a unit that is built once more.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.atomic import make_directory, remove_file, write_file
from vorox.core.process_identity import ProcessIdentity, this_process

DIRECTORY_NAME = "windows"
_FORGOTTEN_SECONDS = 3600.0
"""A process of another host that has said nothing for so long is taken for dead."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """Which units are read together: segments, each twice as long as the one before, up to a bound.

    Attributes:
        first_units: Units of the first.
        max_units: The bound.
    """

    first_units: int
    max_units: int

    def ranges(self, num_units: int, *, is_all: bool, ahead: int = 1) -> list[Range]:
        """The segments of a pass.

        Args:
            num_units: Units that are known.
            is_all: Whether they are all; the last segment ends with them.
            ahead: If they are not, so many segments that begin behind them.
        """
        ranges: list[Range] = []
        first, size, left = 0, self.first_units, 0 if is_all else ahead
        while first < num_units or left:
            left -= first >= num_units
            last = first + min(size, self.max_units)
            ranges.append((first, min(last, num_units) if is_all else last))
            first, size = last, 2 * size
        return ranges


class Window:
    """What one stream reads, for others to see.

    Args:
        directory: The stream's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY_NAME
        self._path = self._directory / f"{this_process().host}-{this_process().process_id}-{uuid.uuid4().hex[:8]}.json"
        self._said: list[Range] | None = None

    def say(self, units: Sequence[Range]) -> None:
        """These units are read now or next."""
        if list(units) == self._said:
            return
        self._said = list(units)
        make_directory(self._directory)
        content = {**this_process().to_json(), "units": [list(one) for one in units]}
        write_file(self._path, json.dumps(content).encode())

    def others(self) -> list[Range]:
        """What streams of living processes read, but for this one."""
        found: list[Range] = []
        for path in sorted(self._directory.glob("*.json")):
            if path == self._path:
                continue
            try:
                value = json.loads(path.read_bytes())
                process = ProcessIdentity.from_json(value)
                if process is None:
                    continue
                if process.is_dead():
                    remove_file(path)
                elif process.host == this_process().host or _is_recent(path):
                    found += [(int(first), int(last)) for first, last in value["units"]]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is being replaced, or was written by something else
        return found

    def close(self) -> None:
        if self._said is not None:
            self._path.unlink(missing_ok=True)
            self._said = None


def _is_recent(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < _FORGOTTEN_SECONDS
