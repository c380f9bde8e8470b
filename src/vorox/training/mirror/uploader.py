"""Background upload of checkpoints to the mirror, one at a time, newest first.

In: checkpoints as they are committed and removed locally, in constant time from any thread. Out: their copies in the
store, the run snapshot first and the manifest last; once a copy is complete, the retention rules are applied to the
mirror. An unreachable store is logged once and retried. Nothing here raises into the run or blocks it, except ``wait``
at its end, which has a time limit.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import xxhash

from vorox.core.errors import CheckpointError, VoroxError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.atomic import MANIFEST_NAME
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
from vorox.data.storage.requests import new_jitter
from vorox.records.log import RunLog
from vorox.training.checkpoints.store import REASON_NAME
from vorox.training.mirror.contents import (
    CHECKPOINTS,
    SNAPSHOT_MANIFEST,
    SNAPSHOTS,
    Contents,
    MirroredCheckpoint,
    checkpoint_name,
    encode_snapshot,
    list_mirror,
)
from vorox.training.mirror.ownership import Ownership

FAILURES_UNTIL_WARNING = 3
"""Consecutive failed attempts after which the store is reported as unreachable."""

Keep = Callable[[list[int]], set[int]]
"""The retention rules: which of these steps to keep."""


class _Ended(Exception):
    """The run has ended or another process has taken over the mirror: abandon the current upload."""


class Uploader:
    """Copies the checkpoints of the running process to the mirror of its run.

    Args:
        uri: The run's folder in the store.
        run_directory: The run; this process holds its lock.
        ownership: The lease of the mirror.
        found: Contents of the mirror when it was acquired.
        base_step: Step from which this process starts or resumes.
        abandoned: Mirrored checkpoints outside the resumed history; they are marked as abandoned.
        keep: The retention rules, as on this machine.
        log: The run's log.
    """

    def __init__(
        self, uri: str, run_directory: Path, ownership: Ownership, found: Contents, *, base_step: int,
        abandoned: Sequence[MirroredCheckpoint] = (), keep: Keep, log: RunLog,
    ) -> None:  # fmt: skip
        self._uri, self._run_directory, self._ownership = uri, run_directory, ownership
        self._base_step, self._keep, self._log = base_step, keep, log
        self._abandoned = {entry.name for entry in abandoned}
        steps = [entry.step for entry in found.lineage() if entry.name not in self._abandoned]
        self._mirrored_step: int | None = max(steps, default=None)
        self._mirrored_since = time.monotonic()
        self._newest_uploaded: int | None = None
        self._pending: dict[int, tuple[Path, float]] = {}
        self._uploading: int | None = None
        self._uploaded_files: set[tuple[int, str]] = set()
        self._failures, self._reason, self._reported_away = 0, "", False
        self._ended = False
        self._changed = threading.Condition()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="vorox-mirror", daemon=True)
        self._thread.start()

    def enqueue(self, path: Path) -> None:
        """Enqueue a committed checkpoint."""
        with self._changed:
            self._pending[_step(path)] = path, time.monotonic()
            self._changed.notify_all()

    def discard(self, path: Path) -> None:
        """Drop a removed checkpoint from the queue, unless its upload is in progress."""
        with self._changed:
            if _step(path) != self._uploading:
                self._pending.pop(_step(path), None)

    def metrics(self) -> dict[str, float]:
        """Return the mirror's metrics for a logged step."""
        with self._changed:
            numbers = {"mirror/waiting_checkpoints": float(len(self._pending))}
            if self._mirrored_step is not None:
                numbers["mirror/step"] = float(self._mirrored_step)
                numbers["mirror/age_seconds"] = time.monotonic() - self._mirrored_since
        return numbers

    def wait(self, timeout_seconds: float) -> str:
        """Wait for pending uploads up to a time limit; return a sentence on what the mirror holds and lacks."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while (self._pending or self._uploading is not None) and not self._ownership.lost and not self._ended:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            held = "no checkpoint" if self._mirrored_step is None else f"step {self._mirrored_step:,}"
            text = f"the mirror {self._uri} holds {held}"
            if self._pending:
                missing = ", ".join(f"{step:,}" for step in sorted(self._pending))
                text += f"; NOT there: step {missing}" + (f" ({self._reason})" if self._reason else "")
            return text

    def close(self, timeout_seconds: float) -> None:
        """Stop the thread, and upload a final run snapshot, which includes how the run ended.

        A request that hangs ends by its own timeout.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            newest, away = self._newest_uploaded, self._reported_away
        self._thread.join(timeout_seconds)
        if newest is None or away or self._ownership.lost or self._thread.is_alive():
            return
        context, name = contextvars.copy_context(), checkpoint_name(newest, self._ownership.fencing_token)
        arguments = (self._upload_final_snapshot, f"{name}-r2", newest)
        thread = threading.Thread(target=context.run, args=arguments, daemon=True)
        thread.start()
        thread.join(timeout_seconds)

    def _upload_final_snapshot(self, name: str, step: int) -> None:
        with contextlib.suppress(VoroxError, OSError), retry_budget(RetryPolicy(retries_per_unit=3), tracker=silent):
            upload_snapshot(self._uri, name, self._run_directory, self._metadata(step), lambda: None)

    def _work(self) -> None:
        jitter = new_jitter(self._uri)
        with retry_budget() as budget:
            longest_pause_seconds = budget.policy.longest_backoff_seconds
        if self._abandoned:
            self._attempt(lambda: self._mark_abandoned(list_mirror(self._uri)))  # else after the first upload
        while True:
            with self._changed:
                while not self._pending and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                step = max(self._pending)
                self._uploading = step
                path, since = self._pending[step]

            def mirror(path: Path = path, step: int = step, since: float = since) -> None:
                self._upload(path, step)
                self._finish(step, since)
                self._retain()

            failed = self._attempt(mirror)
            if failed is None:
                return
            with self._changed:
                self._uploading = None
                self._changed.notify_all()
            if failed:
                self._report_away(failed)
                self._pause((0.5 + jitter.random() / 2) * longest_pause_seconds)

    def _attempt(self, action: Callable[[], None]) -> str | None:
        """Return why an action on the store failed, empty if it did not; ``None`` if the thread must end."""
        try:
            with retry_budget(tracker=self._track_stalls):
                action()
        except _Ended:
            return None
        except (VoroxError, OSError) as error:
            return error.what if isinstance(error, VoroxError) else str(error.strerror or error)
        except Exception as error:  # an unexpected error must not stop the training
            return f"{type(error).__name__}: {error}"
        return ""

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _upload(self, path: Path, step: int) -> None:
        """Upload one checkpoint, unless it was removed: the run snapshot, then its files, then the manifest."""
        name = checkpoint_name(step, self._ownership.fencing_token)
        with self._hard_links(path) as source:
            if source is None:
                self._skip(step, f"Checkpoint {path.name} was removed before it could be mirrored")
                return
            try:
                manifest = staged_directory.read_manifest(source)
            except CheckpointError as error:
                self._skip(
                    step, f"Checkpoint {path.name} is corrupt on this machine ({error.what}) and is not mirrored"
                )
                return
            snapshot_name = f"{name}-r1"
            upload_snapshot(self._uri, snapshot_name, self._run_directory, self._metadata(step), self._check_active)
            for file, entry in sorted(manifest["files"].items()):
                self._check_active()
                if (step, file) in self._uploaded_files:
                    continue  # by an earlier attempt
                found = staged_directory.hash_file(source / file)
                if (found.size_bytes, found.xxh3_128) != (entry["size_bytes"], entry["xxh3_128"]):
                    self._skip(step, f"Checkpoint {path.name} is corrupt on this machine ({file}) and is not mirrored")
                    return
                put_file(source / file, f"{self._uri}/{CHECKPOINTS}/{name}/{file}")
                self._uploaded_files.add((step, file))
            self._ownership.confirm()
            self._check_active()
            put_file(source / MANIFEST_NAME, f"{self._uri}/{CHECKPOINTS}/{name}/{MANIFEST_NAME}")

    def _metadata(self, step: int) -> dict[str, int]:
        return {"step": step, "claim": self._ownership.fencing_token, "base_step": self._base_step}

    @contextlib.contextmanager
    def _hard_links(self, path: Path) -> Generator[Path | None]:
        """Hard-link the files of a checkpoint, so that they outlive its removal; ``None`` if it is already gone."""
        links = atomic.temporary_name(self._run_directory / f"{path.name}-mirror")
        try:
            try:
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        target = links / file.relative_to(path)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        os.link(file, target)
                source = links if (links / MANIFEST_NAME).exists() else None
            except OSError:  # removed meanwhile, or a file system without hard links
                source = path if (path / MANIFEST_NAME).exists() else None
            yield source
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _check_active(self) -> None:
        """Abandon the upload if the run has ended or another process has taken over the mirror.

        Raises:
            _Ended: One of these is the case.
        """
        if self._ownership.lost:
            self._log.event(
                "mirror_lost",
                f"Another process has taken over the mirror {self._uri}; this run continues without a mirror",
                level="error",
            )
        if self._ended or self._ownership.lost:
            raise _Ended

    def _skip(self, step: int, why: str) -> None:
        with self._changed:
            self._pending.pop(step, None)
        self._log.event("mirror_skipped", why, level="warning", step=step)

    def _finish(self, step: int, since: float) -> None:
        with self._changed:
            if self._pending.pop(step, None) is None:
                return  # it was skipped
            self._uploaded_files.clear()
            if self._mirrored_step is None or step > self._mirrored_step:
                self._mirrored_step, self._mirrored_since = step, since
                self._newest_uploaded = step
            failures, was_away = self._failures, self._reported_away
            self._failures, self._reported_away, self._reason = 0, False, ""
            self._changed.notify_all()
        if was_away:
            text = f"The mirror {self._uri} is reachable again after {failures:,} failed attempts"
            self._log.event("mirror_back", text, level="warning")
        self._log.event("mirrored", f"Step {step:,} is in the mirror {self._uri}", step=step)

    def _retain(self) -> None:
        """Mark superseded checkpoints as abandoned; remove those that are incomplete or not retained."""
        found = list_mirror(self._uri)
        if found.last_fencing_token > self._ownership.fencing_token:
            self._ownership.lost = True
        self._check_active()
        lineage = [entry for entry in found.lineage() if entry.name not in self._abandoned]
        current = {entry.name for entry in lineage}
        self._abandoned |= {
            entry.name for entry in found.checkpoints if entry.is_complete and entry.name not in current
        }
        self._mark_abandoned(found)  # before any removal: the lineage does not depend on what was removed
        kept_steps = self._keep(sorted(entry.step for entry in lineage))
        kept = self._abandoned | {entry.name for entry in lineage if entry.step in kept_steps}
        for entry in found.checkpoints:
            if entry.name not in kept:
                for file in entry.objects():
                    self._check_active()
                    remove_object(file.uri)

    def _mark_abandoned(self, found: Contents) -> None:
        """Mark abandoned checkpoints instead of removing them: they may be the only copy of their steps."""
        for entry in found.checkpoints:
            if entry.name in self._abandoned and entry.is_complete and not entry.is_abandoned:
                self._check_active()
                reason = f"the run was resumed from step {self._base_step} without it"
                uri = f"{self._uri}/{CHECKPOINTS}/{entry.name}"
                put_bytes(f"{reason}\n".encode(), f"{uri}/{REASON_NAME}")
                self._log.event(
                    "mirror_abandoned", f"Marked {entry.name} in the mirror {self._uri} as abandoned: {reason}",
                    level="warning", uri=uri,
                )  # fmt: skip

    @contextlib.contextmanager
    def _track_stalls(self, _uri: str) -> Generator[StallReporter]:
        """Count failed attempts of an upload, instead of reporting that the run waits for data."""
        yield _FailureCounter(self._on_stall)

    def _on_stall(self, reason: str, failed: bool) -> None:
        if self._ended:
            raise _Ended
        if failed:
            self._failures += 1
            if self._failures >= FAILURES_UNTIL_WARNING:
                self._report_away(reason)

    def _report_away(self, reason: str) -> None:
        """Report an unreachable store, once until it is reachable again."""
        with self._changed:
            self._reason = redact(reason)
            was_reported, self._reported_away = self._reported_away, True
            held = "nothing is mirrored yet"
            if self._mirrored_step is not None:
                age = time.monotonic() - self._mirrored_since
                held = f"last mirrored: step {self._mirrored_step:,}, {age:.0f} s ago"
        if not was_reported and not self._ended:
            self._log.event(
                "mirror_away",
                f"Uploads to the mirror {self._uri} fail ({reason}); training continues, uploads are retried; {held}",
                level="warning",
            )


class _FailureCounter:
    def __init__(self, on_stall: Callable[[str, bool], None]) -> None:
        self._on_stall = on_stall

    def report(self, reason: str, *, failed: bool = True) -> None:
        self._on_stall(reason, failed)


def upload_snapshot(
    uri: str, name: str, run_directory: Path, metadata: Mapping[str, int], check: Callable[[], None]
) -> list[StoredFile]:
    """Upload the current run files, then ``RECORD.json`` with their digests."""
    entries: dict[str, dict[str, int | str]] = {}
    put: list[StoredFile] = []
    for path in RunLayout(run_directory).mirrored_files():
        check()
        data = path.read_bytes()
        file = path.relative_to(run_directory).as_posix()
        entries[file] = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        put.append(put_bytes(data, f"{uri}/{SNAPSHOTS}/{name}/{file}"))
    check()
    put.append(put_bytes(encode_snapshot(metadata, entries), f"{uri}/{SNAPSHOTS}/{name}/{SNAPSHOT_MANIFEST}"))
    return put


def _step(path: Path) -> int:
    name = parse_checkpoint_name(path.name)
    assert name is not None, "only checkpoints are mirrored"
    return name.step
