"""What a cache is made of: the recipe that its rows are a function of.

Everything that decides the content or the address of a single row is in here, and nothing else: the codec and the
size of compressed blocks may differ from chunk to chunk of one cache. A cache directory carries its recipe in
``RECIPE.json``; a cache of another recipe refuses to open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vorox.core.atomic import canonical_json, pretty_json, write_file
from vorox.core.errors import DataError
from vorox.data.packing import PackingMethod

RECIPE_NAME = "RECIPE.json"
FORMAT = "vorox-cache/2"
DEFAULT_CHUNK_ROWS = 4096
_LARGEST_VOCABULARY_OF_TWO_BYTES = 1 << 16


@dataclass(frozen=True)
class Recipe:
    """The identity of a cache.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        vocab_size: Every token id is below it; up to 65,536 the cache stores two bytes a token, else four.
        end_of_text_id: Token behind every document, also what padding is filled with.
        row_tokens: Tokens of a row: sequence length plus one.
        source: What the source is, JSON values only.
        split: Which part of it this is and how the split is defined, JSON values only.
        packing: How documents become rows.
        chunk_rows: Rows of a full chunk: part of every row's address.
        transforms: What happens to documents before they are packed, JSON values only; absent where nothing does.
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

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab_size <= _LARGEST_VOCABULARY_OF_TWO_BYTES else 4

    @property
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
            **({"transforms": [dict(transform) for transform in self.transforms]} if self.transforms else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recipe:
        value = {**value, "transforms": tuple(value.get("transforms", ()))}
        return cls(**{field.name: value[field.name] for field in fields(cls)})


def write_recipe(directory: Path, recipe: Recipe) -> None:
    body = {"recipe": recipe.to_json(), "sha256": recipe.digest}
    write_file(directory / RECIPE_NAME, pretty_json(body))


def read_recipe(directory: Path) -> Recipe:
    """The recipe of a cache directory.

    Raises:
        DataError: There is none, it is damaged, or it is of a format that this version does not read.
    """
    path = directory / RECIPE_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"no cache here: {error.strerror}", where=str(path), hint="`vorox data build` makes it"
        ) from error  # fmt: skip
    try:
        body = json.loads(raw)
        stored_format = body["recipe"]["format"]
        recipe = Recipe.from_json(body["recipe"])
        intact = raw == pretty_json({"recipe": recipe.to_json(), "sha256": recipe.digest})
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if stored_format != FORMAT:
        raise DataError(
            f"the cache has format {stored_format!r}, this version reads {FORMAT!r}", where=str(path),
            hint="build a new one, or read it with the version that made it",
        )  # fmt: skip
    if not intact:
        raise _damaged(path)
    return recipe


def check_recipe(directory: Path, found: Recipe, expected: Recipe) -> None:
    """Refuse a cache that was made differently.

    Raises:
        DataError: Naming both digests and the values that differ.
    """
    if found.digest == expected.digest:
        return
    left, right = found.to_json(), expected.to_json()
    differences = ", ".join(
        f"{key}: {_short(left.get(key))} here, {_short(right.get(key))} asked for"
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    )
    raise DataError(
        f"the cache was made by recipe {found.digest}, not by {expected.digest} ({differences})",
        where=str(directory),
        hint="give the configuration that made it, or another data.cache.directory, and build again",
    )


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def _damaged(path: Path) -> DataError:
    return DataError(
        "the recipe does not match its own hash", where=str(path),
        hint="remove the cache directory and build it again; nothing in it can be trusted to be what it says",
    )  # fmt: skip
