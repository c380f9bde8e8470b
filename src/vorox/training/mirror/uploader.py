"""Checkpoints on their way to the mirror: one at a time, in the background, the newest first.

In: checkpoints as they are committed and removed on this machine, told in constant time from any thread. Out: their
copies in the store, the record of the run first, the manifest last, and the removal of what the retention no longer
keeps, only after a newer one is whole. A store that is away is a warning, once, and tried again; nothing here ever
raises into the run or makes it wait, but for ``settle`` at its end, which waits for a bounded time.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import xxhash

from vorox.core import atomic, staged_directory
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.errors import CheckpointError, VoroxError
from vorox.core.log import RunLog
from vorox.core.redaction import redact
from vorox.core.run_layout import RunLayout, parse_checkpoint_name
from vorox.data.storage import (
    RetryPolicy,
    StallReporter,
    StoredFile,
    put_bytes,
    put_file,
    remove_object,
    retry_budget,
    silent,
)
from vorox.data.storage.retry import new_jitter
from vorox.training.mirror.contents import (
    CHECKPOINTS,
    RECORD_NAME,
    RECORDS,
    Contents,
    checkpoint_name,
    list_mirror,
    record_bytes,
)
from vorox.training.mirror.ownership import Ownership

FAILURES_UNTIL_WARNING = 3
"""Failed tries in a row after which a store counts as away; single ones are everyday."""

Keep = Callable[[list[int]], set[int]]
"""Which of some steps the retention keeps."""


class _Ended(Exception):
    """The run is over, or the mirror is another process's: whatever is under way is left as it is."""


