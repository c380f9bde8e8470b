"""The watchdog of a run: a process that names a stalled rank, keeps all stacks and ends the run.

In: the heartbeats of all ranks (``runtime/heartbeat.py``). Out, after the time limit without progress: one sentence,
the stacks of all threads of all ranks, ``failure.json``, and the end of the ranks with exit code 6. After a stall, and
after all ranks of this machine were killed, it runs a program that notifies people. It imports no framework. Time
during which the watchdog itself did not run, such as a suspended machine, does not count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vorox.core.errors import LostRankError, StalledError
from vorox.core.files import atomic
from vorox.core.files.file_holder import ProcessIdentity, pid_namespace
from vorox.core.files.json_reader import read_json
from vorox.core.processes.signals import ignore_terminal
from vorox.core.redaction import redact
from vorox.core.run_layout import RunLayout
from vorox.records.failure_record import failure_record
from vorox.records.run_lookup import saved_state
from vorox.runtime.heartbeat import STACKS_SIGNAL, WATCHED, Beat, read_beat, request_end, request_stacks

_MAX_POLL_SECONDS = 1.0
_STACKS_SECONDS = 2.0
_END_SECONDS = 5.0
_NOTICE_SECONDS = 60.0
_SHOWN_STACK_CHARACTERS = 20_000
LONG_TIMEOUT_SETTING = "runtime.long_stall_timeout_seconds"
PHASE_ORDER = {"compile": 0, "step": 1, "data": 2, "sync": 3, "settle": 4}
"""Phases from one step to the next, in order; ``data`` reads the next step's batch."""

Condition = Literal["running", "stopped", "dead", "remote"]


def place(beat: Beat) -> tuple[int, int]:
    """Return how far a rank is. The others wait for the least advanced one.

    Ranks agree after step N only once each knows whether it can read the batch of step N + 1.
    """
    return beat.step - (beat.phase == "data"), PHASE_ORDER.get(beat.phase, 0)


@dataclass(slots=True)
class Watched:
    """A rank and how long it has made no progress.

    Attributes:
        beat: Its newest heartbeat.
        condition: State of its process; ``remote`` on another machine or in another container.
        idle_seconds: Time without progress.
        long_timeout_seconds: Time without progress that is a stall of a phase that may be long; ``None``: no limit.
    """

    beat: Beat
    condition: Condition = "running"
    idle_seconds: float = 0.0
    long_timeout_seconds: float | None = None

    @property
    def precedence(self) -> list[int]:
        """Order as the cause of a stall, first the likeliest: dead, stopped, then the least advanced."""
        return {"dead": [0], "stopped": [1]}.get(self.condition) or [2, *place(self.beat)]

    @property
    def is_excused(self) -> bool:
        """Whether its phase may take longer than it has."""
        if self.condition in {"stopped", "dead"}:
            return False
        if self.beat.is_waiting or self.beat.phase == "end":
            return True
        limit = self.long_timeout_seconds
        return self.beat.phase not in WATCHED and (limit is None or self.idle_seconds < limit)

    def __str__(self) -> str:
        beat, host = self.beat, self.beat.process.host
        who = f"Rank {beat.rank} on host {host}"
        time_text = f"for {self.idle_seconds:.0f} s"
        if self.condition == "dead":
            return f"{who} died in step {beat.step:,}, {self.idle_seconds:.0f} s ago, and the other ranks wait for it"
        queue = "its data queue is empty" if not beat.queue_depth else f"its data queue has {beat.queue_depth} batches"
        what = {
            "data": f"has waited for the batch of step {beat.step:,}",
            "step": f"has not finished forward and backward pass of step {beat.step:,}",
            "sync": f"has waited for the other ranks after step {beat.step:,}",
            "settle": f"has waited for the device to finish step {beat.step:,}",
            "compile": f"has not finished step {beat.step:,}, which may compile,",
            "validation": f"has made no progress in the validation after step {beat.step:,}",
            "save": f"has not finished the save after step {beat.step:,}",
            "start": "has not finished the start of the run",
        }.get(beat.phase, f"has not left phase {beat.phase} at step {beat.step:,}")
        stopped = "; its process is stopped (SIGSTOP)" if self.condition == "stopped" else ""
        return f"{who} {what} {time_text}; {queue}{stopped}"


