"""Exchange values between ranks within a time limit, compare clocks, and find unshared directories.

``DistributedContext`` waits for ranks until they fail; vorox doctor --nodes names the ranks that are silent.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.ranks.distributed_context import DistributedContext

_CLOCK_ROUNDS = 8
_VISIBLE_SECONDS = 5.0
"""Time in which a new file must become visible: NFS caches directories for some seconds."""
_POLL_SECONDS = 0.2


def gather(dist: DistributedContext, topic: str, value: Any, timeout_seconds: float) -> list[Any]:
    """Gather plain JSON from every rank on rank 0; ``None`` for a rank that is silent, and on the other ranks.

    Args:
        dist: This rank.
        topic: Used once.
        value: The value of this rank.
        timeout_seconds: Time that all ranks have together.
    """
    channel, folder = dist.channel, f"vorox/doctor/{topic}"
    assert channel is not None, "several ranks need a channel"
    if not dist.is_main:
        channel.put(f"{folder}/{dist.rank}", canonical_json(value))
        return [None] * dist.world_size
    ends_at, found = time.monotonic() + timeout_seconds, [value]
    for rank in range(1, dist.world_size):
        answer = channel.get(f"{folder}/{rank}", max(0.001, ends_at - time.monotonic()))
        found.append(None if answer is None else json.loads(answer))
    return found


def publish(dist: DistributedContext, topic: str, value: Any, timeout_seconds: float) -> Any:
    """Return rank 0's value on every rank, and wait on rank 0 until all have read it; ``None`` after the time limit."""
    channel, folder = dist.channel, f"vorox/doctor/{topic}"
    assert channel is not None, "several ranks need a channel"
    if dist.is_main:
        channel.put(f"{folder}/value", canonical_json(value))
        channel.get_all(folder, [str(rank) for rank in range(1, dist.world_size)], timeout_seconds)
        return value
    found = channel.get(f"{folder}/value", timeout_seconds)
    channel.put(f"{folder}/{dist.rank}", b"true")
    return None if found is None else json.loads(found)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The clock of a rank minus that of rank 0, in seconds; the error is at most half a round trip."""

    seconds: float
    error_seconds: float


def clock_offsets(
    dist: DistributedContext, ranks: Sequence[int], timeout_seconds: float, now: Callable[[], float] = time.time
) -> dict[int, ClockOffset]:
    """Estimate the clock offsets of ranks, as NTP does (RFC 5905): the exchange with the shortest round trip counts.

    Args:
        dist: This rank.
        ranks: The ranks to measure, not rank 0.
        timeout_seconds: Time that an answer has.
        now: The clock of this rank.

    Returns:
        On rank 0, the offset of each rank that answered; empty elsewhere.
    """
    channel = dist.channel
    assert channel is not None, "several ranks need a channel"
    found: dict[int, ClockOffset] = {}
    for rank in ranks:
        folder = f"vorox/doctor/clock/{rank}"
        if dist.is_main:
            for number in range(_CLOCK_ROUNDS):
                if channel.get(f"{folder}/{number}", timeout_seconds) is None:
                    break
                received = now()
                channel.put(f"{folder}/{number}/answer", canonical_json([received, now()]))
            result = channel.get(f"{folder}/result", timeout_seconds)
            if result is not None:
                found[rank] = ClockOffset(*json.loads(result))
        elif rank == dist.rank:
            channel.put(f"{folder}/result", canonical_json(_offset(dist, folder, timeout_seconds, now)))
    return found


def _offset(dist: DistributedContext, folder: str, timeout_seconds: float, now: Callable[[], float]) -> list[float]:
    """Return the offset of this rank's clock and its error."""
    assert dist.channel is not None, "several ranks need a channel"
    offsets: list[tuple[float, float]] = []
    for number in range(_CLOCK_ROUNDS):
        began, sent = time.perf_counter(), now()
        dist.channel.put(f"{folder}/{number}", b"true")
        answer = dist.channel.get(f"{folder}/{number}/answer", timeout_seconds)
        seconds = time.perf_counter() - began
        if answer is None:
            break
        received, answered = json.loads(answer)
        round_trip = seconds - (answered - received)
        offsets.append((round_trip, sent + seconds / 2 - (received + answered) / 2))
    round_trip, offset = min(offsets, default=(float("inf"), 0.0))
    return [offset, round_trip / 2] if offsets else [0.0, 1e9]


@contextlib.contextmanager
def token_files(directories: Mapping[str, Path]) -> Generator[dict[str, str]]:
    """Write a file of a random name into each directory; yield the names, and remove the files afterwards.

    A directory that does not exist is created and removed. The name is empty where the file cannot be written.

    Args:
        directories: Directory by its name in the report.
    """
    with contextlib.ExitStack() as stack:
        names: dict[str, str] = {}
        for name, directory in directories.items():
            token = f".vorox-doctor-{secrets.token_hex(8)}"
            new = [path for path in (directory, *directory.parents) if not path.exists()]
            try:
                make_directory(directory)
                write_file(directory / token, b"")
            except OSError:
                token = ""
            stack.callback(_remove, directory / token if token else None, new)
            names[name] = token
        yield names


def _remove(file: Path | None, directories: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # another program has written there meanwhile
        if file is not None:
            file.unlink(missing_ok=True)
        for directory in directories:
            directory.rmdir()


def sees_file(directory: Path, name: str) -> bool:
    """Whether a file of another rank becomes visible in a directory in time."""
    ends_at = time.monotonic() + _VISIBLE_SECONDS
    while True:
        with contextlib.suppress(OSError):  # the directory does not exist here
            if any(path.name == name for path in directory.iterdir()):
                return True
        if time.monotonic() > ends_at:
            return False
        time.sleep(_POLL_SECONDS)
