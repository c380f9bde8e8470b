"""``vorox data gc``, ``pin`` and ``unpin``: remove unused caches and files, and protect caches from removal."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import typer

from vorox.cli.data.loading import load, load_with_tokenizer, recorded_views
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import confirm, print_json, print_table
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.data.cache.upkeep import retention
from vorox.data.cache.upkeep.gc import CacheUse, find_caches, find_garbage, remove_garbage, remove_unused
from vorox.data.corpus.cache_location import root_of
from vorox.data.corpus.corpus import prepare

_OPTIONS = ("--older-than", "--root", "--dry-run", "--yes", "--json", "--name", "--reason", "--cache")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def gc(arguments: list[str] | None, older_than: str | None, runs: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    root = _cache_root(arguments or [])
    garbage = find_garbage(root)
    caches = find_caches(root, Path(runs))
    longest = _seconds(older_than)
    unused = [cache for cache in caches if longest is not None and cache.idle_seconds > longest and cache.is_removable]
    if not as_json:
        _print_caches(caches, unused, arguments or [])
        for item in garbage:
            verb = "would remove" if dry_run else "removing"
            typer.echo(f"{verb}  {humanize.size(item.size_bytes)}  {item.path}: {item.reason}")
    freed = sum(item.size_bytes for item in garbage) + sum(cache.size_bytes for cache in unused)
    if not dry_run:
        if unused:
            size_bytes = sum(cache.size_bytes for cache in unused)
            confirm(f"Remove {pluralize(len(unused), 'cache')}, {humanize.size(size_bytes)}?", yes=yes)
        freed = remove_garbage(garbage) + remove_unused(unused)
    if as_json:
        files = [{"path": str(item.path), "bytes": item.size_bytes, "reason": item.reason} for item in garbage]
        print_json(
            {
                "root": str(root),
                "dry_run": dry_run,
                "freed_bytes": freed,
                "files": files,
                "caches": [_json(cache, cache in unused) for cache in caches],
            }
        )
    else:
        typer.echo(f"{'Would free' if dry_run else 'Freed'} {humanize.size(freed)} ({freed:,} bytes) in {root}")


def pin(arguments: list[str] | None, name: str, reason: str, cache: str | None) -> None:
    for directory in _chosen(arguments or [], cache):
        retention.pin(directory, name, reason)
        typer.echo(f"pinned  {directory}  ({name})")


def unpin(arguments: list[str] | None, name: str, cache: str | None) -> None:
    for directory in _chosen(arguments or [], cache):
        remaining = ", ".join(pin.name for pin in retention.read_pins(directory))
        if retention.unpin(directory, name):
            typer.echo(f"unpinned  {directory}  ({name})")
        else:
            typer.echo(f"not pinned as {name}  {directory}  (pins: {remaining or 'none'})")


def _chosen(arguments: list[str], cache: str | None) -> list[Path]:
    """Return the selected cache directories.

    Raises:
        ConfigError: The cache does not exist, or none is named.
        DataError: The caches of the configuration are incomplete.
    """
    if cache is not None:
        root = _cache_root(arguments)
        known = {found.directory.name: found.directory for found in find_caches(root, root)}
        if cache not in known:
            raise ConfigError(
                f"Cache {cache} not found in {root}",
                where="--cache",
                hint="list the caches with `vorox data gc --dry-run`",
            )
        return [known[cache]]
    if not arguments:
        raise ConfigError(
            "No cache is named", where="vorox data pin", hint="name a configuration, or a cache with --cache"
        )
    config, tokenizer = load_with_tokenizer(arguments, _OPTIONS)
    views = recorded_views(arguments, _OPTIONS, config)
    with contextlib.closing(prepare(config, build=False, tokenizer=tokenizer, views=views)) as corpus:
        return [reader.directory for reader in (*corpus.train, *corpus.validation)]


def _cache_root(arguments: list[str]) -> Path:
    if not arguments:
        return root_of(None)
    return root_of(load(arguments, _OPTIONS).data.cache.directory)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration", where="--older-than", hint="write 30d, 12h or 45m")
    return float(match[1]) * _SECONDS[match[2]]


def _print_caches(caches: list[CacheUse], unused: list[CacheUse], arguments: list[str]) -> None:
    if not caches:
        return
    rows = [
        [
            cache.directory.name,
            humanize.size(cache.size_bytes),
            humanize.duration(cache.idle_seconds),
            _readers(cache),
            ", ".join(map(str, cache.pins)) or "-",
            "remove" if cache in unused else "keep",
        ]
        for cache in caches
    ]
    print_table(["CACHE", "SIZE", "IDLE", "READ-BY", "PINS", "DO"], rows, right="SIZE IDLE")
    lost = [(cache, pin) for cache in caches for pin in cache.pins if pin.place == "lost"]
    if lost:
        typer.echo(
            "\nRuns that are not where they were keep their caches. If one was moved, any command that reads its data, "
            "such as `vorox data verify DIRECTORY`, records its new place. If it was removed for good:"
        )
    for cache, pin in lost:
        typer.echo(
            "  "
            + shlex.join(["vorox", "data", "unpin", *arguments, "--cache", cache.directory.name, "--name", pin.name])
        )


def _readers(cache: CacheUse) -> str:
    """Return the runs that read a cache; without any, those that did and are gone."""
    if cache.runs:
        return ", ".join(cache.runs)
    if cache.is_busy:
        return "being built"
    return f"no run (gone: {', '.join(cache.removed_runs)})" if cache.removed_runs else "no run"


def _json(cache: CacheUse, is_unused: bool) -> dict[str, Any]:
    return {
        "directory": str(cache.directory),
        "bytes": cache.size_bytes,
        "idle_seconds": cache.idle_seconds,
        "runs": list(cache.runs),
        "being_built": cache.is_busy,
        "pins": {pin.name: pin.reason for pin in cache.pins},
        "moved_runs": [pin.name for pin in cache.pins if pin.place == "moved"],
        "lost_runs": [pin.name for pin in cache.pins if pin.place == "lost"],
        "removed_runs": list(cache.removed_runs),
        "remove": is_unused,
    }
