"""``vorox checkpoints``: list, verify, restore, sign, remove, average and request checkpoints."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import confirm, echo, print_json, print_table
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import CheckpointError, ConfigError, DataError, StalledError, UnreadableCheckpointError
from vorox.core.files.file_holder import lock_holder
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.storage import RetryPolicy, canonical_uri, retry_budget, scheme_of
from vorox.experiments.artifacts import (
    CheckpointSummary,
    find_checkpoints,
    list_checkpoints,
    remove_checkpoints,
    verify_checkpoint,
)
from vorox.records.replay_chain import examine_chain
from vorox.records.run_lookup import find_run, run_argument
from vorox.run import states_of_run
from vorox.training.checkpoints.signature import (
    load_private_key,
    load_public_key,
    sign_checkpoint,
    verify_newest_is_present,
    verify_signature,
)
from vorox.training.checkpoints.store import none_valid_error, request_save, restore_quarantined
from vorox.training.export.average import average_checkpoints
from vorox.training.export.derived import AVERAGED
from vorox.training.mirror import Contents, list_mirror, mirror_uri, restore_checkpoint, restore_run

_POLL_SECONDS = 0.2


def list_(run: str, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    found, mirror = list_checkpoints(directory), _mirror_of(directory)
    if as_json:
        print_json([_json(entry) for entry in found] if mirror is None else [*map(_json, found), *_mirror_json(mirror)])
        return
    _print(found, as_json=False)
    if mirror is not None:
        _print_mirror(mirror)


def _mirror_of(directory: Path) -> Contents | str | None:
    """Return the contents of a run's mirror, the reason why they are unknown, or ``None`` without a mirror."""
    uri = mirror_uri(directory)
    try:
        with retry_budget(RetryPolicy(retries_per_unit=3)):
            return None if uri is None else list_mirror(uri)
    except (ConfigError, DataError) as error:
        return f"{uri}: {error.what}"


def _print_mirror(mirror: Contents | str) -> None:
    if isinstance(mirror, str):
        typer.echo(f"\nMirror cannot be listed: {mirror}")
        return
    rows = [
        [
            str(entry["name"]),
            str(entry["state"]),
            humanize.size(entry["size_bytes"]),
            humanize.UNKNOWN if entry["saved_at"] is None else humanize.duration(time.time() - entry["saved_at"]),
        ]
        for entry in _mirror_json(mirror)
    ]
    typer.echo(f"\nmirror {mirror.uri}" + ("" if rows else ": no checkpoint"))
    if rows:
        print_table(["CHECKPOINT", "STATE", "SIZE", "AGE"], rows, right="SIZE AGE")


def _mirror_json(mirror: Contents | str) -> list[dict[str, Any]]:
    """Return the checkpoints of a mirror: ``whole``, ``torn`` (an incomplete or running upload) or ``abandoned`` (not
    in the run's lineage)."""
    if isinstance(mirror, str):
        return [{"mirror": mirror, "state": "unknown"}]
    line = {entry.name for entry in mirror.lineage()}
    return [
        {
            "mirror": mirror.uri,
            "name": entry.name,
            "path": f"{mirror.uri}/checkpoints/{entry.name}",
            "step": entry.step,
            "state": "whole" if entry.name in line else "abandoned" if entry.is_complete else "torn",
            "size_bytes": entry.size_bytes,
            "saved_at": entry.saved_at,
        }
        for entry in mirror.checkpoints
    ]


