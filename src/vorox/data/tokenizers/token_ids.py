"""Token ids without a tokenizer: for token shards whose tokenizer nobody has.

A vocabulary size and an end-of-text id go in; what stands in a tokenizer's place comes out: it writes ids as numbers
and reads numbers as ids. Nothing that needs text (bits per byte, samples, transforms of text) can be had with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json, pretty_json
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.data import TokenizerConfig
from vorox.data.rows import TokenArray
from vorox.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

IDS_NAME = "token_ids.json"


class TokenIds(Tokenizer):
    """What stands in a tokenizer's place where there is none: its text is numbers.

    Args:
        vocab_size: Ids of the shards.
        end_of_text_id: The one that ends a document; ``None`` takes a further one behind them.
    """

    def __init__(self, vocab_size: int, end_of_text_id: int | None) -> None:
        self.vocab_size = vocab_size + (end_of_text_id is None)
        self.end_of_text = END_OF_TEXT
        self.end_of_text_id = vocab_size if end_of_text_id is None else end_of_text_id
        self.unknown_id = None
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.lossless = False
        self._description = {"vocab_size": self.vocab_size, "end_of_text_id": self.end_of_text_id}
        self.fingerprint = hashlib.sha256(canonical_json({"format": "token-ids/1", **self._description})).hexdigest()

    def _tokens_by_id(self) -> dict[int, str]:
        return {}  # whose they are is not known

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

    def special_id(self, token: str) -> int | None:
        return self.end_of_text_id if token == self.end_of_text else None

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        if any(self.special_id(token) is None for token in tokens):
            raise ConfigError(
                "token ids without a tokenizer have no special tokens", where="tokenizer.special_tokens",
                hint="leave tokenizer.special_tokens out",
            )  # fmt: skip
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> TokenArray:
        """The ids that a text of numbers names.

        Raises:
            ConfigError: It holds anything else.
        """
        words = text.split()
        wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
        if wrong is None:
            ids = [int(word) for word in words]
            if all(token < self.vocab_size for token in ids):
                return cast(TokenArray, np.array(ids, self.dtype))
        raise ConfigError(
            f"tokenizer.kind=none knows token ids only, and {text[:40]!r} is not ids below {self.vocab_size:,}",
            where="tokenizer.kind",
            hint='write ids, such as -p "15496 995"; or give the tokenizer that wrote the shards',
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The numbers of some ids."""
        return " ".join(str(int(token)) for token in ids)

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """No id stands for any text."""
        return np.zeros(self.vocab_size, np.int32)

    def files(self, max_positions_tokens: int | None = None) -> dict[str, bytes]:
        """Return the description of the ids; transformers has nothing to load from it."""
        del max_positions_tokens
        return {IDS_NAME: pretty_json(self._description)}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.vocab_size, self.end_of_text_id)


def token_ids(config: TokenizerConfig) -> TokenIds:
    """What a configuration with ``kind: none`` asks for."""
    return TokenIds(config.vocab_size, config.end_of_text_id)


def load_token_ids(file: Path) -> TokenIds:
    """Read ``token_ids.json``.

    Raises:
        DataError: It is damaged.
    """
    try:
        value: Any = json.loads(file.read_bytes())
        return TokenIds(int(value["vocab_size"]), int(value["end_of_text_id"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the description of the token ids is damaged", where=str(file)) from error
