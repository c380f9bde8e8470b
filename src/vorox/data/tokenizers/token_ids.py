"""A placeholder tokenizer for token shards whose tokenizer is unknown: its text is ids as numbers.

A vocabulary size and an end-of-text id go in; a ``Tokenizer`` that reads and prints ids as numbers comes out. Features
that need text (bits per byte, samples, text transforms) are not available with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json, pretty_json
from vorox.core.files.json_reader import read_json
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.rows import TokenArray
from vorox.data.tokenizers.base_settings import GENERATION_NAME
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

IDS_NAME = "token_ids.json"


class TokenIds(Tokenizer):
    """A tokenizer whose text is token ids as numbers.

    Args:
        vocab_size: Number of ids in the shards.
        end_of_text_id: The id that ends a document; ``None`` for a new one after the others.
    """

    def __init__(self, vocab_size: int, end_of_text_id: int | None) -> None:
        self.vocab_size = vocab_size + (end_of_text_id is None)
        self.end_of_text = END_OF_TEXT
        self.end_of_text_id = vocab_size if end_of_text_id is None else end_of_text_id
        self.end_ids = (self.end_of_text_id,)
        self.unknown_id = None
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.lossless = False
        self._description = {"vocab_size": self.vocab_size, "end_of_text_id": self.end_of_text_id}
        self.fingerprint = hashlib.sha256(canonical_json({"format": "token-ids/1", **self._description})).hexdigest()

    def _tokens_by_id(self) -> dict[int, str]:
        return {}  # unknown

    @property
    def fast_path_fallbacks(self) -> int:
        return 0

    @property
    def is_fast(self) -> bool:
        return False

    def with_fast_path(self) -> Tokenizer:
        return self

    def without_fast_path(self) -> Tokenizer:
        return self

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ()

    def special_id(self, token: str) -> int | None:
        return self.end_of_text_id if token == self.end_of_text else None

    def token_id(self, token: str) -> int | None:
        return self.special_id(token)

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def without_special(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def encode_as_transformers(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids that a text lists; none are added."""
        del add_special_tokens
        return self.encode(text).tolist()

    @property
    def stop_ids(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.end_ids

    @property
    def turn_end_ids(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ()

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        if any(self.special_id(token) is None for token in tokens):
            raise ConfigError(
                "Token ids without a tokenizer have no special tokens", where="tokenizer.special_tokens",
                hint="remove tokenizer.special_tokens",
            )  # fmt: skip
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> TokenArray:
        """Parse a text of ids.

        Raises:
            ConfigError: The text is not a sequence of ids below ``vocab_size``.
        """
        words = text.split()
        wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
        if wrong is None:
            ids = [int(word) for word in words]
            if all(token < self.vocab_size for token in ids):
                return cast(TokenArray, np.array(ids, self.dtype))
        raise ConfigError(
            f"tokenizer.kind=none reads only token ids, and {text[:40]!r} is not ids below {self.vocab_size:,}",
            where="tokenizer.kind",
            hint='use ids, such as -p "15496 995", or set the tokenizer that wrote the shards',
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the ids as text."""
        return " ".join(str(int(token)) for token in ids)

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Return zeros: ids have no text."""
        return np.zeros(self.vocab_size, np.int32)

    def files(self, max_positions_tokens: int | None = None) -> dict[str, bytes]:
        """Return the description of the ids, and where generation stops; transformers has no tokenizer to load."""
        del max_positions_tokens
        return {IDS_NAME: pretty_json(self._description), GENERATION_NAME: pretty_json(self.special_ids())}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.vocab_size, self.end_of_text_id)


def token_ids(config: TokenizerConfig) -> TokenIds:
    """Return the tokenizer of ``tokenizer.kind: none``."""
    return TokenIds(config.vocab_size, config.end_of_text_id)


def load_token_ids(file: Path) -> TokenIds:
    """Read ``token_ids.json``.

    Raises:
        DataError: The file is corrupt.
    """
    try:
        value: Any = read_json(file)
        return TokenIds(int(value["vocab_size"]), int(value["end_of_text_id"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("The description of the token ids is corrupt", where=str(file)) from error
