"""``vorox data gc``, ``pin`` and ``unpin``: remove unused caches and files, and protect caches from removal."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vorox.cli import humanize
from vorox.cli.data.loading import load, load_with_tokenizer
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, Yes, confirm, print_json, print_table
from vorox.core.pluralize import pluralize

if TYPE_CHECKING:
    from vorox.data.cache.gc import CacheUse

_OPTIONS = ("--older-than", "--root", "--dry-run", "--yes", "--json", "--name", "--reason", "--cache")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def gc(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [a.b=v ...]", help="Configuration that names the cache directory. Default: $VOROX_CACHE."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="Also remove caches that no run below --root reads, that are not pinned, and that were not opened "
            "for this long: 30d.",
        ),
    ] = None,
    runs: Root = DEFAULT_ROOT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove unreferenced files of caches, and with --older-than unused caches."""
    from vorox.data.cache import gc

    root = _cache_root(arguments or [])
    garbage = gc.find_garbage(root)
    caches = gc.find_caches(root, Path(runs))
    longest = _seconds(older_than)
    unused = [cache for cache in caches if longest is not None and cache.idle_seconds > longest and cache.is_removable]
    if not as_json:
        _print_caches(caches, unused)
        for item in garbage:
            verb = "would remove" if dry_run else "removing"
            typer.echo(f"{verb}  {humanize.size(item.size_bytes)}  {item.path}: {item.reason}")
    freed = sum(item.size_bytes for item in garbage) + sum(cache.size_bytes for cache in unused)
    if not dry_run:
        if unused:
            size_bytes = sum(cache.size_bytes for cache in unused)
            confirm(f"Remove {pluralize(len(unused), 'cache')}, {humanize.size(size_bytes)}?", yes=yes)
        freed = gc.remove_garbage(garbage) + gc.remove_unused(unused)
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


PinName = Annotated[str, typer.Option("--name", help="Name of the pin.")]
Cache = Annotated[
    str | None,
    typer.Option("--cache", help="Name of one cache, as listed by `vorox data gc`, instead of those of CONFIG."),
]
PinArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [a.b=v ...]",
        help="Configuration whose caches are meant; with --cache, the one that names the cache directory.",
    ),
]
_DEFAULT_PIN = "kept"


def pin(
    arguments: PinArguments = None,
    name: PinName = _DEFAULT_PIN,
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown in the list.")] = "",
    cache: Cache = None,
) -> None:
    """Protect the caches of a configuration from gc until they are unpinned."""
    from vorox.data.cache import retention

    for directory in _chosen(arguments or [], cache):
        retention.pin(directory, name, reason)
        typer.echo(f"pinned  {directory}  ({name})")


def unpin(arguments: PinArguments = None, name: PinName = _DEFAULT_PIN, cache: Cache = None) -> None:
    """Remove a pin from the caches of a configuration."""
    from vorox.data.cache import retention

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
    from vorox.core.errors import ConfigError
    from vorox.data.cache.gc import find_caches
    from vorox.data.corpus import prepare

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
    with contextlib.closing(prepare(config, build=False, tokenizer=tokenizer)) as corpus:
        return [reader.directory for reader in (*corpus.train, *corpus.validation)]


def _cache_root(arguments: list[str]) -> Path:
    from vorox.data.cache_location import root_of

    if not arguments:
        return root_of(None)
    return root_of(load(arguments, _OPTIONS).data.cache.directory)


def _seconds(text: str | None) -> float | None:
    from vorox.core.errors import ConfigError

    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration", where="--older-than", hint="write 30d, 12h or 45m")
    return float(match[1]) * _SECONDS[match[2]]


def _print_caches(caches: list[CacheUse], unused: list[CacheUse]) -> None:
    if not caches:
        return
    rows = [
        [
            cache.directory.name,
            humanize.size(cache.size_bytes),
            humanize.duration(cache.idle_seconds),
            ", ".join(cache.runs) or ("being built" if cache.is_busy else "no run"),
            ", ".join(map(str, cache.pins)) or "-",
            "remove" if cache in unused else "keep",
        ]
        for cache in caches
    ]
    print_table(["CACHE", "SIZE", "IDLE", "READ-BY", "PINS", "DO"], rows, right="SIZE IDLE")


def _json(cache: CacheUse, is_unused: bool) -> dict[str, Any]:
    return {
        "directory": str(cache.directory),
        "bytes": cache.size_bytes,
        "idle_seconds": cache.idle_seconds,
        "runs": list(cache.runs),
        "being_built": cache.is_busy,
        "pins": {pin.name: pin.reason for pin in cache.pins},
        "remove": is_unused,
    }