@dataclass(slots=True)
class Watchdog:
    """Watches the ranks of one attempt.

    Attributes:
        layout: The run directory.
        attempt: Number of the attempt.
        timeout_seconds: Time without progress that is a stall.
        long_timeout_seconds: The same for start, compilation, saves and validation; ``None``: no limit.
        notice: A program, as words, to run after a stalled run was ended, or the run was killed.
        namespace: The PID namespace whose ranks it sees, which tells the watchdogs of a run apart.
        ranks: The ranks, by number.
    """

    layout: RunLayout
    attempt: int
    timeout_seconds: float
    long_timeout_seconds: float | None = None
    notice: Sequence[str] = ()
    namespace: str = field(default_factory=pid_namespace)
    ranks: dict[int, Watched] = field(default_factory=dict[int, Watched])

    def run(self) -> None:
        """Watch until the ranks of this machine have ended, or one has stalled."""
        poll = min(_MAX_POLL_SECONDS, self.timeout_seconds / 8)
        last = time.monotonic()
        while True:
            time.sleep(poll)
            now = time.monotonic()
            self.update(self._read(), min(now - last, 2 * poll))
            last = now
            if not any(rank.condition in {"running", "stopped"} for rank in self.ranks.values()):
                if any(
                    rank.condition == "dead" for rank in self.ranks.values()
                ):  # a rank that ends by itself reports it
                    self._give_notice()
                return
            stalled = self.stalled()
            if stalled:
                self._end_run(stalled)
                return

    def _read(self) -> dict[int, tuple[Beat, Condition]]:
        found: dict[int, tuple[Beat, Condition]] = {}
        for path in self.layout.watchdog.glob("rank-*.beat"):
            beat = read_beat(path)
            if beat is not None and beat.attempt == self.attempt and beat.phase != "end":
                found[beat.rank] = beat, condition_of(beat.process)
        return found

    def update(self, found: Mapping[int, tuple[Beat, Condition]], elapsed_seconds: float) -> None:
        """Add the time since the last look to the ranks whose heartbeat has not changed."""
        for rank, (beat, condition) in found.items():
            known = self.ranks.get(rank)
            idle = 0.0 if known is None or known.beat.count != beat.count else known.idle_seconds + elapsed_seconds
            self.ranks[rank] = Watched(beat, condition, idle, self.long_timeout_seconds)
        for rank in self.ranks.keys() - found.keys():
            del self.ranks[rank]

    def stalled(self) -> list[Watched]:
        """Return the ranks that the others wait for, least advanced first; empty without a stall.

        A rank in a phase that may be long, such as a validation, excuses those that may wait for it until its own
        limit, but no rank that is known to be stopped or dead: the run cannot continue without it.
        """
        ranks = [self.ranks[number] for number in sorted(self.ranks)]
        local = [rank for rank in ranks if rank.condition != "remote"]
        idle = [rank for rank in local if rank.idle_seconds >= self.timeout_seconds and not rank.is_excused]
        lost = [rank for rank in idle if rank.condition in {"dead", "stopped"}]
        if not lost and any(rank.is_excused for rank in ranks):
            return []
        idle = lost or idle
        if not idle or all(rank.condition == "dead" for rank in local):
            return []
        first = min(rank.precedence for rank in idle)
        return [rank for rank in idle if rank.precedence == first]

    def _end_run(self, stalled: Sequence[Watched]) -> None:
        local = [rank for rank in self.ranks.values() if rank.condition in {"running", "stopped"}]
        error = self.stalled_error(stalled)
        self.record(stalled)  # before a rank ends, so that others know why they lost it
        # Before a rank ends, too: a container may end with it, and this process with the container.
        sys.stderr.write(
            f"x {error.kind}: {redact(error.what)}  [exit {error.exit_code}]\n  where   {error.where}\n"
            f"  saved   {error.saved or '-'}\n  do      {error.hint}\n"
        )
        sys.stderr.flush()
        stacks = redact(self._collect_stacks(local))[-_SHOWN_STACK_CHARACTERS:]
        self.record(stalled, stacks)
        for rank in local:
            request_end(self.layout.heartbeat(rank.beat.rank))
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until and any(_is_alive(rank.beat.process) for rank in local):
            time.sleep(0.05)
        for rank in local:
            if _is_alive(rank.beat.process):  # it holds the interpreter lock, or is stuck in the kernel
                _send(rank.beat.process, signal.SIGKILL)
        if self.layout.failure.exists():  # a rank that lost its peers may have recorded that instead
            self.record(stalled, stacks)
        self._give_notice()

    def _give_notice(self) -> None:
        if self.notice:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self.notice, stdin=subprocess.DEVNULL, check=False, timeout=_NOTICE_SECONDS)

    def stalled_error(self, stalled: Sequence[Watched]) -> StalledError:
        """Return the error that names the stalled ranks."""
        first = stalled[0].beat
        is_long = stalled[0].condition == "running" and first.phase not in WATCHED
        limit = f"; {LONG_TIMEOUT_SETTING}=null removes the limit of this phase" if is_long else ""
        more = f" (so have ranks {', '.join(str(rank.beat.rank) for rank in stalled[1:])})" if stalled[1:] else ""
        return StalledError(
            f"{stalled[0]}{more}",
            where=f"step {first.step:,}, {first.process}",
            saved=saved_state(self.layout),
            hint=f"the stacks of all ranks are in {self.layout.watchdog}; `vorox data where {self.layout.directory} "
            f"--step {first.step}` shows the documents of the step; the same command resumes the run{limit}",
        )

    def _collect_stacks(self, local: Sequence[Watched]) -> str:
        """Request the stacks of all threads of all ranks, wait until they are written, and return them."""
        for rank in local:
            request_stacks(self.layout.heartbeat(rank.beat.rank))
            if rank.condition == "stopped":  # it then writes about where it was stopped, and must not continue
                request_end(self.layout.heartbeat(rank.beat.rank))
                _send(rank.beat.process, signal.SIGCONT)
        paths = {rank.beat.rank: self.layout.stacks(rank.beat.rank) for rank in local}
        if not _wait_until_written(paths.values()) and STACKS_SIGNAL is not None:
            for rank in local:  # native code holds the interpreter lock of one that wrote nothing
                if not _size_bytes(paths[rank.beat.rank]):
                    _send(rank.beat.process, STACKS_SIGNAL)
            _wait_until_written(paths.values())
        texts = [
            f"rank {rank}:\n{path.read_text(encoding='utf-8', errors='replace') if path.exists() else ''}"
            for rank, path in paths.items()
        ]
        return "\n".join(texts)

    def record(self, stalled: Sequence[Watched], stacks: str = "") -> None:
        """Write ``failure.json``, unless it names a likelier cause of this attempt.

        Args:
            stalled: The ranks that the others wait for.
            stacks: Stacks of all threads; with them, the record is also kept for after a resume.
        """
        failure: dict[str, Any] = {
            **failure_record(self.stalled_error(stalled)),
            "attempt": self.attempt,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "precedence": stalled[0].precedence,
            "watchdog": self.namespace,
            "traceback": stacks,
        }
        if self._names_likelier_cause(failure):
            return
        for path in [self.layout.failure, *([self.layout.stall(self.attempt)] if stacks else [])]:
            with contextlib.suppress(OSError):
                atomic.write_file(path, atomic.pretty_json(failure), private=True)

    def _names_likelier_cause(self, failure: Mapping[str, Any]) -> bool:
        """Whether ``failure.json`` has an error that a rank reported before, or the verdict of another watchdog."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known: dict[str, Any] = read_json(self.layout.failure, dict)
            if known["attempt"] != self.attempt:
                return False
            if "precedence" not in known:
                return known["error"] != LostRankError.__name__
            if known["watchdog"] != self.namespace:
                return known["precedence"] <= failure["precedence"]
        return False


def condition_of(process: ProcessIdentity) -> Condition:
    if not process.is_visible:
        return "remote"
    if process.is_dead():
        return "dead"
    return "stopped" if process.is_stopped() else "running"


def _is_alive(process: ProcessIdentity) -> bool:
    return process.is_visible and not process.is_dead()


def _wait_until_written(paths: Collection[Path]) -> bool:
    """Wait until no file is empty and none grows; return whether that is so in time."""
    until, sizes = time.monotonic() + _STACKS_SECONDS, list[int]()
    while time.monotonic() < until:
        time.sleep(0.2)
        before, sizes = sizes, [_size_bytes(path) for path in paths]
        if all(sizes) and sizes == before:
            return True
    return False


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _send(process: ProcessIdentity, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process.process_id, number)


if __name__ == "__main__":
    ignore_terminal()  # its signals stop the ranks, which end the watchdog
    _long = None if sys.argv[4] == "none" else float(sys.argv[4])
    Watchdog(RunLayout(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), _long, sys.argv[5:]).run()