def verify(run: str, step: int | None, restore: bool, public_key: Path | None, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    if restore:
        _restore(directory, echo_to_stderr=as_json)
    known = [entry for entry in list_checkpoints(directory) if step is None or entry.step == step]
    if not known:
        what = "No checkpoint" + ("" if step is None else f" of step {step:,}")
        raise ConfigError(what, where=str(directory), hint=f"see `vorox checkpoints list {run_argument(directory)}`")
    found = [verify_checkpoint(entry) for entry in known]
    _print(found, as_json)
    _report_chain(directory, max((entry.step for entry in found if entry.state == "valid"), default=0), as_json)
    unreadable = [entry for entry in found if entry.state == "unreadable"]
    if unreadable:
        raise UnreadableCheckpointError(
            f"{len(unreadable)} of {pluralize(len(found), 'checkpoint')} cannot be read: {unreadable[0].problem}",
            where=str(directory),
            hint=f"check the disk or network share, then `vorox checkpoints verify {run_argument(directory)}` again",
        )
    corrupt = [entry for entry in found if entry.state == "corrupt"]
    if corrupt:
        valid = [entry.step for entry in found if entry.state == "valid"]
        raise CheckpointError(
            f"{len(corrupt)} of {pluralize(len(found), 'checkpoint')} "
            f"{'is' if len(corrupt) == 1 else 'are'} corrupt: {', '.join(entry.name for entry in corrupt)}",
            where=str(directory),
            hint="a resume uses the newest valid one"
            if valid
            else f"restore one from a copy; from a mirror, `vorox checkpoints restore {run_argument(directory)}`",
            saved=f"step {max(valid):,} is valid" if valid else "",
        )
    if not any(entry.state == "valid" for entry in found):
        raise none_valid_error(directory, "all are quarantined", "this run" if step is None else f"step {step:,}")
    if public_key is not None:
        steps = [entry.step for entry in found if entry.state == "valid"]
        _verify_signatures(directory, steps, public_key, as_json, is_whole_run=step is None)


def _report_chain(directory: Path, last_step: int, as_json: bool) -> None:
    """Print what the replay chain lacks up to a step. The checkpoints do not need it, but a replay does."""
    try:
        chain = examine_chain(directory, last_step)
    except DataError as error:
        typer.echo(str(error), err=as_json)
        return
    if lost := chain.damage(last_step):
        typer.echo(
            f"{chain.path.name} is missing or damaged: {lost}; the checkpoints do not depend on it, but these steps "
            "cannot be replayed unless the file is restored from a copy",
            err=as_json,
        )


def _verify_signatures(
    directory: Path, steps: list[int], public_key: Path, as_json: bool, *, is_whole_run: bool
) -> None:
    key = load_public_key(public_key)
    signatures = [verify_signature(directory, step, key) for step in steps]
    if is_whole_run:
        verify_newest_is_present(directory)
    text = f"{pluralize(len(signatures), 'signature')} by key {signatures[0].key_id[:16]} verified."
    typer.echo(text, err=as_json)


def sign(run: str, key: Path, step: int | None, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    steps = [known for known in step_directories(directory) if step is None or known == step]
    if not steps:
        what = "No checkpoint" + ("" if step is None else f" of step {step:,}")
        raise ConfigError(what, where=str(directory), hint=f"see `vorox checkpoints list {run_argument(directory)}`")
    private_key = load_private_key(key)
    signatures = [sign_checkpoint(directory, known, private_key) for known in steps]
    if as_json:
        print_json([{"step": one.step, "path": str(one.path), "key_id": one.key_id} for one in signatures])
        return
    for one in signatures:
        typer.echo(f"Signed step {one.step:,} by key {one.key_id[:16]}: {one.path}")


def _restore(directory: Path, *, echo_to_stderr: bool) -> None:
    found = restore_quarantined(directory)
    for entry in found:
        text = (
            f"Restored step {entry.step:,}."
            if not entry.problem
            else f"{entry.name} stays quarantined: {entry.problem}"
        )
        typer.echo(text, err=echo_to_stderr)
    if not found:
        typer.echo("No quarantined checkpoint to restore.", err=echo_to_stderr)


def restore(run: str, step: int | None, root: str) -> None:
    if scheme_of(run) is None:
        directory = find_run(root, run)
        uri = mirror_uri(directory)
    else:
        uri = canonical_uri(run)
        directory = Path(root) / uri.rpartition("/")[2]
    if uri is None:
        raise ConfigError(f"Run {directory.name} has no mirror", where=str(directory), hint="name the mirror's URI")
    found = list_mirror(uri)
    if not found.checkpoints:
        raise ConfigError("There is no mirrored run at this URI", where=uri, hint="list the folder above it")
    path = restore_run(found, directory, echo) if step is None else restore_checkpoint(found, directory, echo, step)
    if path is None:
        typer.echo(f"{directory.name} is not behind its mirror {uri}; --step restores one of its checkpoints.")
    else:
        typer.echo(f"{path}: verified")


def remove(run: str, names: list[str], force: bool, root: str, yes: bool) -> None:
    directory = find_run(root, run, exact=True)
    chosen = ", ".join(entry.name for entry in find_checkpoints(directory, names))
    confirm(f"Remove {chosen} of {directory.name}?", yes=yes)
    removed = remove_checkpoints(directory, names, force=force)
    size_bytes = sum(entry.size_bytes for entry in removed)
    typer.echo(f"Removed {', '.join(entry.name for entry in removed)} ({humanize.size(size_bytes)}).")


def average(run: str, to: Path, steps: list[str] | None, last: int | None, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    if (last is None) == (not steps):
        raise ConfigError("Name the steps to average, or set --last, not both", where="checkpoints average")
    paths = _paths(directory, steps or [])
    if last is not None:
        paths = list(step_directories(directory).values())[-last:]
        if len(paths) < last:
            raise ConfigError(
                f"Run has {pluralize(len(paths), 'checkpoint')}, not {last}", where=str(directory),
                hint="average fewer, or train with a larger checkpoint.keep_last",
            )  # fmt: skip
    found = average_checkpoints(paths, to)
    if as_json:
        print_json({"run": directory.name, "path": str(found.path), "steps": found.metadata[AVERAGED]})
        return
    averaged = ", ".join(f"{step:,}" for step in found.metadata[AVERAGED])
    typer.echo(f"{found.path}: the mean of the weights of steps {averaged}")


def _paths(directory: Path, names: list[str]) -> list[Path]:
    """Return the checkpoints of a run with these steps or directory names; steps that were not kept are computed."""
    steps = [int(name) for name in names if re.fullmatch("[0-9]{1,15}", name)]
    known = step_directories(directory)
    computed = states_of_run(directory, [step for step in steps if step not in known], PrintedNotices())
    kept = find_checkpoints(directory, [name for name in names if not (name.isdecimal() and int(name) in computed)])
    return [*(entry.path for entry in kept), *(checkpoint.path for checkpoint in computed.values())]


def save(run: str, wait_seconds: float, root: str, as_json: bool) -> None:
    directory = find_run(root, run)
    layout = RunLayout(directory)
    holder = lock_holder(layout.lock)
    if holder is None:
        raise ConfigError(
            f"Run {directory.name} is not running, so there is nothing to save",
            where=str(directory),
            hint=f"see `vorox checkpoints list {run_argument(directory)}`",
        )
    before = {entry.name for entry in list_checkpoints(directory)}
    request_save(directory)
    deadline = time.monotonic() + wait_seconds
    while wait_seconds and layout.save_request.exists():
        if lock_holder(layout.lock) is None:
            layout.save_request.unlink(missing_ok=True)
            raise ConfigError(
                f"Run {directory.name} ended before it saved a checkpoint",
                where=str(directory),
                hint=f"see `vorox runs show {run_argument(directory)}`",
            )
        if time.monotonic() > deadline:
            raise StalledError(
                f"No checkpoint after {humanize.duration(wait_seconds)}; the request is still pending",
                where=f"{directory}, {holder}",
                hint=f"wait longer with --wait, or check the run with `vorox runs show {run_argument(directory)}`",
            )
        time.sleep(_POLL_SECONDS)
    if not wait_seconds:
        typer.echo(f"Requested a checkpoint from {holder}.", err=as_json)
        return
    new = [entry for entry in list_checkpoints(directory) if entry.name not in before]
    _print(new or list_checkpoints(directory)[-1:], as_json)


def _print(found: list[CheckpointSummary], as_json: bool) -> None:
    if as_json:
        print_json([_json(entry) for entry in found])
    else:
        print_checkpoints(found)


def print_checkpoints(found: list[CheckpointSummary]) -> None:
    """Print a table of checkpoints."""
    rows = [
        [
            entry.name,
            entry.state,
            humanize.number(entry.eval_loss, 4),
            humanize.size(entry.size_bytes),
            humanize.UNKNOWN if entry.saved_at is None else humanize.duration(time.time() - entry.saved_at),
            str(entry.metadata.get("fingerprint", humanize.UNKNOWN))[:16],
            entry.problem,
        ]
        for entry in found
    ]
    if rows:
        print_table(["CHECKPOINT", "STATE", "EVAL", "SIZE", "AGE", "FINGERPRINT", ""], rows, right="EVAL SIZE AGE")
    else:
        typer.echo("No checkpoints.")


def _json(entry: CheckpointSummary) -> dict[str, Any]:
    path: Path = entry.path
    return {**asdict(entry), "path": str(path)}
