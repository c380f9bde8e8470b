"""What files take on disk while others make and remove them: an instant, not a sum over a walk of the folder."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path


def bytes_at_one_instant(directory: Path, pattern: str) -> int:
    """What the files that match come to: those that two looks find were all there between the two.

    A file that is removed while a single look goes on would be counted together with the one that takes its place.
    """
    looks: list[set[tuple[str, int, int, int]]] = [set(), set()]
    for look in looks:
        for path in directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    look.add((str(path), found.st_ino, found.st_ctime_ns, found.st_size))
    return sum(size_bytes for *_, size_bytes in looks[0] & looks[1])
