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
from typing import Any, cast

import yaml

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data import storage
from vorox.data.storage import StoredFile, canonical_uri

_REPOSITORY = re.compile(r"hf://datasets/[^/@]+/[^/@]+(@(refs/[^/]+/[^/]+|[^/]+))?")
_CARD_BYTES = 8 << 20
_SPLIT_WORDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


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
    files = storage.list_files(root, endings)
    names = [file.uri.removeprefix(f"{root}/") for file in files]
    folder = source.hf_config if not configurations or source.hf_config != "default" else None
    return HubFiles(root, tuple(f"{root}/{name}" for name in _match_names(root, names, folder, split)))


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
    folder = str(configuration.get("data_dir") or "").strip("/")
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


def _split_paths(configuration: Mapping[str, Any], split: str) -> list[str] | None:
    """Return the paths of a split; empty if file names decide, ``None`` if the split does not exist."""
    splits = _splits(configuration)
    if splits:
        return splits.get(split)
    folder = str(configuration.get("data_dir") or "").strip("/")
    return [f"{folder}/**"] if folder else []


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
    chosen = [name for name in names if _mentions(name, split)]
    others = [word for word in _SPLIT_WORDS if word != split and any(_mentions(name, word) for name in names)]
    if not chosen and split == "train" and not others:
        return list(names)  # without split names, all files are for training
    if not chosen:
        raise DataError(
            f"No file name of the dataset mentions split {split!r}"
            + (f"; there are files for {', '.join(others)}" if others else ""),
            where=root, hint="set the source's hf_split, or set paths to the files",
        )  # fmt: skip
    return chosen


def _mentions(name: str, split: str) -> bool:
    words = _SPLIT_WORDS.get(split, (split,))
    return any(re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z])", name, re.IGNORECASE) for word in words)
