"""What a cache is built from: its recipe, source files and units.

``RECIPE.json`` holds every setting that decides the content or the address of a row, and nothing else: chunks of one
cache may differ in codec and block size. A cache with a different recipe is refused.

``FILES.jsonl`` and ``UNITS.jsonl`` list the source files and the units. Both are append-only and hash-chained; an index
stays valid once the manifest has planned it (``cache/building/initialize.py``), because documents refer to files, and
rows to units, by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json, pretty_json, write_file
from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.core.files.json_reader import parse_json
from vorox.core.schema.data import PackingMethod
from vorox.data.documents import SourceFile, Unit, UnitSpan
from vorox.data.images.layout import ImageLayout
from vorox.data.images.tokens import END_OF_IMAGE_IDS

RECIPE_NAME = "RECIPE.json"
FILES_NAME = "FILES.jsonl"
UNITS_NAME = "UNITS.jsonl"
FORMAT = "vorox-cache/4"
_FORMATS = "vorox-cache/"
DEFAULT_CHUNK_ROWS = 4096
_LARGEST_VOCABULARY_OF_TWO_BYTES = 1 << 16
_ENTRIES_PER_LINE = 1000


def stored_token_bytes(vocab_size: int, images: ImageLayout | None) -> int:
    """Return the bytes of a token in a cache."""
    return 2 if _num_ids(vocab_size, images) <= _LARGEST_VOCABULARY_OF_TWO_BYTES else 4


def _num_ids(vocab_size: int, images: ImageLayout | None) -> int:
    return vocab_size if images is None else END_OF_IMAGE_IDS


@dataclass(frozen=True)
class Recipe:
    """The identity of a cache.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        vocab_size: Number of token ids; up to 65,536 the cache stores two bytes per token, else four, as with images.
        end_of_text_id: Ends a text; rows are padded with it.
        row_tokens: Tokens of a row: sequence length plus one.
        source: Identity of the source, JSON values only.
        split: Which part of the source this is and how the split is defined, JSON values only.
        packing: How documents are packed into rows.
        chunk_rows: Rows of a full chunk: part of every row's address.
        transforms: The transforms applied to documents before packing, JSON values only.
        images: How images are placed in rows; ``None`` for rows without images.
        start_ids: Tokens before every document, which are no targets: what the tokenizer adds before a text. Empty in
            conversations, whose template writes all their tokens, and in token shards.
        end_ids: Tokens after every document; ``None`` for ``end_of_text_id`` alone.
    """

    tokenizer: str
    vocab_size: int
    end_of_text_id: int
    row_tokens: int
    source: Mapping[str, Any]
    split: Mapping[str, Any]
    packing: PackingMethod = "best_fit"
    chunk_rows: int = DEFAULT_CHUNK_ROWS
    transforms: Sequence[Mapping[str, Any]] = ()
    images: ImageLayout | None = None
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] | None = None

    @cached_property
    def document_end_ids(self) -> tuple[int, ...]:
        """The tokens after every document."""
        return (self.end_of_text_id,) if self.end_ids is None else self.end_ids

    @property
    def filler_id(self) -> int:
        """The token in place of those of masked and of erased documents."""
        return self.end_of_text_id

    @cached_property
    def num_ids(self) -> int:
        """All ids are below: the vocabulary, and those of images (``data/images/tokens.py``)."""
        return _num_ids(self.vocab_size, self.images)

    @cached_property
    def token_bytes(self) -> int:
        return stored_token_bytes(self.vocab_size, self.images)

    @property
    def uses_paths(self) -> bool:
        """Whether the split of a record depends on the relative path of its file."""
        return self.split.get("held_out") == "document"

    @cached_property
    def dtype(self) -> str:
        return f"uint{8 * self.token_bytes}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the recipe, in hex."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "end_of_text_id": self.end_of_text_id,
            "row_tokens": self.row_tokens,
            "dtype": self.dtype,
            "packing": self.packing,
            "chunk_rows": self.chunk_rows,
            "source": dict(self.source),
            "split": dict(self.split),
            "transforms": [dict(transform) for transform in self.transforms],
            "images": None if self.images is None else self.images.to_json(),
            "start_ids": list(self.start_ids),
            "end_ids": None if self.end_ids is None else list(self.end_ids),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recipe:
        images, ends = value["images"], value["end_ids"]
        value = {
            **value,
            "transforms": tuple(value["transforms"]),
            "images": None if images is None else ImageLayout.from_json(images),
            "start_ids": tuple(value["start_ids"]),
            "end_ids": None if ends is None else tuple(ends),
        }
        return cls(**{field.name: value[field.name] for field in fields(cls)})


def write_recipe(directory: Path, recipe: Recipe) -> None:
    body = {"recipe": recipe.to_json(), "sha256": recipe.digest}
    write_file(directory / RECIPE_NAME, pretty_json(body))


def read_recipe(directory: Path) -> Recipe:
    """Read the recipe of a cache directory.

    Raises:
        DataError: It is missing, damaged, or in a format that this version does not read.
    """
    path = directory / RECIPE_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"No cache here: {error.strerror}", where=str(path), hint="run `vorox data build` to build it"
        ) from error  # fmt: skip
    try:
        body = parse_json(raw, path)
        stored_format = body["recipe"]["format"]
        if stored_format == FORMAT:
            recipe = Recipe.from_json(body["recipe"])
            if raw == pretty_json({"recipe": recipe.to_json(), "sha256": recipe.digest}):
                return recipe
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if str(stored_format).startswith(_FORMATS) and stored_format != FORMAT:
        raise DataError(
            f"The cache has format {stored_format!r}, but this version reads {FORMAT!r}", where=str(path),
            hint="build it again: vorox data build with the same configuration; vorox data gc removes this one",
        )  # fmt: skip
    raise _damaged(path)


def check_recipe(directory: Path, found: Recipe, expected: Recipe) -> None:
    """Refuse a cache that was built by a different recipe.

    Raises:
        DataError: The recipes differ; the message has both digests and the values that differ.
    """
    if found.digest == expected.digest:
        return
    left, right = found.to_json(), expected.to_json()
    differences = ", ".join(
        f"{key}: {_short(left.get(key))} here, {_short(right.get(key))} expected"
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    )
    raise DataError(
        f"The cache was built by recipe {found.digest}, expected {expected.digest} ({differences})",
        where=str(directory),
        hint="use the configuration that it was built with, or build into another data.cache.directory",
    )


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def _damaged(path: Path) -> DataError:
    return DataError(
        "The recipe does not match its own hash", where=str(path),
        hint="remove the cache directory and build it again; none of its content can be trusted",
    )  # fmt: skip


class FileLog:
    """The list of source files.

    Attributes:
        files: All files listed, planned or not.
    """

    def __init__(self, directory: Path) -> None:
        self._log = HashChainedLog(directory / FILES_NAME)
        self.files: list[SourceFile] = []
        for body in self._log.read()[0]:
            first = int(body["first"])
            entries = [SourceFile(uri, int(size), version, path) for uri, size, version, path in body["files"]]
            if "void_from" in body:
                del self.files[int(body["void_from"]) :]
            self.files[first : first + len(entries)] = entries

    def replace(self, moved: Iterable[int], first: int, files: Sequence[SourceFile]) -> None:
        """Write the files that changed, durably.

        Args:
            moved: Indices of files below ``first`` that have a new uri.
            first: Files from this index on are replaced.
            files: All files, as they are listed afterwards.
        """
        runs = [(index, index + 1) for index in moved]
        runs += [(index, index + _ENTRIES_PER_LINE) for index in range(first, len(files), _ENTRIES_PER_LINE)]
        entries = [[file.uri, file.size_bytes, file.version, file.path] for file in files]
        bodies: list[dict[str, Any]] = [{"first": start, "files": entries[start:end]} for start, end in runs]
        if len(self.files) > first:
            bodies.insert(0, {"first": first, "void_from": first, "files": []})
        self._log.append(bodies)


class UnitLog:
    """The list of units. It is read incrementally.

    Attributes:
        units: All units listed, planned or not, ``unit_id`` being the index.
    """

    def __init__(self, directory: Path) -> None:
        self.units: list[Unit] = []
        self._log, self._position = HashChainedLog(directory / UNITS_NAME), LogPosition()
        self.refresh()

    def refresh(self) -> None:
        """Read the entries added since the last call."""
        bodies, self._position = self._log.read_after(self._position)
        for body in bodies:
            del self.units[int(body["first"]) :]
            for spans in body["units"]:
                self.units.append(Unit(len(self.units), tuple(UnitSpan(*span) for span in spans)))

    def append(self, first: int, units: Sequence[Unit]) -> None:
        """Replace the units from number ``first`` on, durably. The caller holds the cache's lock."""
        bodies = [
            {"first": first + at, "units": [unit.spans for unit in units[at : at + _ENTRIES_PER_LINE]]}
            for at in range(0, len(units), _ENTRIES_PER_LINE)
        ]
        self._log.append(bodies, after=self._position)
        self.refresh()


def read_files(directory: Path) -> list[SourceFile]:
    return FileLog(directory).files


def read_units(directory: Path) -> list[Unit]:
    return UnitLog(directory).units