class Uploader:
    """Copies the checkpoints of one running process to the mirror of its run.

    Args:
        uri: The run's folder in the store.
        run_directory: The run; this process holds its lock.
        ownership: The right to write there.
        found: What the mirror held when it was taken over.
        base_step: Step of the state that this process goes on from.
        keep: The retention, the same as on this machine.
        log: Told when the store goes away, comes back, or is another process's by now.
    """

    def __init__(
        self, uri: str, run_directory: Path, ownership: Ownership, found: Contents, *, base_step: int, keep: Keep,
        log: RunLog,
    ) -> None:  # fmt: skip
        self._uri, self._run_directory, self._ownership = uri, run_directory, ownership
        self._base_step, self._keep, self._log = base_step, keep, log
        whole = [entry.step for entry in found.lineage() if entry.step <= base_step]
        self._mirrored_step: int | None = max(whole, default=None)
        self._mirrored_since = time.monotonic()
        self._newest_of_ours: int | None = None
        self._waiting: dict[int, tuple[Path, float]] = {}
        self._under_way: int | None = None
        self._sent: set[tuple[int, str]] = set()
        self._failures, self._reason, self._told_away = 0, "", False
        self._ended = False
        self._changed = threading.Condition()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="vorox-mirror", daemon=True)
        self._thread.start()

    def committed(self, path: Path) -> None:
        """A checkpoint stands on this machine."""
        with self._changed:
            self._waiting[_step(path)] = path, time.monotonic()
            self._changed.notify_all()

    def removed(self, path: Path) -> None:
        """A checkpoint is gone from this machine. One that is under way is copied to its end nevertheless."""
        with self._changed:
            if _step(path) != self._under_way:
                self._waiting.pop(_step(path), None)

    def metrics(self) -> dict[str, float]:
        """What is told with every logged step."""
        with self._changed:
            numbers = {"mirror/waiting_checkpoints": float(len(self._waiting))}
            if self._mirrored_step is not None:
                numbers["mirror/step"] = float(self._mirrored_step)
                numbers["mirror/age_seconds"] = time.monotonic() - self._mirrored_since
        return numbers

    def settle(self, timeout_seconds: float) -> str:
        """Wait for what is under way and waiting, but not for ever; returns what is there and what is not."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while (self._waiting or self._under_way is not None) and not self._ownership.lost and not self._ended:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            held = "no checkpoint" if self._mirrored_step is None else f"step {self._mirrored_step:,}"
            text = f"the mirror {self._uri} holds {held}"
            if self._waiting:
                missing = ", ".join(f"{step:,}" for step in sorted(self._waiting))
                text += f"; NOT there: step {missing}" + (f" ({self._reason})" if self._reason else "")
            return text

    def close(self, timeout_seconds: float) -> None:
        """End the thread, and bring the record of the newest checkpoint up to date with how the run ended.

        What is under way in a store that hangs ends when its try does.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            newest, away = self._newest_of_ours, self._told_away
        self._thread.join(timeout_seconds)
        if newest is None or away or self._ownership.lost or self._thread.is_alive():
            return
        context, name = contextvars.copy_context(), checkpoint_name(newest, self._ownership.fencing_token)
        thread = threading.Thread(target=context.run, args=(self._last_record, f"{name}-r2", newest), daemon=True)
        thread.start()
        thread.join(timeout_seconds)

    def _last_record(self, name: str, step: int) -> None:
        with contextlib.suppress(VoroxError, OSError), retry_budget(RetryPolicy(retries_per_unit=3), tracker=silent):
            put_record(self._uri, name, self._run_directory, self._metadata(step), lambda: None)

    def _work(self) -> None:
        jitter = new_jitter(self._uri)
        with retry_budget() as budget:
            longest_pause_seconds = budget.policy.longest_backoff_seconds
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                step = max(self._waiting)
                self._under_way = step
                path, since = self._waiting[step]
            failed = ""
            try:
                with retry_budget(tracker=self._told):
                    self._upload(path, step)
                    self._done(step, since)
                    self._retain()
            except _Ended:
                return
            except (VoroxError, OSError) as error:
                failed = error.what if isinstance(error, VoroxError) else str(error.strerror or error)
            except Exception as error:  # whatever is wrong here, the training goes on
                failed = f"{type(error).__name__}: {error}"
            with self._changed:
                self._under_way = None
                self._changed.notify_all()
            if failed:
                self._away(failed)
                self._pause((0.5 + jitter.random() / 2) * longest_pause_seconds)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _upload(self, path: Path, step: int) -> None:
        """Copy one checkpoint, unless it has gone: the record, then its files, then the manifest."""
        name = checkpoint_name(step, self._ownership.fencing_token)
        with self._held(path) as source:
            if source is None:
                self._forget(step, f"{path.name} was removed before it could be mirrored")
                return
            try:
                manifest = staged_directory.read_manifest(source)
            except CheckpointError as error:
                self._forget(step, f"{path.name} is damaged on this machine ({error.what}) and is not mirrored")
                return
            record_name = f"{name}-r1"
            put_record(self._uri, record_name, self._run_directory, self._metadata(step), self._check)
            for file, entry in sorted(manifest["files"].items()):
                self._check()
                if (step, file) in self._sent:
                    continue  # by an earlier try
                found = staged_directory.hash_file(source / file)
                if (found.size_bytes, found.xxh3_128) != (entry["size_bytes"], entry["xxh3_128"]):
                    self._forget(step, f"{path.name} is damaged on this machine ({file}) and is not mirrored")
                    return
                put_file(source / file, f"{self._uri}/{CHECKPOINTS}/{name}/{file}")
                self._sent.add((step, file))
            self._ownership.confirm()
            self._check()
            put_file(source / MANIFEST_NAME, f"{self._uri}/{CHECKPOINTS}/{name}/{MANIFEST_NAME}")

    def _metadata(self, step: int) -> dict[str, int]:
        return {"step": step, "claim": self._ownership.fencing_token, "base_step": self._base_step}

    @contextlib.contextmanager
    def _held(self, path: Path) -> Generator[Path | None]:
        """The files of a checkpoint under names that stay when it is removed; ``None`` if it is gone already."""
        links = atomic.temporary_name(self._run_directory / f"{path.name}-mirror")
        try:
            try:
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        target = links / file.relative_to(path)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.link(file, target)
                source = links if (links / MANIFEST_NAME).exists() else None
            except OSError:  # gone meanwhile, or a file system without links
                source = path if (path / MANIFEST_NAME).exists() else None
            yield source
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _check(self) -> None:
        """Stop here if the run is over or another process has the mirror."""
        if self._ownership.lost:
            self._log.event(
                "mirror_lost",
                f"Another process has taken over the mirror {self._uri}: this run goes on and is no longer mirrored",
                level="error",
            )
        if self._ended or self._ownership.lost:
            raise _Ended

    def _forget(self, step: int, why: str) -> None:
        with self._changed:
            self._waiting.pop(step, None)
        self._log.event("mirror_skipped", why, level="warning", step=step)

    def _done(self, step: int, since: float) -> None:
        with self._changed:
            if self._waiting.pop(step, None) is None:
                return  # it was left out
            self._sent.clear()
            if self._mirrored_step is None or step > self._mirrored_step:
                self._mirrored_step, self._mirrored_since = step, since
                self._newest_of_ours = step
            failures, told = self._failures, self._told_away
            self._failures, self._told_away, self._reason = 0, False, ""
            self._changed.notify_all()
        if told:
            self._log.event(
                "mirror_back", f"The mirror {self._uri} answers again after {failures:,} failed tries", level="warning"
            )
        self._log.event("mirrored", f"Step {step:,} is in the mirror {self._uri}", step=step)

    def _retain(self) -> None:
        """Remove what the retention does not keep, what is torn, and what another line of work left."""
        found = list_mirror(self._uri)
        if found.last_fencing_token > self._ownership.fencing_token:
            self._ownership.lost = True
        self._check()
        line = found.lineage()
        kept = self._keep(sorted(entry.step for entry in line))
        staying = {(entry.step, entry.fencing_token) for entry in line if entry.step in kept}
        for entry in found.checkpoints:
            if (entry.step, entry.fencing_token) not in staying:
                for file in entry.objects():
                    self._check()
                    remove_object(file.uri)

    @contextlib.contextmanager
    def _told(self, _uri: str) -> Generator[StallReporter]:
        """Hears of failed tries; an upload is nothing that the run waits for."""
        yield _Listener(self._heard)

    def _heard(self, reason: str, failed: bool) -> None:
        if self._ended:
            raise _Ended
        if failed:
            self._failures += 1
            if self._failures >= FAILURES_UNTIL_WARNING:
                self._away(reason)

    def _away(self, reason: str) -> None:
        """Say that the store is away, once until it is back."""
        with self._changed:
            self._reason = redact(reason)
            told, self._told_away = self._told_away, True
            held = "nothing is mirrored yet"
            if self._mirrored_step is not None:
                age = time.monotonic() - self._mirrored_since
                held = f"last mirrored: step {self._mirrored_step:,}, {age:.0f} s ago"
        if not told and not self._ended:
            self._log.event(
                "mirror_away",
                f"The mirror {self._uri} does not take checkpoints ({reason}); training goes on, it is tried again; "
                f"{held}",
                level="warning",
            )


class _Listener:
    def __init__(self, heard: Callable[[str, bool], None]) -> None:
        self._heard = heard

    def report(self, reason: str, *, failed: bool = True) -> None:
        self._heard(reason, failed)


def put_record(
    uri: str, name: str, run_directory: Path, metadata: Mapping[str, int], check: Callable[[], None]
) -> list[StoredFile]:
    """Put the files of a run, as they are at this moment, and then what they are."""
    entries: dict[str, dict[str, int | str]] = {}
    put: list[StoredFile] = []
    for path in RunLayout(run_directory).mirrored_files():
        check()
        data = path.read_bytes()
        file = path.relative_to(run_directory).as_posix()
        entries[file] = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        put.append(put_bytes(data, f"{uri}/{RECORDS}/{name}/{file}"))
    check()
    put.append(put_bytes(record_bytes(metadata, entries), f"{uri}/{RECORDS}/{name}/{RECORD_NAME}"))
    return put


def _step(path: Path) -> int:
    name = parse_checkpoint_name(path.name)
    assert name is not None, "only checkpoints are mirrored"
    return name.step
