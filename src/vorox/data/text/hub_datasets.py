"""Hugging Face datasets by name: resolving ``hf://OWNER/NAME``, configuration and split to files.

A source goes in; locations inside the repository come out. Only the dataset card and the file list are requested. The
``configs`` of the card decide where they name files; otherwise file names do, as on the hub: a folder per
configuration, the split as a word in a folder or file name. Invariant: the result depends on the repository revision
and the source alone; an ambiguous choice is rejected with the available options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.storage import StoredFile, canonical_uri, scheme_of
from vorox.data.text.split_names import (
    SPLIT_WORDS,
    belongs_to,
    named_split,
    several_for_training,
    shard_split,
    splits_for_training,
)

_REPOSITORY = re.compile(r"hf://datasets/[^/@]+/[^/@]+(@(refs/[^/]+/[^/]+|[^/]+))?")
_CARD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files of one configuration and split.

    Attributes:
        root: The repository; relative paths start here.
        locations: Files and globs inside it.
    """

    root: str
    locations: tuple[str, ...]


def pin_revision(location: str, revision: str | None) -> str:
    """Return the canonical location, pinned to the source's revision unless it names one."""
    uri = canonical_uri(location)
    if revision is None or not uri.startswith("hf://"):
        return uri
    kind, owner, name, *path = uri.removeprefix("hf://").split("/")
    if "@" not in name:
        name = f"{name}@{revision.replace('/', '%2F')}"
    return "hf://" + "/".join([kind, owner, name, *path])


def is_dataset_name(location: str) -> bool:
    """Whether a location is a whole hub dataset, not a path inside one."""
    return location.startswith("hf://") and _REPOSITORY.fullmatch(canonical_uri(location)) is not None


def dataset_files(source: SourceConfig, location: str, endings: tuple[str, ...]) -> HubFiles:
    """Resolve a dataset to its files.

    Args:
        source: The source, with configuration, split and revision.
        location: The dataset.
        endings: File suffixes of the source's format, for datasets whose card names no files.

    Raises:
        DataError: The repository, configuration or split does not exist.
    """
    root = pin_revision(location, source.revision)
    split = source.hf_split or "train"
    configurations = _configurations(_card(root))
    chosen: Mapping[str, Any] = {}
    if configurations:
        chosen = _choose_configuration(root, configurations, source.hf_config)
        paths = _split_paths(chosen, split)
        if paths is None:
            present = sorted(str(name) for name in _splits(chosen))
            raise DataError(
                f"Configuration {chosen['config_name']!r} of the dataset has no split {split!r}; it has "
                f"{', '.join(map(repr, present)) or 'none'}",
                where=root, hint="set the source's hf_split to one of them",
            )  # fmt: skip
        if paths:
            return HubFiles(root, tuple(f"{root}/{path.removeprefix('./')}" for path in paths))
    names = [file.uri.removeprefix(f"{root}/") for file in storage.list_files(root, endings)]
    folder = source.hf_config
    if configurations:
        inside = _data_dir(chosen)
        names = [name for name in names if name.startswith(f"{inside}/")] if inside else names
        folder = None if inside or folder == "default" else folder
    return HubFiles(root, tuple(f"{root}/{name}" for name in _match_names(root, names, folder, split)))


def cloned_files(location: str) -> tuple[str, ...]:
    """Return the files and globs that a folder's own dataset card names; the folder itself if it has none.

    All splits of the configuration are returned: their names decide what is held out.

    Args:
        location: A folder on disk, such as a clone of a dataset; anything else is returned.

    Raises:
        DataError: The card leaves the configuration open, or several splits are for training.
    """
    root = canonical_uri(location).rstrip("/")
    if scheme_of(root) is not None or not Path(root, "README.md").is_file():
        return (location,)
    try:
        configurations = _configurations(_card(root))
    except DataError:  # lines between rules, which are no header
        return (location,)
    if not configurations:
        return (location,)
    try:
        chosen = _choose_configuration(root, configurations, None)
    except DataError as error:
        raise DataError(error.what, where=root, hint="name the files of one of them in paths") from error
    splits, folder = _splits(chosen), _data_dir(chosen)
    for_training = [split for split in splits if named_split(split) == "train"]
    if len(for_training) > 1:
        raise several_for_training(root, for_training, [f"{root}/{splits[split][0]}" for split in for_training])
    inside = [path.removeprefix("./") for paths in splits.values() for path in paths] or ([folder] if folder else [])
    return tuple(f"{root}/{path}" for path in inside) or (location,)


