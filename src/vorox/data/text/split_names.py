"""Infer splits from the names of files and folders, as the Hub does: ``train-00000-of-00001.parquet``, ``test/``.

A path relative to the location of its source goes in; its split comes out. Invariants: the rule is the same for every
format, on disks, in stores and on the Hub; the innermost name that contains a split word decides, and in it the last
such word, because a data set's own name comes first: ``dev-tools-train.jsonl`` is for training. Source code has no
split: train.py and test_model.py name what the code does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from vorox.core.errors import DataError
from vorox.core.schema.source_formats import CODE_ENDINGS
from vorox.data.storage import canonical_uri, escape_glob, glob_root, relative_name

SPLIT_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("train", "training", "trainset"),
    "validation": ("validation", "valid", "val", "dev", "valset", "devset"),
    "test": ("test", "testing", "testset", "eval", "evaluation"),
}
"""The words for each split; in a name, separators or digits surround them."""

_SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_ANY_WORD = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SPLIT_OF)})(?![A-Za-z])", re.IGNORECASE)


_SHARD = re.compile(r"(?:^|[-/])(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?!\d)[^/]*$")
"""A shard as ``datasets`` names it, after the split that it is of."""


def mentions(path: str, split: str) -> bool:
    """Whether a path mentions a split by one of its words, or by its own name if it is none of the usual ones."""
    words = "|".join(map(re.escape, SPLIT_WORDS.get(split, (split,))))
    return re.search(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z])", path, re.IGNORECASE) is not None


def named_split(path: str) -> str | None:
    """Return ``train``, ``validation`` or ``test``; ``None`` for source code and for a path without a split word."""
    if path.lower().endswith(CODE_ENDINGS):
        return None
    for name in reversed(path.split("/")):
        found = _ANY_WORD.findall(name)
        if found:
            return _SPLIT_OF[found[-1].lower()]
    return None


def belongs_to(path: str, split: str) -> bool:
    """Whether a path belongs to a split: ``train``, ``validation``, ``test`` or one of the data set's own."""
    return named_split(path) == split if split in SPLIT_WORDS else mentions(path, split)


def is_validation_name(path: str) -> bool:
    """Whether the name of a file or of a parent folder marks it as validation data, such as ``val.bin``."""
    return named_split(path) == "validation"


def other_splits(listed: Mapping[str, Iterable[str]], *, folders_are_splits: bool) -> dict[str, str]:
    """Return the files that are not read because files of a split ``train`` are beside them, each with its split.

    A file that is named itself is read, as are those of a pattern with a word for the split: ``test-*.parquet``.

    Args:
        listed: URIs of files by the location under which they were found.
        folders_are_splits: Whether beside a folder ``train``, every folder is a split, as ``datasets`` writes them.
    """
    beside: dict[str, dict[str, str]] = {}
    named: set[str] = set()
    for location, uris in listed.items():
        root = canonical_uri(location).rstrip("/")
        folder = glob_root(root)
        is_named = mentions(root[len(folder) :], "test")
        for uri in uris:
            is_inside = uri.startswith(f"{root}/")
            if uri == root or (is_named and not is_inside):
                named.add(uri)
            path = relative_name(location, uri)
            beside.setdefault(root if is_inside else folder, {})[uri] = uri if path is None else path
    others: dict[str, str] = {}
    for paths in beside.values():
        splits = {uri: named_split(path) for uri, path in paths.items()}
        if "train" not in splits.values():
            continue
        others |= {uri: split for uri, split in splits.items() if split == "test"}
        tops = {uri: path.partition("/")[0] for uri, path in paths.items()}
        if folders_are_splits and any(top == "train" != paths[uri] for uri, top in tops.items()):
            others |= {uri: top for uri, top in tops.items() if top != "train" and splits[uri] != "validation"}
    return {uri: split for uri, split in others.items() if uri not in named}


def shard_split(path: str) -> str | None:
    """Return the split in the name of a shard, ``train_sft`` of ``train_sft-00000-of-00003.parquet``; else ``None``."""
    found = _SHARD.search(path)
    return None if found is None else found["split"]


def splits_for_training(paths: Iterable[str]) -> dict[str, str]:
    """Return the splits for training by whose names the shards of one folder differ, each with a file of it.

    Empty without shards, and if no folder has several: ``train_sft-00000-of-00003`` beside ``train_gen-00000-of-00001``
    are two data sets, as for ``datasets``.
    """
    folders: dict[str, dict[str, str]] = {}
    for path in sorted(paths):
        split = shard_split(path)
        if split is not None and named_split(split) == "train":
            folders.setdefault(path.rpartition("/")[0], {}).setdefault(split, path)
    several = (found for found in folders.values() if len(found) > 1)
    return next(several, dict[str, str]())


def refuse_several(location: str, uris: Iterable[str]) -> None:
    """Refuse a folder, or a glob that says nothing of splits, whose shards are of several splits for training.

    Raises:
        DataError: They are.
    """
    root = canonical_uri(location).rstrip("/")
    if mentions(root[len(glob_root(root)) :], "train"):
        return
    found = splits_for_training(uris)
    if found:
        globs = (f"{escape_glob(path.rpartition(f'{split}-')[0])}{split}-*" for split, path in found.items())
        raise several_for_training(root, found, globs)


def several_for_training(root: str, splits: Iterable[str], shown: Iterable[str]) -> DataError:
    """Return the error for files of several splits for training, given globs or files of some."""
    return DataError(
        f"The dataset has several splits for training: {', '.join(map(repr, splits))}", where=root,
        hint=f"name the files of one, or of each that you mean, in paths: {' or '.join(shown)}",
    )  # fmt: skip


def left_out(source: str, others: Iterable[str]) -> str:
    """Return the message about the splits of a source that are not read."""
    names = ", ".join(sorted(set(others)))
    what = f"source {source!r} has a split train; these splits are left out: {names}"
    return f"{what} (name their files in paths to read them)"