def _card(root: str) -> Mapping[str, Any]:
    """Return the YAML header of the repository's README; empty if there is none."""
    readme = _find_file(f"{root}/README.md", root)
    if readme is None:
        return {}
    with storage.open_range(readme, 0, min(readme.size_bytes, _CARD_BYTES)) as reader:
        text = reader.read().decode("utf-8", "replace").removeprefix("\ufeff")
    match = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if match is None:
        return {}
    try:
        card = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise DataError(
            f"The dataset card is not valid YAML: {' '.join(str(error).split())}", where=readme.uri,
            hint="set paths to the files: hf://OWNER/NAME/data/*.parquet",
        ) from error  # fmt: skip
    return _mapping(card)


def _find_file(uri: str, root: str) -> StoredFile | None:
    """Return a file, or ``None`` if the repository exists without it."""
    try:
        return storage.list_files(uri, ())[0]
    except DataError:
        if any(file.uri == uri for file in storage.list_files(f"{root}/**", ())):
            raise
        return None


def _configurations(card: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = card.get("configs")
    entries = [_mapping(entry) for entry in _as_list(listed)]
    return [entry for entry in entries if isinstance(entry.get("config_name"), str)]


def _choose_configuration(
    root: str, configurations: Sequence[Mapping[str, Any]], wanted: str | None
) -> Mapping[str, Any]:
    by_name = {str(entry["config_name"]): entry for entry in configurations}
    if wanted is None:
        marked = [entry for entry in configurations if entry.get("default") is True]
        chosen = (*marked, by_name.get("default"), *(configurations if len(configurations) == 1 else ()))
        found = next((entry for entry in chosen if entry is not None), None)
    else:
        found = by_name.get(wanted)
    if found is None:
        problem = "needs one of its configurations" if wanted is None else f"has no configuration {wanted!r}; it has"
        raise DataError(
            f"The dataset {problem} {', '.join(map(repr, sorted(by_name)[:20]))}", where=root,
            hint="set the source's hf_config to one of them",
        )  # fmt: skip
    return found


def _splits(configuration: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the paths of each split; files without a split belong to train."""
    folder = _data_dir(configuration)
    listed: Any = configuration.get("data_files")
    if isinstance(listed, dict):
        listed = [{"split": split, "path": path} for split, path in cast("dict[str, Any]", listed).items()]
    splits: dict[str, list[str]] = {}
    for entry in _as_list(listed):
        named = _mapping(entry)
        split = str(named.get("split", "train"))
        for path in _as_list(named.get("path") if named else entry):
            splits.setdefault(split, []).append(f"{folder}/{path}" if folder else str(path))
    return splits


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else cast("list[Any]", value) if isinstance(value, list) else [value]


def _data_dir(configuration: Mapping[str, Any]) -> str:
    return str(configuration.get("data_dir") or "").strip("/")


def _split_paths(configuration: Mapping[str, Any], split: str) -> list[str] | None:
    """Return the paths of a split; empty if file names decide, ``None`` if the split does not exist."""
    splits = _splits(configuration)
    return splits.get(split) if splits else []


def _match_names(root: str, names: Sequence[str], configuration: str | None, split: str) -> list[str]:
    """Return the files whose names mention the configuration and the split."""
    if configuration is not None:
        inside = [name for name in names if configuration in name.split("/")[:-1]]
        if not inside:
            folders = sorted({name.split("/")[0] for name in names if "/" in name})
            raise DataError(
                f"The dataset has no folder for configuration {configuration!r}; its folders are "
                f"{', '.join(map(repr, folders[:20])) or 'none'}",
                where=root, hint="set the source's hf_config to one of them, or set paths to the files",
            )  # fmt: skip
        names = inside
    chosen = [name for name in names if belongs_to(name, split)]
    others = [word for word in SPLIT_WORDS if word != split and any(belongs_to(name, word) for name in names)]
    several = splits_for_training(chosen) if split == "train" else {}
    if several:
        if split not in several:
            error = several_for_training(root, several, ())
            raise DataError(error.what, where=root, hint="set the source's hf_split to one of them")
        return [name for name in chosen if shard_split(name) == split]
    if not chosen and split == "train" and not others:
        return list(names)  # without split names, all files are for training
    if not chosen:
        raise DataError(
            f"No file name of the dataset mentions split {split!r}"
            + (f"; there are files for {', '.join(others)}" if others else ""),
            where=root, hint="set the source's hf_split, or set paths to the files",
        )  # fmt: skip
    return chosen
